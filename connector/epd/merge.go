// SPDX-License-Identifier: Apache-2.0

package epd

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// merged collects the ec_transfer_params of several responses, key by key in the order of the responses. A response of
// vLLM has an object for each item, {"<mm_hash>":{"metadata":{…},"peer_host":…,"peer_port":…,"size_bytes":…}}
// (vllm#47941). Before that change it had a list of them, {"ec_items":[{"mm_hash":…,…},…]}. So merged joins lists under
// the same key. Of other values under the same key it keeps the first: two requests had the same picture. A key that is
// null is as one that is absent. Everything else passes unchanged.
type merged struct {
	keys   []string
	values map[string]json.RawMessage
	lists  map[string][]json.RawMessage
	seen   map[string]bool // the elements that lists already have
}

// merge joins whole responses. It returns nil if none has parameters. needed is true if P cannot find the embeddings
// without parameters.
func merge(responses []json.RawMessage, needed bool) (json.RawMessage, error) {
	m := merged{values: map[string]json.RawMessage{}, lists: map[string][]json.RawMessage{}, seen: map[string]bool{}}
	for _, response := range responses {
		params, err := paramsOf(response)
		switch {
		case err != nil:
			return nil, err
		case params == nil:
			params = new(jsonedit.Doc)
		}
		some := false
		for i := range params.Len() {
			if jsonedit.Kind(params.Value(i)) == jsonedit.Null {
				continue
			}
			if err := m.add(params.Name(i), params.Value(i)); err != nil {
				return nil, err
			}
			some = true
		}
		if needed && !some {
			return nil, handoff.NoTransfer("an encode engine's response has no %s", paramsMember)
		}
	}
	return m.raw(), nil
}

// paramsOf reads the parameters of one response. It returns nil if they are null or absent.
func paramsOf(response json.RawMessage) (*jsonedit.Doc, error) {
	d, err := jsonedit.Parse(response)
	if err != nil {
		return nil, handoff.NoTransfer("an encode engine's response is not one JSON object")
	}
	raw, ok := d.Get(paramsMember)
	if !ok || jsonedit.Kind(raw) == jsonedit.Null {
		return nil, nil
	}
	params, err := jsonedit.Parse(raw)
	if err != nil || !utf8.Valid(raw) || !handoff.WellFormed(raw) {
		return nil, handoff.NoTransfer("%s is not a well-formed object", paramsMember)
	}
	return params, nil
}

func (m *merged) add(key string, value json.RawMessage) error {
	was, known := m.values[key]
	if !known {
		m.keys = append(m.keys, key)
		m.values[key] = value
	} else if jsonedit.Kind(was) != jsonedit.Kind(value) {
		return handoff.NoTransfer("%s of two encode engines do not fit together", paramsMember)
	}
	if jsonedit.Kind(value) != jsonedit.Array {
		return nil
	}
	var elements []json.RawMessage
	if json.Unmarshal(value, &elements) != nil {
		return handoff.NoTransfer("%s holds a malformed list", paramsMember)
	}
	for _, e := range elements {
		id := key + " " + identity(e)
		if !m.seen[id] {
			m.seen[id] = true
			m.lists[key] = append(m.lists[key], e)
		}
	}
	return nil
}

// identity is the same for elements about the same item.
func identity(e json.RawMessage) string {
	var item struct {
		Hash string `json:"mm_hash"`
	}
	if json.Unmarshal(e, &item) == nil && item.Hash != "" {
		return "mm_hash " + item.Hash
	}
	return string(e)
}

func (m *merged) raw() json.RawMessage {
	if len(m.keys) == 0 {
		return nil
	}
	out := []byte{'{'}
	for i, key := range m.keys {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(append(out, connector.Quote(key)...), ':')
		list, joined := m.lists[key]
		if !joined {
			out = append(out, m.values[key]...)
			continue
		}
		out = append(out, '[')
		for j, e := range list {
			if j > 0 {
				out = append(out, ',')
			}
			out = append(out, e...)
		}
		out = append(out, ']')
	}
	return append(out, '}')
}
