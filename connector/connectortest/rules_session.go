// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
)

// values are the strings and numbers that the connector has put into a leg, as texts.
func (t *trial) values(leg sent) map[string]bool {
	set := map[string]bool{leg.path: true}
	for _, h := range leg.header {
		set[h.Value] = true
	}
	for _, name := range t.own() {
		leaves(gjson.GetBytes(leg.body, gjsonPath(name)), func(v gjson.Result) {
			if v.Type == gjson.String {
				set[v.Str] = true
			} else {
				set[v.Raw] = true
			}
		})
	}
	return set
}

// gjsonName escapes a member's name for a gjson path.
func gjsonName(name string) string {
	var out []byte
	for i := range len(name) {
		if bytes.IndexByte([]byte(`.*?|#@!{}[]()=<>%"'\:`), name[i]) >= 0 {
			out = append(out, '\\')
		}
		out = append(out, name[i])
	}
	return string(out)
}

func leaves(v gjson.Result, visit func(gjson.Result)) {
	if v.IsObject() || v.IsArray() {
		v.ForEach(func(_, inner gjson.Result) bool { leaves(inner, visit); return true })
		return
	}
	if v.Type == gjson.String || v.Type == gjson.Number {
		visit(v)
	}
}

// minID is the shortest text that is taken for an id. A 64-bit number is mostly far longer.
const minID = 8

// checkIDs applies where Traits tells no other way for D to find the KV: legs of which D is not told by P's response,
// and that look in no store.
func checkIDs(t *trial) error {
	d := &t.traits
	beside := d.Order == connector.Together || d.Order == connector.DecodeThenPrefill
	if !beside && !d.OwnRequestID && (d.Handoff.Named() || d.Handoff.ContentStore || d.Handoff.MultiUse) {
		return notApplicable("P's response or a store tells D where the KV is, as Traits declares")
	}
	return t.excused(t.Except.NotByID, "NotByID", t.matchedByID())
}

// matchedByID compares three attempts of one request at one pair.
func (t *trial) matchedByID() error {
	r := request(plain(t.apis[0]))
	var shared []map[string]bool
	for n := range 3 {
		s := t.session(r, 1000+n)
		s.Attempt = n + 1
		p, err := t.play(s)
		if err != nil {
			return err
		}
		both := map[string]bool{}
		decode := t.values(p.decode)
		if id := p.prefill.requestID(); t.traits.OwnRequestID {
			both[id] = id == p.decode.requestID()
			shared = append(shared, both)
			continue
		}
		for v := range t.values(p.prefill) {
			if decode[v] && len(v) >= minID {
				both[v] = true
			}
		}
		shared = append(shared, both)
	}
	for i, both := range shared {
		fresh := 0
		for v, same := range both {
			if same && !slices.ContainsFunc(shared[:i], func(m map[string]bool) bool { return m[v] }) &&
				!slices.ContainsFunc(shared[i+1:], func(m map[string]bool) bool { return m[v] }) {
				fresh++
			}
		}
		if fresh == 0 {
			return fmt.Errorf("attempt %d: no value stands in both legs that other attempts do not share, so the "+
				"engines would match the wrong legs or none", i+1)
		}
	}
	return nil
}

// outcome is what equal sessions must agree in.
type outcome struct {
	Prefill, Decode sent
	First           *sent
	Err             string
}

func (t *trial) outcome(r *connector.ClientRequest, n int) outcome {
	p, err := t.play(t.session(r, n))
	o := outcome{Prefill: p.prefill, Decode: p.decode, First: p.first}
	if err != nil {
		o.Err = err.Error()
	}
	return o
}

func checkStateless(t *trial) error {
	type job struct {
		name string
		r    *connector.ClientRequest
		n    int
		want outcome
	}
	var jobs []job
	for _, api := range t.apis {
		for _, smp := range samples(api) {
			r := request(smp)
			j := job{name: smp.String(), r: r, n: 2000 + len(jobs)}
			if j.want = t.outcome(r, j.n); j.want.Err != "" {
				return fmt.Errorf("%s: %s", smp, j.want.Err)
			}
			jobs = append(jobs, j)
		}
	}
	var wg sync.WaitGroup
	faults := make([]error, len(jobs))
	for i, j := range jobs { // all sessions at once, but no session beside itself
		wg.Go(func() {
			for range 4 {
				if got := t.outcome(j.r, j.n); !reflect.DeepEqual(got, j.want) && faults[i] == nil {
					faults[i] = fmt.Errorf("%s: %s", j.name, unlike(j.want, got))
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(faults...)
}

func unlike(want, got outcome) string {
	switch {
	case got.Err != "":
		return "the same session once gave legs, and then: " + got.Err
	case !reflect.DeepEqual(want.Prefill, got.Prefill):
		return "the same session gave two different prefill legs"
	}
	return "the same session gave two different decode legs"
}

func checkBorrowed(t *trial) error {
	for i, api := range t.apis {
		smp := samples(api)[1]
		body := []byte(smp.body)
		r, err := connector.ParseRequest(api, body)
		if err != nil {
			return err
		}
		var response Response
		m := t.means()
		give := m.respond
		m.respond = func(s *connector.Session, prefill []byte) Response {
			response = give(s, prefill)
			return response
		}
		s := t.session(r, 3000+i)
		p, err := t.playWith(s, m)
		if err != nil {
			return fmt.Errorf("%s: %w", smp, err)
		}
		if string(body) != smp.body {
			return fmt.Errorf("%s: the client's body was changed", smp)
		}
		if !reflect.DeepEqual(response, give(s, p.prefill.body)) {
			return fmt.Errorf("%s: P's response was changed", smp)
		}
		clear(body) // the flow gives the memory to another request
		clear(response.Body)
		fresh := request(smp)
		again, err := t.play(t.session(fresh, 3000+i))
		if err != nil {
			return fmt.Errorf("%s: once the first request's memory was used again: %w", smp, err)
		}
		if !reflect.DeepEqual(p.prefill, again.prefill) || !reflect.DeepEqual(p.decode, again.decode) {
			return fmt.Errorf("%s: a later session's legs have bytes of the first one's body or response", smp)
		}
	}
	return nil
}
