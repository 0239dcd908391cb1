// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/chunk"
)

// Final sends P's response to the client if nothing is left for D: P ended at its first token, or the client wanted one
// token. LMCache's own proxy asks D for 0 tokens in that case, and gets 400.
func (c *Connector) Final(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	if !c.options.RetFirstToken {
		return connector.Response{}, false
	}
	if !isLast(s.Request, p) {
		return connector.Response{}, false // most responses end here, without reading more
	}
	a, err := readResponse(s.Request.API, p)
	if err != nil || !json.Valid(p.Body) {
		return connector.Response{}, false // Decode returns the error
	}
	if s.Request.Stream {
		events, err := a.events(s.Request, p)
		return connector.Response{Events: events}, err == nil
	}
	return connector.Response{Body: a.whole(p.Body)}, true
}

// isLast reports whether nothing is left for D: the client wants one token, or P has ended.
func isLast(r *connector.ClientRequest, p *connector.PrefillResult) bool {
	if _, limit, given := limitOf(r); given && limit == 1 {
		return true
	}
	choices, _ := p.Field("choices")
	return gjson.GetBytes(choices, "0.finish_reason").Str == "stop"
}

// whole is P's response without the members that the client did not ask for. They become null, as vLLM sends them.
func (a *prefillResponse) whole(body []byte) []byte {
	paths := []string{"kv_transfer_params", "choices.0.token_ids", "choices.0.prompt_token_ids"}
	if a.api == connector.APIChat {
		paths[2] = "prompt_token_ids"
	}
	for _, path := range paths {
		if !gjson.GetBytes(body, path).Exists() {
			continue
		}
		if out, err := sjson.SetRawBytes(body, path, []byte("null")); err == nil {
			body = out
		}
	}
	return body
}

// vLLM's chunks of a choice, before P's text and reason are put in.
const (
	textChunk = `{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null}`
	roleChunk = `{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}`
	chatChunk = `{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"stop_reason":null}`
)

// events is P's response in the form of vLLM's stream: for a chat the role, then the text with the reason, then the
// usage if the client wants it. The error says that P's response holds something that is not JSON.
func (a *prefillResponse) events(r *connector.ClientRequest, p *connector.PrefillResult) (events [][]byte, err error) {
	stream := chunk.Of(a.api, p)
	add := func(choice, usage json.RawMessage) {
		event, e := stream.Event(choice, usage)
		events, err = append(events, event), errors.Join(err, e)
	}
	choice, path := textChunk, "text"
	if a.api == connector.APIChat {
		add(json.RawMessage(roleChunk), nil)
		choice, path = chatChunk, "delta."+a.member
	}
	text, reason := string(connector.Quote(a.text)), string(connector.Quote(a.reason))
	for path, raw := range map[string]string{path: text, "finish_reason": reason, "stop_reason": a.stop} {
		var e error
		choice, e = sjson.SetRaw(choice, path, raw)
		err = errors.Join(err, e)
	}
	add(json.RawMessage(choice), nil)
	if options, ok := r.Field("stream_options"); ok && gjson.GetBytes(options, "include_usage").Bool() {
		usage, there := p.Field("usage")
		if !there {
			usage = json.RawMessage("null")
		}
		add(nil, usage)
	}
	return append(events, []byte(chunk.Done)), err
}

// Rewrite puts P's token before D's response and corrects the usage: D counts this token as the last of its prompt, but
// it is the first of the response.
func (c *Connector) Rewrite(s *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if !c.options.RetFirstToken {
		return nil
	}
	a, err := readResponse(s.Request.API, p())
	if err != nil {
		return func([]byte) ([]byte, error) { return nil, err }
	}
	w := &rewriter{prefillResponse: a}
	return w.event
}

// rewriter rewrites one response of D.
type rewriter struct {
	*prefillResponse
	inserted bool // P's token is in the response
}

func (w *rewriter) event(data []byte) ([]byte, error) {
	if w.inserted && !bytes.Contains(data, []byte(`"usage"`)) {
		return data, nil
	}
	if !json.Valid(data) {
		return data, nil // it passes unchanged, and nothing in it counts as text
	}
	if !w.inserted {
		if path := w.textIn(data); path != "" {
			out, err := sjson.SetBytes(data, path, w.text+gjson.GetBytes(data, path).Str)
			if err != nil {
				return nil, err
			}
			data, w.inserted = out, true
		}
	}
	return recount(data)
}

// textIn returns the path of the text in an event or in a whole response, or "" if it has no choice. In a chat the
// first event has the role and empty content; P's text goes there.
func (w *rewriter) textIn(data []byte) string {
	choice := gjson.GetBytes(data, "choices.0")
	switch {
	case !choice.IsObject():
		return ""
	case w.api != connector.APIChat:
		return "choices.0.text"
	case choice.Get("delta").IsObject():
		return "choices.0.delta." + w.member
	case choice.Get("message").IsObject():
		return "choices.0.message." + w.member
	}
	return ""
}

// recount moves one token from the prompt's count to the response's in each event with usage. Their sum stays the same.
func recount(data []byte) ([]byte, error) {
	usage := gjson.GetBytes(data, "usage")
	if !usage.IsObject() {
		return data, nil
	}
	for name, by := range map[string]int64{"prompt_tokens": -1, "completion_tokens": 1} {
		n := usage.Get(name)
		if n.Type != gjson.Number {
			continue
		}
		out, err := sjson.SetBytes(data, "usage."+name, n.Int()+by)
		if err != nil {
			return nil, err
		}
		data = out
	}
	return data, nil
}
