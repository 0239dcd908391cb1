// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	recentServed    = 100    // attempts that served, of those that a model remembers
	recentFailed    = 20     // attempts that failed, for each code: a flood of one error does not push out a rare one
	recentPerSecond = 20     // attempts of one kind that are remembered of one second: more would push out each other
	recentRunning   = 10_000 // attempts in flight whose legs are followed
)

// timeline is one attempt, with times in ms since it began to wait for its engines. It has nothing of a request's body.
type timeline struct {
	RequestID    string    `json:"requestId"`
	Session      string    `json:"session,omitempty"` // of one that runs and has its engines
	Model        string    `json:"model"`
	Connector    string    `json:"connector,omitempty"`
	Mode         string    `json:"mode,omitempty"`
	Attempt      int       `json:"attempt"`
	Prefill      string    `json:"prefill,omitempty"` // endpoint IDs
	Decode       string    `json:"decode,omitempty"`
	Start        time.Time `json:"start"`
	Picked       *float64  `json:"picked,omitempty"` // the wait for admission and the choice of engines have ended
	PrefillStart *float64  `json:"prefillStart,omitempty"`
	PrefillEnd   *float64  `json:"prefillEnd,omitempty"`
	DecodeStart  *float64  `json:"decodeStart,omitempty"`
	FirstToken   *float64  `json:"firstToken,omitempty"`
	End          float64   `json:"end"`
	Input        int64     `json:"input,omitempty"` // tokens
	Output       int64     `json:"output,omitempty"`
	Reused       int64     `json:"reused,omitempty"`  // prompt tokens that decode did not compute, where it tells
	Resumed      int       `json:"resumed,omitempty"` // tokens that the client had before a rescue
	Error        string    `json:"error,omitempty"`   // its code
	Leg          string    `json:"leg,omitempty"`     // that is at fault
	Failing      string    `json:"failing,omitempty"` // what was being done when it failed: connect, response, stream …
	Status       int       `json:"status,omitempty"`  // of the engine's response, if that is the fault
	Retry        string    `json:"retry,omitempty"`   // why it was retried, or was not
	Running      bool      `json:"running,omitempty"`
	Phase        string    `json:"phase,omitempty"`  // of one that runs
	Silent       float64   `json:"silent,omitempty"` // ms that its decode engine has sent nothing for, if that is long
}

// liveTotals are a model's attempts since it is served.
type liveTotals struct {
	Served int64            `json:"served"`
	Output int64            `json:"output"` // tokens
	Reused int64            `json:"reused"` // prompt tokens that decode did not compute, where its response tells
	Errors map[string]int64 `json:"errors,omitempty"`
}

// recent is what a model remembers of its attempts. Its memory has a limit: one ring for those that served, one for
// each code of an error, a table of pairs, the last hour in counts, and the marks of requests in flight.
type recent struct {
	model   string
	goodput *goodput // nil: the model has admission

	mu      sync.Mutex
	rings   map[string]*ring // by the error's code; "": served
	totals  liveTotals
	pairs   pairTable
	windows windows
	running map[string]*marks // attempts in flight, by the session's ID
}

// marks are when the legs of an attempt in flight began and ended.
type marks struct{ picked, prefillStart, prefillEnd, decodeStart time.Time }

// ring keeps the newest attempts of one kind.
type ring struct {
	kept    []timeline
	next    int
	second  int64 // Unix
	sampled int   // in this second
}

// admits reports whether one more attempt of this second is to be kept.
func (r *ring) admits(now time.Time) bool {
	if second := now.Unix(); second != r.second {
		r.second, r.sampled = second, 0
	}
	r.sampled++
	return r.sampled <= recentPerSecond
}

func (r *ring) add(t *timeline, most int) {
	if len(r.kept) < most {
		r.kept = append(r.kept, *t)
	} else {
		r.kept[r.next%most] = *t
	}
	r.next++
}

func newRecent(model string, log *slog.Logger) *recent {
	return &recent{model: model, rings: map[string]*ring{}, totals: liveTotals{Errors: map[string]int64{}},
		windows: windows{model: model, log: log}, running: map[string]*marks{}}
}

// observer sees attempts begin and end. Those whose pick is not a recentPicker's, as synthetic probes are, have no part
// in what clients' requests meet.
func (r *recent) observer() pdflow.Observer {
	mark := func(s *connector.Session, set func(m *marks)) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if m := r.running[s.ID]; m != nil {
			set(m)
		}
	}
	return pdflow.Observer{
		SessionStart: func(_ context.Context, s *connector.Session) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.running) < recentRunning {
				r.running[s.ID] = &marks{picked: s.CreatedAt}
			}
		},
		LegStart: func(_ context.Context, s *connector.Session, leg pdflow.LegKind) {
			now := time.Now()
			mark(s, func(m *marks) {
				switch leg {
				case pdflow.LegPrefill:
					m.prefillStart = now
				case pdflow.LegDecode:
					m.decodeStart = now
				}
			})
		},
		LegEnd: func(_ context.Context, s *connector.Session, o *pdflow.LegOutcome, _ *connector.PrefillResult) {
			if o.Leg == pdflow.LegPrefill {
				mark(s, func(m *marks) { m.prefillEnd = o.End })
			}
		},
		SessionEnd: func(_ context.Context, o *pdflow.Outcome) {
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.running, o.Session.ID)
		},
	}
}

// marksOf returns what is known of an attempt in flight.
func (r *recent) marksOf(session string) marks {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.running[session]; m != nil {
		return *m
	}
	return marks{}
}

// add remembers an attempt that has ended, which waited so long for its engines.
func (r *recent) add(o *pdflow.Outcome, waited time.Duration, now time.Time) {
	code := ""
	if o.Err != nil {
		code = string(o.Err.Code)
	}
	r.goodput.add(o, now)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count(code)
	if code == "" {
		r.totals.Output += o.Usage.Output
		r.totals.Reused += o.Usage.Reused
	}
	r.pairs.add(o, now)
	r.windows.attempt(o, now)
	r.keep(code, now, func() timeline { return timelineOf(r.model, o, waited, now) })
}

// unserved remembers a request that ended while it waited for its engines.
func (r *recent) unserved(w *picking, e *pdflow.Error, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	code := string(e.Code)
	r.count(code)
	r.keep(code, now, func() timeline {
		return timeline{RequestID: w.requestID, Model: r.model, Attempt: w.attempt, Start: w.begin,
			End: milliseconds(now.Sub(w.begin)), Error: code, Failing: e.Phase}
	})
}

// requestEnded counts a client's request by how its last attempt ended. first is how long the client waited for the
// first token of a stream, 0 if that is not known; broken is how many of its attempts failed.
func (r *recent) requestEnded(code pdflow.Code, first time.Duration, broken int64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.windows.advance(now)
	switch {
	case code == "":
		c.Served, c.Mended = c.Served+1, c.Mended+broken
		if first > 0 {
			c.first.observe(first)
		}
	case code == pdflow.CodeOverloaded:
		c.Failed, c.Refused = c.Failed+1, c.Refused+1
	case code == pdflow.CodeClientGone:
		c.Left++
	case breaks(code):
		c.Failed++
	}
}

// readKV is told what the model's engines have counted, and for each how many leases have ended without a read.
func (r *recent) readKV(kv liveKV, leases map[string]float64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.windows.readKV(kv, now)
	r.windows.readLeases(leases, now)
}

// count and keep are for who holds r.mu.
func (r *recent) count(code string) {
	if code == "" {
		r.totals.Served++
	} else {
		r.totals.Errors[code]++
	}
}

func (r *recent) keep(code string, now time.Time, made func() timeline) {
	kind, most := r.rings[code], recentFailed
	if kind == nil {
		kind = &ring{}
		r.rings[code] = kind
	}
	if code == "" {
		most = recentServed
	}
	if kind.admits(now) {
		t := made()
		kind.add(&t, most)
	}
}

func milliseconds(d time.Duration) float64 { return float64(max(d, 0).Microseconds()) / 1000 }

// since returns a function for times in ms since begin: nil for one that has not come.
func since(begin time.Time) func(time.Time) *float64 {
	return func(t time.Time) *float64 {
		if t.IsZero() {
			return nil
		}
		ms := milliseconds(t.Sub(begin))
		return &ms
	}
}

func timelineOf(model string, o *pdflow.Outcome, waited time.Duration, now time.Time) timeline {
	s := o.Session
	begin := s.CreatedAt.Add(-waited)
	at := since(begin)
	t := timeline{RequestID: s.RequestID, Model: model, Connector: o.Connector, Mode: string(o.Mode),
		Attempt: s.Attempt, Prefill: s.Prefill.ID, Decode: s.Decode.ID, Start: begin, Picked: at(s.CreatedAt),
		PrefillStart: at(o.Prefill.Start), PrefillEnd: at(o.Prefill.End), DecodeStart: at(o.Decode.Start),
		FirstToken: at(o.Decode.FirstByte), End: milliseconds(now.Sub(begin)), Input: o.Usage.Input,
		Output: o.Usage.Output, Reused: o.Usage.Reused, Resumed: o.Resumed, Retry: o.Retry}
	if e := o.Err; e != nil {
		t.Error, t.Leg, t.Failing, t.Status = string(e.Code), string(e.Leg), e.Phase, e.Status
	}
	return t
}

// list returns the attempts that are remembered, in no order: requests wait while r.mu is held. It also returns the
// totals.
func (r *recent) list() (all []timeline, totals liveTotals) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, kind := range r.rings {
		all = append(all, kind.kept...)
	}
	totals = r.totals
	totals.Errors = maps.Clone(r.totals.Errors)
	return all, totals
}

// spans returns what the last minute and the last hour came to, and each engine's part.
func (r *recent) spans(now time.Time) (minute, hour liveSpan, past livePast, engines map[string]*liveRecent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	minute, hour, past = r.windows.spans(now)
	return minute, hour, past, r.windows.engineSpans()
}

// countedPairs returns a copy of the pairs, since requests wait while r.mu is held.
func (r *recent) countedPairs() ([]livePair, otherPairs) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pairs.counted()
}
