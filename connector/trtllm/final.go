// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"bytes"
	"encoding/json"
	"errors"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Final lets P's answer be the client's, without disaggregated_params, if P has finished the request. For a client that wants a stream it is
// one chunk, then the usage if that was asked for. The official server sends such a client nothing but an end.
func (c *Connector) Final(s *connector.Session, p *connector.PrefillResult) (connector.Answer, bool) {
	var plain []byte
	err := withChoice(p, func(choice *jsonedit.Doc) (err error) {
		if c.together || !isFinal(choice) || !json.Valid(p.Body) {
			return errGoesOn
		}
		plain, err = jsonedit.DeleteIn(choice.Bytes(), paramsMember)
		return err
	})
	if err != nil {
		return connector.Answer{}, false
	}
	body, err := jsonedit.SetIn(p.Body, "choices", join("[", plain, "]"))
	if err == nil {
		body, err = jsonedit.DeleteIn(body, paramsMember)
	}
	if err != nil {
		return connector.Answer{}, false
	}
	answer := connector.Answer{Body: body}
	if s.Request.Stream {
		answer.Events = events(s, p, plain)
	}
	return answer, true
}

var errGoesOn = errors.New("trtllm: decode goes on")

// events are the stream's data: the chunk, the usage, the end.
func events(s *connector.Session, p *connector.PrefillResult, choice []byte) [][]byte {
	object := `"text_completion"`
	if s.API == connector.APIChat {
		object, choice = `"chat.completion.chunk"`, chatChunk(choice)
	}
	options, _ := s.Field("stream_options")
	usage, hasUsage := p.Field("usage")
	asked := hasUsage && gjson.GetBytes(options, "include_usage").Type == gjson.True

	head := []byte("{")
	for _, name := range []string{"id", "object", "created", "model"} {
		raw, ok := p.Field(name)
		if name == "object" {
			raw, ok = json.RawMessage(object), true
		}
		if ok {
			head = join(string(head), join(`"`+name+`":`, raw, ","), "")
		}
	}
	chunk := join(string(head)+`"choices":[`, choice, "]")
	if asked && gjson.GetBytes(options, "continuous_usage_stats").Type == gjson.True {
		chunk = join(string(chunk)+`,"usage":`, usage, "")
	}
	out := [][]byte{oneLine(append(chunk, '}'))}
	if asked {
		out = append(out, oneLine(join(string(head)+`"choices":[],"usage":`, usage, "}")))
	}
	return append(out, []byte("[DONE]"))
}

// oneLine removes white space between tokens: an event's data ends with its line.
func oneLine(chunk []byte) []byte {
	var line bytes.Buffer
	if json.Compact(&line, chunk) != nil {
		return chunk
	}
	return line.Bytes()
}

// chatChunk makes a chunk's choice of a whole answer's: message is called delta there, and tool calls are numbered.
func chatChunk(choice []byte) []byte {
	message := gjson.GetBytes(choice, "message")
	delta := []byte(message.Raw)
	if calls := message.Get("tool_calls"); message.IsObject() && calls.IsArray() {
		numbered, n := []byte("["), 0
		calls.ForEach(func(_, call gjson.Result) bool {
			one, err := jsonedit.SetIn([]byte(call.Raw), "index", connector.Int(n))
			if err != nil {
				one = []byte(call.Raw)
			}
			if n > 0 {
				numbered = append(numbered, ',')
			}
			numbered = append(numbered, one...)
			n++
			return true
		})
		if changed, err := jsonedit.SetIn(delta, "tool_calls", append(numbered, ']')); err == nil {
			delta = changed
		}
	}
	if len(delta) == 0 {
		delta = []byte("{}")
	}
	out, err := jsonedit.DeleteIn(choice, "message")
	if err == nil {
		out, err = jsonedit.SetIn(out, "delta", delta)
	}
	if err != nil {
		return choice
	}
	return out
}

func join(before string, middle []byte, after string) []byte {
	out := make([]byte, 0, len(before)+len(middle)+len(after)+64)
	return append(append(append(out, before...), middle...), after...)
}
