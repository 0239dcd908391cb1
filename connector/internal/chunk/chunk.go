// SPDX-License-Identifier: Apache-2.0

// Package chunk turns P's whole response into stream events for a client that wants a stream.
package chunk

import (
	"bytes"
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
)

// Done is the data of the last event.
const Done = "[DONE]"

// Stream holds what all events of one response share. Members that P's response does not have are left out.
type Stream struct {
	ID      json.RawMessage `json:"id,omitempty"`
	Object  string          `json:"object"`
	Created json.RawMessage `json:"created,omitempty"`
	Model   json.RawMessage `json:"model,omitempty"`
}

// Of returns the stream for P's response to a chat or a completion.
func Of(api connector.API, p *connector.PrefillResult) Stream {
	s := Stream{Object: "text_completion"}
	if api == connector.APIChat {
		s.Object = "chat.completion.chunk"
	}
	s.ID, _ = p.Field("id")
	s.Created, _ = p.Field("created")
	s.Model, _ = p.Field("model")
	return s
}

// Event returns an event's data in one line, however P's response is spaced. choice is nil for an event without
// choices, usage for one without counts. The error says that choice, usage or a member of P's response is not JSON.
func (s Stream) Event(choice, usage json.RawMessage) ([]byte, error) {
	choices := []json.RawMessage{}
	if choice != nil {
		choices = append(choices, choice)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // the text stays as P spells it
	err := enc.Encode(struct {
		Stream
		Choices []json.RawMessage `json:"choices"`
		Usage   json.RawMessage   `json:"usage,omitempty"`
	}{s, choices, usage})
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}
