// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	"github.com/pdkit/pdkit/connector"
)

// checkNulls nulls each member of what engines send: of P's response with its handoff, of an event, of an encode
// engine's response and of a side call's. The connector must do what it does without the member. Releases differ in
// which of their optional members they write as null, and which they leave out.
func checkNulls(t *trial) error {
	err := t.each(plains, func(_ sample, p *played) error {
		err := t.nulls("P's response", p.response.Body, p, func(m *means, body []byte) {
			r := p.response
			r.Body = body
			m.respond = func(*connector.Session, []byte) Response { return r }
		})
		if err == nil && t.Event != nil {
			err = t.nulls("an event", t.Event(p.s).Body, p, func(m *means, body []byte) {
				m.event = func(*connector.Session) connector.Event { return connector.Event{Body: body, At: began} }
			})
		}
		if enc, ok := connector.As[connector.Encoder](t.c); err == nil && ok && t.Encoded != nil && len(p.encode) > 0 {
			err = t.nulls("an encode engine's response", t.Encoded(p.s, enc.Items(p.s)[0]), p,
				func(m *means, body []byte) {
					m.encoded = func(*connector.Session, connector.Item) json.RawMessage { return body }
				})
		}
		return err
	})
	if _, ok := connector.As[connector.Preparer](t.c); err != nil || !ok {
		return err
	}
	r := request(plain(t.apis[0]))
	for _, good := range t.callResponses(r) {
		err := t.nulls("a side call's response", good, &played{s: t.session(r, 6900), n: 6900},
			func(m *means, body []byte) {
				m.call = func(*http.Request) (*http.Response, error) { return reply(http.StatusOK, body), nil }
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// nulls compares what comes of a body with a member of null and of the body without that member, for each member.
func (t *trial) nulls(what string, good []byte, was *played, give func(m *means, body []byte)) error {
	for _, path := range paths(gjson.ParseBytes(good), "", nil) {
		holder := path[:max(strings.LastIndexByte(path, '.'), 0)]
		if holder != "" && !gjson.GetBytes(good, holder).IsObject() {
			continue // an element of a list
		}
		without, err := sjson.DeleteBytes(good, path)
		if err != nil {
			return err
		}
		null, err := sjson.SetRawBytes(good, path, []byte("null"))
		if err != nil {
			return err
		}
		absent, errAbsent := t.givenBody(was, without, give)
		nulled, errNull := t.givenBody(was, null, give)
		switch {
		case panicked(errNull):
			return fmt.Errorf("%s in which %s is null: %w", what, path, errNull)
		case errAbsent == nil && errNull != nil:
			return fmt.Errorf("%s in which %s is null is refused, and is not without it: %w", what, path, errNull)
		case errAbsent != nil && errNull == nil:
			return fmt.Errorf("%s in which %s is null is taken, and is not without it: %w", what, path, errAbsent)
		case errNull == nil && !absent.like(nulled):
			return fmt.Errorf("%s in which %s is null gives other legs than without it", what, path)
		}
	}
	return nil
}

// givenBody plays a session again with another body. A session of which no leg is known has a connector of its own,
// since a connector may keep what a side call found.
func (t *trial) givenBody(was *played, body []byte, give func(m *means, body []byte)) (p *played, err error) {
	if was.decode.body != nil {
		m := t.means()
		give(&m, body)
		return t.again(was, m)
	}
	err = t.anew(func(u *trial) error {
		m := u.means()
		give(&m, body)
		p, err = u.again(was, m)
		return err
	})
	return p, err
}

// like reports whether two sessions have the same legs, apart from members that are null.
func (p *played) like(q *played) bool {
	same := func(a, b sent) bool {
		return a.path == b.path && reflect.DeepEqual(a.header, b.header) &&
			reflect.DeepEqual(withoutNulls(a.body), withoutNulls(b.body))
	}
	return p.final == q.final && same(p.prefill, q.prefill) && same(p.decode, q.decode)
}

// withoutNulls is a JSON text without the members that are null.
func withoutNulls(body []byte) any {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var v any
	if d.Decode(&v) != nil {
		return string(body)
	}
	return dropNulls(v)
}

func dropNulls(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name, inner := range v {
			if inner == nil {
				delete(v, name)
			} else {
				v[name] = dropNulls(inner)
			}
		}
	case []any:
		for i := range v {
			v[i] = dropNulls(v[i])
		}
	}
	return v
}
