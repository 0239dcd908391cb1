// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	read "github.com/pdkit/pdkit/connector/handoff"
)

// scenario is an order, and what D does in it.
type scenario struct {
	name     string
	order    connector.Order
	cold     bool          // D asks for a prefill by its response
	asks     bool          // D asks for a prefill by an event
	finishes bool          // a leg that P has got runs on after its attempt
	rescues  int           // how often a stream may go on at another pair
	hedge    time.Duration // after which a second prefill is sent; 0: none
	transfer time.Duration // Timeouts.Transfer; 0: none
}

var scenarios = []scenario{
	{name: "prefill-then-decode", order: connector.PrefillThenDecode},
	{name: "together", order: connector.Together},
	{name: "together, P finishes", order: connector.Together, finishes: true},
	{name: "decode-first, cold", order: connector.DecodeFirst, cold: true},
	{name: "decode-first, warm", order: connector.DecodeFirst},
	{name: "decode-then-prefill", order: connector.DecodeThenPrefill, asks: true},
	{name: "decode-then-prefill, not asked", order: connector.DecodeThenPrefill},
}

// transferring are the scenarios in which a transfer has a limit. All requests are streams: of others a synthetic probe
// would have to tell whether D generates.
var transferring = []scenario{
	{name: "prefill-then-decode, transfer limit", order: connector.PrefillThenDecode, transfer: transferLimit},
	{name: "together, transfer limit", order: connector.Together, transfer: transferLimit},
	{name: "together, P finishes, transfer limit", order: connector.Together, finishes: true, transfer: transferLimit},
}

// rescuing are the scenarios with rescue or a hedged prefill, which only the random runs have.
var rescuing = []scenario{
	{name: "prefill-then-decode, rescue", order: connector.PrefillThenDecode, rescues: 1},
	{name: "together, two rescues", order: connector.Together, rescues: 2},
	{name: "together, P finishes, rescue", order: connector.Together, finishes: true, rescues: 1},
	{name: "prefill-then-decode, rescue, transfer limit", order: connector.PrefillThenDecode, rescues: 1,
		transfer: transferLimit},
	{name: "prefill-then-decode, rescue, hedged", order: connector.PrefillThenDecode, rescues: 1, hedge: hedgeTime},
}

// beside reports whether both legs may run at one time.
func (s scenario) beside() bool { return s.order == connector.Together || s.asks }

// protocol is a connector for a scenario. Both legs carry the session's id as their room. P's response has a handoff
// that D may read once, where the order lets D have it.
type protocol struct {
	scenario
	w *world

	mu     sync.Mutex
	events map[string]chan struct{} // by room
}

func newProtocol(w *world, s scenario) *protocol {
	return &protocol{scenario: s, w: w, events: map[string]chan struct{}{}}
}

// hands reports whether D reads a handoff of P's response.
func (p *protocol) hands() bool {
	return p.order == connector.PrefillThenDecode || p.order == connector.DecodeFirst
}

func (p *protocol) connector() connector.KVConnector {
	switch p.order {
	case connector.DecodeFirst:
		return &coldProtocol{p}
	case connector.DecodeThenPrefill:
		return &askingProtocol{p}
	}
	return p
}

func (p *protocol) Traits() connector.Traits {
	t := connector.Traits{Name: "states", Order: p.order, Members: []string{connector.ParamsMember},
		Handoff: connector.Handoff{Lease: leaseTime},
		Ending:  connector.Ending{Orphans: p.order == connector.Together, PrefillFinishes: p.finishes}}
	if p.hands() {
		t.Handoff.Member = connector.ParamsMember
	}
	return t
}

func quoted(s string) json.RawMessage { return json.RawMessage(`"` + s + `"`) }

func (p *protocol) Prefill(_ context.Context, s *connector.Session, l *connector.Leg) error {
	l.Param("room", quoted(s.ID))
	return nil
}

func (p *protocol) Decode(_ context.Context, s *connector.Session, r *connector.PrefillResult,
	l *connector.Leg) error {
	l.Param("room", quoted(s.ID))
	if r == nil || !p.hands() {
		return nil
	}
	var got struct {
		Params struct{ Handoff string } `json:"kv_transfer_params"`
	}
	if json.Unmarshal(r.Body, &got) != nil || got.Params.Handoff == "" {
		return read.NoTransfer("the handoff is missing")
	}
	l.Param("handoff", quoted(got.Params.Handoff))
	return nil
}

func (p *protocol) Clean(_ context.Context, s *connector.Session, _ error, _ connector.Caller) error {
	p.w.note(s.ID, func(b *session) { b.cleaned++ })
	return nil
}

type coldProtocol struct{ *protocol }

func (*coldProtocol) Cold(_ *connector.Session, _ int, head []byte) bool {
	return strings.Contains(string(head), "cache_threshold")
}

type askingProtocol struct{ *protocol }

func (p *askingProtocol) Expect(s *connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
	p.w.note(s.ID, func(b *session) { b.expected++ })
	ch := p.event(s.ID)
	return func(ctx context.Context) (connector.Event, error) {
			select {
			case <-ch:
				return connector.Event{}, nil
			case <-ctx.Done():
				return connector.Event{}, ctx.Err()
			}
		}, func(error) {
			p.w.note(s.ID, func(b *session) { b.expectDone++ })
		}
}

func (p *protocol) event(room string) chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	ch := p.events[room]
	if ch == nil {
		ch = make(chan struct{})
		p.events[room] = ch
	}
	return ch
}

// ask is D's event.
func (p *protocol) ask(room string) { close(p.event(room)) }
