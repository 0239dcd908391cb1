// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Fuzz is a fuzz test's body: whatever a client sends and whatever P answers, nothing panics, the legs are well-formed,
// and the members that the protocol does not own are the client's to the byte. Its seeds are the suite's own requests
// and responses.
func Fuzz(f *testing.F, h Harness) {
	f.Helper()
	if err := h.fill(); err != nil {
		f.Fatal(err)
	}
	t, err := h.newTrial(f.Context(), true)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		if closer, ok := connector.As[io.Closer](t.c); ok && t.started {
			if err := closer.Close(); err != nil {
				f.Error(err)
			}
		}
	})
	for _, api := range t.apis {
		for _, smp := range append(all(api), forged(api, t.traits.Members)...) {
			f.Add(byte(api), []byte(smp.body), []byte(nil))
		}
		p, err := t.play(t.session(request(plain(api)), 1))
		if err != nil {
			f.Fatal(err)
		}
		for _, b := range append(wholes(p.response.Body), mutant{"good", p.response.Body}) {
			if len(b.body) < 10_000 { // a corpus of long inputs is slow and finds nothing
				f.Add(byte(api), []byte(plain(api).body), b.body)
			}
		}
	}
	f.Fuzz(func(ft *testing.T, api byte, body, response []byte) {
		u := &trial{Harness: t.Harness, ctx: ft.Context(), c: t.c, traits: t.traits, order: t.order, started: t.started}
		if err := u.fuzz(connector.API(api%byte(len(connector.APIs())+1)), body, response); err != nil {
			ft.Error(err)
		}
	})
}

// fuzz plays one exchange. No response is the harness's good one.
func (t *trial) fuzz(api connector.API, body, response []byte) error {
	before := string(body)
	r, err := connector.ParseRequest(api, body)
	if err != nil || t.unsupported(r) != "" {
		return nil //nolint:nilerr // a request that the flow refuses has no legs
	}
	m := t.means()
	if len(response) > 0 {
		m.respond = func(s *connector.Session, prefill []byte) Response {
			r := t.means().respond(s, prefill)
			if r.Body = response; t.traits.Handoff.Header != "" {
				r.Header.Set(t.traits.Handoff.Header, string(response))
			}
			return r
		}
	}
	p, err := t.playWith(t.session(r, 1), m)
	if string(body) != before {
		return errors.New("the client's body was changed")
	}
	if err != nil {
		if panicked(err) {
			return err
		}
		return nil
	}
	free := append(t.own(), t.normal(shapes[api])...)
	legs := []struct {
		leg  sent
		free []string
	}{{p.prefill, free}, {p.decode, t.own()}}
	if p.final {
		legs = legs[:1]
	}
	for _, l := range legs {
		if json.Valid(body) && !json.Valid(l.leg.body) {
			return errors.New("a valid request has become a leg that is not JSON")
		}
		if _, err := jsonedit.Parse(l.leg.body); err != nil {
			return err
		}
		if err := same(p.s.Request, l.leg.body, l.free); err != nil {
			return err
		}
		if err := keeps(body, l.leg.body, append(l.free, stripped...)); err != nil {
			return err
		}
		if err := strips(l.leg.body, t.own()); err != nil {
			return err
		}
	}
	return nil
}

// stripped are the members that no client's request takes to an engine, and the objects in which engines read some.
var stripped = slices.Concat(transferMembers, []string{"request_id", "rid"}, holders)

var holders = []string{"vllm_xargs", "sampling_params"}

// keeps reads the client's body by itself: each member has the same bytes in the leg, but for the free ones.
func keeps(client, leg []byte, free []string) error {
	was, now := mustParse(client), mustParse(leg)
	for i := range was.Len() {
		name := was.Name(i)
		isFree := func(path string) bool { return path == name || strings.HasPrefix(path, name+".") }
		if got, _ := now.Get(name); !bytes.Equal(got, was.Value(i)) && !slices.ContainsFunc(free, isFree) {
			return fmt.Errorf("the client's member %q is not the same to the byte", name)
		}
	}
	return nil
}

// strips finds a transfer member in a leg that is not the connector's own.
func strips(leg []byte, own []string) error {
	d := mustParse(leg)
	for _, name := range stripped[:len(stripped)-len(holders)] {
		if _, left := d.Get(name); left && !slices.Contains(own, name) {
			return fmt.Errorf("the leg has the client's %s", name)
		}
		for _, holder := range holders {
			raw, _ := d.Get(holder)
			if _, left := mustParse(raw).Get(name); left && slices.Contains(transferMembers, name) {
				return fmt.Errorf("the leg has the client's %s in its %s", name, holder)
			}
		}
	}
	return nil
}
