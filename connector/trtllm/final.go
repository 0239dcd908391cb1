// SPDX-License-Identifier: Apache-2.0

package trtllm

import (
	"encoding/json"
	"errors"
	"strconv"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/chunk"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Final sends P's response to the client, without disaggregated_params, if P has finished the request. A client that
// wants a stream gets it as one chunk, and then the usage if it asked for it. The official server sends such a client
// only the end of the stream.
func (c *Connector) Final(s *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	err := withChoice(p, func(choice *jsonedit.Doc) error {
		if c.together || !isFinal(choice) || !json.Valid(p.Body) {
			return errGoesOn
		}
		return nil
	})
	r := connector.Response{Body: p.Body}
	for _, path := range []string{paramsMember, "choices.0." + paramsMember} {
		if err == nil {
			r.Body, err = sjson.DeleteBytes(r.Body, path)
		}
	}
	if err == nil && s.Request.Stream {
		r.Events, err = events(s, p, []byte(gjson.GetBytes(r.Body, "choices.0").Raw))
	}
	if err != nil {
		return connector.Response{}, false
	}
	return r, true
}

var errGoesOn = errors.New("trtllm: decode goes on")

// events are the data of the stream: the chunk, the usage, the end.
func events(s *connector.Session, p *connector.PrefillResult, choice []byte) (events [][]byte, err error) {
	if s.API == connector.APIChat {
		if choice, err = chatChunk(choice); err != nil {
			return nil, err
		}
	}
	options, _ := s.Field("stream_options")
	usage, hasUsage := p.Field("usage")
	asked := hasUsage && gjson.GetBytes(options, "include_usage").Type == gjson.True
	var withChoice json.RawMessage
	if asked && gjson.GetBytes(options, "continuous_usage_stats").Type == gjson.True {
		withChoice = usage
	}
	stream := chunk.Of(s.API, p)
	first, err := stream.Event(choice, withChoice)
	events = append(events, first)
	if err == nil && asked {
		var last []byte
		last, err = stream.Event(nil, usage)
		events = append(events, last)
	}
	return append(events, []byte(chunk.Done)), err
}

// chatChunk makes a chunk's choice from a whole response's choice: message becomes delta, and tool calls get numbers.
func chatChunk(choice []byte) ([]byte, error) {
	delta := "{}"
	if message := gjson.GetBytes(choice, "message"); message.IsObject() {
		delta = message.Raw
	}
	out, err := sjson.DeleteBytes(choice, "message")
	if err == nil {
		out, err = sjson.SetRawBytes(out, "delta", []byte(delta))
	}
	calls := gjson.Get(delta, "tool_calls")
	if !calls.IsArray() {
		return out, err
	}
	for i, call := range calls.Array() {
		if err == nil && call.IsObject() {
			out, err = sjson.SetBytes(out, "delta.tool_calls."+strconv.Itoa(i)+".index", i)
		}
	}
	return out, err
}
