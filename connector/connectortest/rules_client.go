// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
)

// clients are requests whose responses a connector may make itself or rewrite.
func clients(api connector.API) []sample {
	s := shapes[api]
	stream := []string{`"stream":true`, `"stream_options":{"include_usage":true}`}
	list := []sample{plain(api), {api, "streamed", s.body("", stream...)}}
	if s.logprobs != "" {
		list = append(list, sample{api, "streamed with log probabilities", s.body(s.logprobs, stream...)},
			sample{api, "with log probabilities", s.body(s.logprobs)})
	}
	if api == connector.APISGLang {
		list = append(list, sample{api, "with log probabilities", s.body("", `"return_logprob":true`)})
	}
	return list
}

// checkFinal finishes requests at P: the client gets P's response, as an engine that served alone would have given it.
func checkFinal(t *trial) error {
	f, ok := connector.As[connector.Finisher](t.c)
	if !ok {
		return notApplicable("no response of P's is the client's")
	}
	finals := 0
	err := t.each(clients, func(_ sample, p *played) error {
		for _, b := range p.response.with(finished(p.response.Body)) {
			var given connector.Response
			var final bool
			err := guard(func() error {
				given, final = f.Final(p.s, b.result())
				return nil
			})
			if err == nil && final {
				finals++
				err = t.checkFinished(given, p.s.Request.Stream)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && finals == 0 {
		return notApplicable("Final takes none of the responses that the suite makes")
	}
	return err
}

// finished are responses that P ended itself, in one line and in several.
func finished(body []byte) (list []mutant) {
	for path, reasons := range map[string][]string{
		"choices.0.finish_reason": {"stop", "tool_calls"}, "stop_reason": {"end_turn"}, "status": {"completed"},
		"meta_info.finish_reason.type": {"stop"},
	} {
		if !gjson.GetBytes(body, path).Exists() {
			continue
		}
		for _, reason := range reasons {
			ended, err := sjson.SetBytes(body, path, reason)
			if err == nil && path == "status" {
				ended, err = sjson.DeleteBytes(ended, "incomplete_details")
			}
			var pretty bytes.Buffer
			if err == nil && json.Indent(&pretty, ended, "", "  ") == nil {
				what := path + " is " + reason
				list = append(list, mutant{what, ended}, mutant{what + ", in several lines", pretty.Bytes()})
			}
		}
	}
	return list
}

func (t *trial) checkFinished(a connector.Response, stream bool) error {
	if !stream || len(a.Events) == 0 {
		if stream {
			return errors.New("a client that asked for a stream gets no events")
		}
		if !gjson.ValidBytes(a.Body) || !gjson.ParseBytes(a.Body).IsObject() {
			return errors.New("the client's response is not one JSON object")
		}
		return t.noTransfer(a.Body)
	}
	for _, event := range a.Events {
		if err := t.checkEvent(event); err != nil {
			return err
		}
	}
	if last := a.Events[len(a.Events)-1]; string(last) != "[DONE]" {
		return errors.New("the client's stream does not end with [DONE]")
	}
	return nil
}

func (t *trial) checkEvent(event []byte) error {
	switch {
	case bytes.ContainsAny(event, "\r\n"):
		return errors.New("an event has several lines, of which the client reads the first")
	case string(event) != "[DONE]" && !gjson.ValidBytes(event):
		return errors.New("an event is not JSON")
	}
	return t.noTransfer(event)
}

// noTransfer looks for transfer members that are not null: whoever has them can read another's KV.
func (t *trial) noTransfer(body []byte) (fault error) {
	at := strings.Split(t.traits.Handoff.Member, ".")
	names := append(append(slices.Clone(transferMembers), t.traits.Members...), at[len(at)-1])
	var walk func(v gjson.Result)
	walk = func(v gjson.Result) {
		object := v.IsObject()
		if !object && !v.IsArray() {
			return
		}
		v.ForEach(func(key, inner gjson.Result) bool {
			if object && inner.Type != gjson.Null && slices.Contains(names, key.Str) {
				fault = fmt.Errorf("the client gets %s", key.Str)
			}
			walk(inner)
			return fault == nil
		})
	}
	walk(gjson.ParseBytes(body))
	return fault
}

// The texts of D's responses, which must all reach the client.
var decoded = []string{"alpha-text", "beta-text"}

// checkRewrite has D's response rewritten: nothing of its text is lost, and what comes out can be read.
func checkRewrite(t *trial) error {
	w, ok := connector.As[connector.Rewriter](t.c)
	if !ok {
		return notApplicable("D's response is the client's as it is")
	}
	rewrites := 0
	err := t.each(clients, func(smp sample, p *played) error {
		events := responseOf(smp.api, p.s.Request.Stream)
		if events == nil {
			return nil
		}
		for _, result := range []*connector.PrefillResult{p.response.result(), nil} {
			fn := w.Rewrite(p.s, func() *connector.PrefillResult { return result })
			if fn == nil {
				continue
			}
			rewrites++
			if err := checkRewritten(fn, events, result != nil); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil && rewrites == 0 {
		return notApplicable("Rewrite leaves the suite's requests as they are")
	}
	return err
}

// responseOf is D's response in parts: a stream's events, or one body. nil where the suite has none.
func responseOf(api connector.API, stream bool) (parts []string) {
	if !stream {
		body := responseTexts[api]
		if !strings.Contains(body, `"a"`) {
			return nil
		}
		return []string{strings.Replace(body, `"a"`, `"`+strings.Join(decoded, "")+`"`, 1)}
	}
	switch api {
	case connector.APIChat:
		const head = `{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":`
		parts = []string{head + `[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,` +
			`"finish_reason":null}]}`}
		for _, text := range decoded {
			parts = append(parts, head+`[{"index":0,"delta":{"content":"`+text+
				`"},"logprobs":null,"finish_reason":null}]}`)
		}
		return append(parts, head+`[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}`,
			head+`[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}`)
	case connector.APICompletions:
		const head = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":`
		for _, text := range decoded {
			parts = append(parts, head+`[{"index":0,"text":"`+text+`","logprobs":null,"finish_reason":null}]}`)
		}
		return append(parts, head+`[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}`,
			head+`[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}`)
	}
	return nil
}

// checkRewritten runs a response through. An error is the session's, which is allowed where P's response is missing.
func checkRewritten(fn func([]byte) ([]byte, error), parts []string, answered bool) error {
	var all strings.Builder
	for _, part := range parts {
		var out []byte
		err := guard(func() (err error) { out, err = fn([]byte(part)); return err })
		switch {
		case panicked(err) || err != nil && answered:
			return err
		case err != nil:
			return nil //nolint:nilerr // the session ends with the connector's own error
		case out == nil:
			continue
		}
		if !gjson.ValidBytes(out) || len(parts) > 1 && bytes.ContainsAny(out, "\r\n") {
			return errors.New("what was rewritten is not JSON in one line")
		}
		all.Write(out)
	}
	rest := all.String()
	for _, text := range decoded {
		_, after, found := strings.Cut(rest, text)
		if !found {
			return fmt.Errorf("the response's %s is lost, or not where it was", text)
		}
		rest = after
	}
	return nil
}
