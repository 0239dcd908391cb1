// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bytes"
	"encoding/json"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
)

// Final lets P's answer be the client's where nothing is left for D: P ended at its first token, or the client wanted no more. LMCache's
// own proxy asks D for 0 tokens then, and gets 400.
func (c *Connector) Final(s *connector.Session, p *connector.PrefillResult) (connector.Answer, bool) {
	if !c.options.RetFirstToken {
		return connector.Answer{}, false
	}
	if !isLast(s.Request, p) {
		return connector.Answer{}, false // as most are not; nothing else has to be read
	}
	a, err := readAnswer(s.Request.API, p)
	if err != nil || !json.Valid(p.Body) {
		return connector.Answer{}, false // Decode tells
	}
	if s.Request.Stream {
		return connector.Answer{Events: a.events(s.Request, p)}, true
	}
	return connector.Answer{Body: a.whole(p.Body)}, true
}

// isLast says whether nothing is left for D: the client wants one token, or P has ended.
func isLast(r *connector.Request, p *connector.PrefillResult) bool {
	if _, limit, given := limitOf(r); given && limit == 1 {
		return true
	}
	choices, _ := p.Field("choices")
	return gjson.GetBytes(choices, "0.finish_reason").Str == "stop"
}

// whole is P's answer without what the client did not ask for. vLLM sends such members as null.
func (a *answer) whole(body []byte) []byte {
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

// events are P's answer as vLLM streams one: for a chat the role, then the text with the reason, then the counts if they are wanted.
func (a *answer) events(r *connector.Request, p *connector.PrefillResult) [][]byte {
	own := func(name string) string {
		if raw, ok := p.Field(name); ok {
			return string(raw)
		}
		return "null"
	}
	object, choices := "text_completion", []string{`[{"index":0,"text":` + quoted(a.text) + `,"logprobs":null,"finish_reason":` + quoted(a.reason) + `,"stop_reason":` + a.stop + `}]`}
	if a.api == connector.APIChat {
		object = "chat.completion.chunk"
		choices = []string{
			`[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`,
			`[{"index":0,"delta":{` + quoted(a.member) + `:` + quoted(a.text) + `},"logprobs":null,"finish_reason":` + quoted(a.reason) + `,"stop_reason":` + a.stop + `}]`,
		}
	}
	chunk := func(choices, usage string) []byte {
		var b bytes.Buffer
		event := `{"id":` + own("id") + `,"object":` + quoted(object) + `,"created":` + own("created") + `,"model":` + own("model") + `,"choices":` + choices + usage + `}`
		if json.Compact(&b, []byte(event)) != nil { // an event is one line, however P spaces its answer; its JSON is known to be valid
			return []byte(event)
		}
		return b.Bytes()
	}
	var events [][]byte
	for _, c := range choices {
		events = append(events, chunk(c, ""))
	}
	if options, ok := r.Field("stream_options"); ok && gjson.GetBytes(options, "include_usage").Bool() {
		events = append(events, chunk("[]", `,"usage":`+own("usage")))
	}
	return append(events, []byte("[DONE]"))
}

func quoted(s string) string { return string(connector.Quote(s)) }

// Rewrite puts P's token before D's answer, and the counts right: what D takes for the last token of its prompt is the answer's first.
func (c *Connector) Rewrite(s *connector.Session, p func() *connector.PrefillResult) connector.EventFunc {
	if !c.options.RetFirstToken {
		return nil
	}
	a, err := readAnswer(s.Request.API, p())
	if err != nil {
		return func([]byte) ([]byte, error) { return nil, err }
	}
	w := &rewriter{answer: a}
	return w.event
}

// rewriter rewrites one answer of D.
type rewriter struct {
	*answer
	told bool // P's token was put in
}

func (w *rewriter) event(data []byte) ([]byte, error) {
	if w.told && !bytes.Contains(data, []byte(`"usage"`)) {
		return data, nil
	}
	if !json.Valid(data) {
		return data, nil // not for us to judge; nothing of it may be taken for an answer
	}
	if !w.told {
		if path := w.textIn(data); path != "" {
			out, err := sjson.SetBytes(data, path, w.text+gjson.GetBytes(data, path).Str)
			if err != nil {
				return nil, err
			}
			data, w.told = out, true
		}
	}
	return recount(data)
}

// textIn returns the path of the text in an event or in a whole answer, "" if it has no choice. A chat's first event has the role and
// empty content: P's text goes there.
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

// recount moves one token from the prompt to the answer, wherever an event has counts. Their sum stays.
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
