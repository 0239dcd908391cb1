// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// ledger has the books of a world: what the engines were sent, and what the flow told its observers. check compares
// them, by the rules that nothing may break.
type ledger struct {
	mu       sync.Mutex
	breaches []string
	handoffs map[string]*handoff
	seen     map[string]int // legs that engines have read, by role, room and handoff
	sessions map[string]*session
	requests map[string][]*session // by request id, in their order
	picks    []*choiceOf
	spans    spans
	meter    meter
	givers   map[string]*leg // D's legs that made tokens which the client had not, by room
	measured int             // legs that were begun and described
	cut      int             // legs that a shutdown has cut
}

func (b *ledger) init() {
	b.handoffs, b.seen = map[string]*handoff{}, map[string]int{}
	b.givers = map[string]*leg{}
	b.sessions, b.requests = map[string]*session{}, map[string][]*session{}
	b.meter.init()
}

// handoff is KV that P holds for D.
type handoff struct {
	prompt string
	leg    *leg
	until  time.Time // end of the lease; zero while P still sends its response
	used   int
}

// session is what observers and the connector were told of one attempt.
type session struct {
	id                            string
	started, ended                int
	legsStarted, legsEnded        [2]int
	over, begun, done             time.Time // of the session, and of its prefill leg
	expected, expectDone, cleaned int
	out                           pdflow.Outcome
	rescues                       *leg // D's, with whose stream this attempt may go on; nil for none
}

// choiceOf is one pick.
type choiceOf struct {
	done, prefillDone int
	session           string
	runs              bool // Done was told that P's leg runs on
	declined          bool // nothing was sent
}

// note changes what is known of a session.
func (b *ledger) note(id string, f func(*session)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.sessions[id]
	if s == nil {
		s = &session{id: id}
		b.sessions[id] = s
	}
	f(s)
}

func legIndex(k pdflow.LegKind) int {
	if k == pdflow.LegDecode {
		return 1
	}
	return 0
}

func (w *world) observer() pdflow.Observer {
	return pdflow.Observer{
		SessionStart: func(_ context.Context, s *connector.Session) {
			c := w.byID(s.RequestID)
			w.note(s.ID, func(b *session) {
				b.started++
				b.rescues = w.cutStream(c, w.requests[s.RequestID])
				w.requests[s.RequestID] = append(w.requests[s.RequestID], b)
			})
		},
		SessionEnd: func(_ context.Context, o *pdflow.Outcome) {
			w.note(o.Session.ID, func(b *session) { b.ended++; b.out, b.over = *o, time.Now() })
		},
		LegStart: func(_ context.Context, s *connector.Session, leg pdflow.LegKind) {
			w.note(s.ID, func(b *session) {
				if b.legsStarted[legIndex(leg)]++; leg == pdflow.LegPrefill {
					b.begun = time.Now()
				}
				if b.ended > 0 {
					w.breaches = append(w.breaches, "a leg began after its session's end")
				}
			})
		},
		LegEnd: func(_ context.Context, s *connector.Session, o *pdflow.LegOutcome, _ *connector.PrefillResult) {
			w.note(s.ID, func(b *session) {
				b.legsEnded[legIndex(o.Leg)]++
				if !o.Start.IsZero() {
					w.measured++
				}
				if o.Leg == pdflow.LegPrefill {
					b.done = time.Now()
				}
				if b.ended > 0 && (o.Leg != pdflow.LegPrefill || !b.out.PrefillRuns) {
					w.breaches = append(w.breaches, "a leg ended after its session's end")
				}
				if o.Err != nil && o.Err.Code == pdflow.CodeDraining {
					w.cut++
				}
			})
		},
	}
}

// counted counts the ends of a picker's choices.
type counted struct {
	pdflow.Picker
	w *world
}

func (c *counted) Bind(conn connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return &counted{c.Picker.Bind(conn, serving), c.w}
}

func (c *counted) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	p, err := c.Picker.Pick(ctx, in)
	if err != nil {
		return p, err
	}
	b := &choiceOf{}
	c.w.ledger.mu.Lock()
	c.w.picks = append(c.w.picks, b)
	c.w.ledger.mu.Unlock()
	done, prefillDone := p.Done, p.PrefillDone
	p.Done = func(o *pdflow.Outcome) {
		c.w.ledger.mu.Lock()
		b.done++
		b.session, b.runs = o.Session.ID, o.PrefillRuns
		b.declined = c.w.sessions[b.session] == nil // it named the engine at which the last prefill ran out of time
		c.w.ledger.mu.Unlock()
		if done != nil {
			done(o)
		}
	}
	p.PrefillDone = func(o *pdflow.LegOutcome) {
		c.w.ledger.mu.Lock()
		if b.prefillDone++; b.done > 0 && !b.runs {
			c.w.breaches = append(c.w.breaches, "PrefillDone was called after Done")
		}
		c.w.ledger.mu.Unlock()
		if prefillDone != nil {
			prefillDone(o)
		}
	}
	return p, nil
}

// made is P's response, whose handoff goes into the books.
func (w *world) made(l *leg) string {
	params := ""
	if w.protocol.hands() {
		w.ledger.mu.Lock()
		id := "kv-" + strconv.Itoa(len(w.handoffs)) + "-" + l.room
		w.handoffs[id] = &handoff{prompt: l.raw, leg: l}
		w.ledger.mu.Unlock()
		params = `,"kv_transfer_params":{"handoff":"` + id + `"}`
	}
	return `{"choices":[{"index":0,"text":"t","finish_reason":"length"}],"usage":{"prompt_tokens":7}` + params + `}`
}

// asked enters a request that an engine has read, and that the gateway began to send then, which was the moment began.
func (w *world) asked(l *leg, id string, then time.Time, began int64) {
	c := w.clientOf(l.prompt)
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	breach := func(text string) { w.breaches = append(w.breaches, l.role+": "+text) }
	key := l.role + l.room + id
	if w.seen[key]++; w.seen[key] > 1 {
		breach("the same leg of a session was sent twice")
	}
	if l.room == "" || c == nil {
		breach("a leg without a room or prompt")
		return
	}
	if c.returned > 0 && began > c.returned {
		breach("a leg was sent after the request's end")
	}
	if c.first > 0 && began > c.first && c.session != l.room && !w.mayFollow(l.room) {
		breach("an attempt was made after the first byte, and is no rescue")
	}
	c.session = l.room
	if l.role == prefillRole {
		return
	}
	switch h := w.handoffs[id]; {
	case id == "" && w.protocol.order == connector.PrefillThenDecode:
		breach("decode was sent without a handoff")
	case id == "":
	case h == nil:
		breach("decode got a handoff that nobody has made")
	default:
		if h.used++; h.used > 1 {
			breach("a handoff was used twice")
		}
		if h.prompt != l.raw {
			breach("a handoff was used for another prompt")
		}
		if !h.until.IsZero() && then.After(h.until) {
			breach("a handoff was sent past its lease")
		}
	}
}

// leased starts the leases of a prefill leg's handoffs: P has sent its response.
func (w *world) leased(l *leg) {
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	for _, h := range w.handoffs {
		if h.leg == l {
			h.until = time.Now().Add(leaseTime)
		}
	}
}

// check compares the books at the end.
func (b *ledger) check(w *world) {
	legsStarted, sessions, ranOn := 0, 0, 0
	b.mu.Lock()
	defer b.mu.Unlock()
	breach := func(text string) { b.breaches = append(b.breaches, text) }
	for _, s := range b.sessions {
		sessions += s.started
		legsStarted += s.legsStarted[0] + s.legsStarted[1]
		if s.started != 1 || s.ended != 1 {
			breach("a session began " + strconv.Itoa(s.started) + " times and ended " + strconv.Itoa(s.ended))
		}
		if s.legsStarted != s.legsEnded {
			breach("not every leg that began was told to end once")
		}
		if s.expected != s.expectDone {
			breach("done of an event was called " + strconv.Itoa(s.expectDone) + " times for " +
				strconv.Itoa(s.expected) + " expected events")
		}
		if s.out.PrefillRuns {
			ranOn++
			b.checkRun(breach, w, s)
		}
		if failed := s.out.Err != nil; failed && s.cleaned != 1 || !failed && s.cleaned != 0 {
			breach("a session was cleaned up " + strconv.Itoa(s.cleaned) + " times")
		}
	}
	declined, rescues, hedges := 0, 0, 0
	for _, p := range b.picks {
		if p.done != 1 {
			breach("Done was called " + strconv.Itoa(p.done) + " times")
			continue
		}
		if p.declined {
			declined++
			continue
		}
		if s := b.sessions[p.session]; s == nil || p.prefillDone != s.legsStarted[0] {
			breach("PrefillDone was called " + strconv.Itoa(p.prefillDone) + " times")
		}
	}
	if len(b.picks) != sessions+declined {
		breach("not every pick became a session")
	}
	for id, list := range b.requests {
		c := w.byID(id)
		hedges += len(list)
		list = checkHedges(breach, list)
		hedges -= len(list)
		for i, s := range list {
			if last := i == len(list)-1; s.out.Final != last {
				breach("Final is not told of the last attempt, and of no other")
			}
			x := s.out.Session
			if c.decode != "" && c.decode != x.Decode.ID || c.prefill != "" && c.prefill != x.Prefill.ID {
				breach("an attempt left the engine that its request names")
			}
		}
		rescues += b.checkAttempts(breach, w, list)
	}
	b.checkRescues(breach, w)
	b.spans.check(breach, len(w.clients), legsStarted)
	b.meter.check(breach, map[string]int{"pd.request.duration": len(w.clients), "pd.attempts": sessions,
		"pd.leg.duration": b.measured, "pd.prefills.ran_on": ranOn})
	n, more := b.meter.count("pd.retries"), sessions-len(b.requests)-rescues-hedges
	if n != more {
		breach(strconv.Itoa(n) + " retries were counted, of " + strconv.Itoa(more))
	}
	counted := b.meter.events()
	if n := counted["pd.hedge  won"] + counted["pd.hedge  lost"]; n != hedges {
		breach(strconv.Itoa(n) + " second prefills were counted, of " + strconv.Itoa(hedges))
	}
	unread := 0
	for _, h := range b.handoffs {
		if h.used == 0 && !h.until.IsZero() {
			unread++
		}
	}
	if n := b.meter.count("pd.attempts.expired"); n < unread && w.protocol.hands() {
		breach("KV that waits for its lease was not counted: " + strconv.Itoa(n) + " of " + strconv.Itoa(unread))
	}
}

// checkRun checks a prefill leg that ran on after its session.
func (b *ledger) checkRun(breach func(string), w *world, s *session) {
	if !w.protocol.finishes {
		breach("a leg ran on whose protocol lets none do so")
	}
	if o := s.out.Prefill; o.Endpoint == "" || o.Status != 0 || !o.End.IsZero() {
		breach("the outcome tells of an end of the leg that runs on")
	}
	if s.done.IsZero() || s.done.Sub(s.over) > prefillLimit {
		breach("a leg ran on for longer than its limit")
	}
	// A leg whose own limit has ended its attempt, or that D did not need, may run for as long again.
	// So may one whose D was silent for too long when only [DONE] was missing, which the flow then wrote itself.
	d := b.givers[s.id]
	late := s.over.Sub(s.begun) >= prefillLimit || d != nil && d.dead.Load() && s.out.Err == nil
	if !late && s.done.Sub(s.begun) > prefillLimit &&
		(s.out.Err == nil || s.out.Err.Code != pdflow.CodeTimeout) {
		breach("a leg that ran on took longer than a prefill may")
	}
}

// expect are the statuses of the errors' codes, as the gateway's contract has them. An engine's own status, which
// passes, is not among them.
var expect = map[pdflow.Code]int{
	pdflow.CodePrefillFailed: 502, pdflow.CodeTransferMissing: 502, pdflow.CodeHandoffExpired: 502,
	pdflow.CodeDecodeFailed: 502, pdflow.CodeTimeout: 504, pdflow.CodeNoEndpoint: 503, pdflow.CodeDraining: 503,
}
