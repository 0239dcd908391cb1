// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"maps"
	"net/http"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
)

// plantedBodies are bodies with a planted value in place of each value.
func plantedBodies(good []byte) []mutant {
	planted := []byte(`"` + plantedValue + `"`)
	list := []mutant{
		{"it is a text", planted},
		{"it is not JSON", []byte(plantedValue)},
		{"it is cut", []byte(`{"kv_transfer_params":{"a":"` + plantedValue)},
		{"it has a member twice", []byte(`{"` + plantedValue + `":1,"` + plantedValue + `":2}`)},
		{"it has an unknown key", []byte(`{"kv_transfer_params":{"` + plantedValue + `":1}}`)},
	}
	for _, path := range paths(gjson.ParseBytes(good), "", nil) {
		if body, err := sjson.SetRawBytes(good, path, planted); err == nil {
			list = append(list, mutant{path + " is a text", body})
		}
	}
	return list
}

// callSecrets has side calls and attributes fail with planted values.
func (t *trial) callSecrets(tell func(string, error) error) error {
	r := request(plain(t.apis[0]))
	refused := func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") }
	failing := []connector.Caller{refused}
	for _, response := range t.callResponses(r) {
		for _, b := range append(plantedBodies(response), mutant{"it has status 500", []byte(plantedValue)}) {
			failing = append(failing, func(*http.Request) (*http.Response, error) { return b.reply(), nil })
		}
	}
	for _, call := range failing {
		var got error
		err := t.anew(func(u *trial) error {
			m := u.means()
			m.call = call
			_, got = u.playWith(u.session(r, 8900), m)
			return nil
		})
		if err != nil {
			return err
		}
		if err := tell("a side call's response", got); err != nil {
			return err
		}
	}
	for name := range t.Prefill.Attributes {
		good := t.Prefill
		t.Prefill.Attributes = maps.Clone(good.Attributes)
		t.Prefill.Attributes[name] = plantedValue
		var got error
		err := t.anew(func(u *trial) error { _, got = u.play(u.session(r, 8901)); return nil })
		t.Prefill = good
		if err != nil {
			return err
		}
		if err := tell("prefill's attribute "+name, got); err != nil {
			return err
		}
	}
	return nil
}
