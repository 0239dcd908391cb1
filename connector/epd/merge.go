// SPDX-License-Identifier: Apache-2.0

package epd

import (
	"encoding/json"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// itemsKey holds a list in the answers of vLLM up to about 0.29: {"ec_items":[{"mm_hash":…,…},…]}. Later ones answer an object per item:
// {"<mm_hash>":{"metadata":{…},"peer_host":…,"peer_port":…,"size_bytes":…}} (vllm#47941). Both are merged by key, the lists joined.
const itemsKey = "ec_items"

// merge joins the ec_transfer_params of whole answers, nil if none has any. An item that two answers report, since two requests had the
// same picture, stays as the first says. needed tells that P cannot find the embeddings without.
func merge(answers []json.RawMessage, needed bool) (json.RawMessage, error) {
	out := json.RawMessage("{")
	var list []byte
	seen := map[string]bool{}
	found := false
	for _, answer := range answers {
		params, err := paramsOf(answer)
		if err != nil {
			return nil, err
		}
		if params == nil || params.Len() == 0 {
			if needed {
				return nil, connector.NoTransfer("an encode engine's answer has no %s", paramsMember)
			}
			continue
		}
		found = true
		for i := range params.Len() {
			name, value := params.Name(i), params.Value(i)
			if name == itemsKey {
				if list, err = joinItems(list, value, seen); err != nil {
					return nil, err
				}
				continue
			}
			if jsonedit.Kind(value) != jsonedit.Object {
				return nil, connector.NoTransfer("%s holds what is not an object", paramsMember)
			}
			if seen["key "+name] {
				continue
			}
			seen["key "+name] = true
			out = append(append(append(comma(out), connector.Quote(name)...), ':'), value...)
		}
	}
	if !found {
		return nil, nil
	}
	if list != nil {
		out = append(append(append(comma(out), `"`+itemsKey+`":[`...), list...), ']')
	}
	return append(out, '}'), nil
}

func comma(b []byte) []byte {
	if len(b) > 1 {
		return append(b, ',')
	}
	return b
}

// paramsOf reads one answer. Null and absent are nil.
func paramsOf(answer json.RawMessage) (*jsonedit.Doc, error) {
	d, err := jsonedit.Parse(answer)
	if err != nil {
		return nil, connector.NoTransfer("an encode engine's answer is not one JSON object")
	}
	raw, ok := d.Get(paramsMember)
	if !ok || jsonedit.Kind(raw) == jsonedit.Null {
		return nil, nil
	}
	params, err := jsonedit.Parse(raw)
	if err != nil || !json.Valid(raw) {
		return nil, connector.NoTransfer("%s is not a well-formed object", paramsMember)
	}
	return params, nil
}

// joinItems appends a list's elements that are not there yet. Each names its item by a hash.
func joinItems(list []byte, raw json.RawMessage, seen map[string]bool) ([]byte, error) {
	var elements []json.RawMessage
	if jsonedit.Kind(raw) != jsonedit.Array || json.Unmarshal(raw, &elements) != nil {
		return nil, connector.NoTransfer("%s is not a list", itemsKey)
	}
	for _, e := range elements {
		var item struct {
			Hash string `json:"mm_hash"`
		}
		if json.Unmarshal(e, &item) != nil || item.Hash == "" {
			return nil, connector.NoTransfer("%s holds an item without mm_hash", itemsKey)
		}
		if seen["item "+item.Hash] {
			continue
		}
		seen["item "+item.Hash] = true
		if len(list) > 0 {
			list = append(list, ',')
		}
		list = append(list, e...)
	}
	if list == nil {
		list = []byte{}
	}
	return list, nil
}
