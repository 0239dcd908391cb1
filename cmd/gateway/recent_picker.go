// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// picking is what a client's request meets at the pickers. A flow asks a picker again until engines come or its wait
// ends, and may fall back after that, so only the request's end tells whether it got no engines.
type picking struct {
	mu        sync.Mutex
	recent    *recent // of the model that was asked last; nil: none was
	requestID string
	attempt   int       // that waits for engines, or waited last
	begin     time.Time // of that wait
	waits     bool      // it has got no engines yet
	shown     bool      // an attempt of the request is among the timelines

	// What its end will tell: see ended.
	since  time.Time // it first asked for engines
	served bool
	first  time.Duration // until its first token, 0 if it is not known
	code   pdflow.Code   // of what failed last
	broken int64         // attempts that failed
}

type pickingKey struct{}

// withPicking gives each of the clients' requests a picking.
func withPicking(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := &picking{}
		defer p.ended() // also if the handler panics, as it does to cut a response
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), pickingKey{}, p)))
	})
}

// pickingOf returns the request's picking; a new one for a request that is no client's.
func pickingOf(ctx context.Context) *picking {
	if p, ok := ctx.Value(pickingKey{}).(*picking); ok {
		return p
	}
	return &picking{}
}

// asks notes that a request asks for engines, and returns since when it waits for them. A request that has had no
// attempt waits since it first asked, whatever attempt it asks for: one falls back when there is no pair.
func (p *picking) asks(r *recent, in *pdflow.PickInput) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.since.IsZero() {
		p.since = time.Now()
	}
	if !p.waits || p.recent != r || p.shown && p.attempt != in.Attempt {
		p.recent, p.requestID, p.attempt, p.begin, p.waits = r, in.RequestID, in.Attempt, time.Now(), true
	}
	return p.begin
}

func (p *picking) picked() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waits = false
}

// attempted is told of an attempt that has ended.
func (p *picking) attempted(o *pdflow.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shown = true
	if o.Err != nil {
		if p.code = o.Err.Code; breaks(p.code) {
			p.broken++
		}
		return
	}
	p.served = true
	// a response that is no stream has its first byte when its last token is made
	if d := &o.Decode; o.Session.Request != nil && o.Session.Request.Stream && d.FirstByte.After(p.since) {
		p.first = d.FirstByte.Sub(p.since)
	}
}

// ended counts the request, unless it never asked for engines.
func (p *picking) ended() {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.recent == nil:
	case p.served:
		p.recent.requestEnded("", p.first, p.broken, time.Now())
	case p.code != "":
		p.recent.requestEnded(p.code, 0, p.broken, time.Now())
	}
}

// failed is told of the error with which a client's request ends. If the request has no timeline, or ends while a
// further attempt waits for engines, it gets one, all of which is the queue. That no engines are there for a further
// attempt is not such an end: the flow then ends with the error of the attempt before.
func failed(ctx context.Context, e *pdflow.Error) {
	p := pickingOf(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.code = e.Code
	if p.recent != nil && (!p.shown || p.waits && e.Phase == "pick" && e.Leg == "") {
		p.shown = true
		p.recent.unserved(p, e, time.Now())
	}
}

// writeError is the mux's writer of errors, which sees each error of a client's request once.
func writeError(w http.ResponseWriter, r *http.Request, e *pdflow.Error) {
	failed(r.Context(), e)
	e.Send(w, r)
}

// recentPicker measures how long requests wait for their engines, and remembers each attempt when it ends.
type recentPicker struct {
	pick.Around
	r *recent
}

// Pick asks the picker. What it refuses is remembered when the request ends: see failed.
func (p recentPicker) Pick(ctx context.Context, in *pdflow.PickInput) (out pdflow.Pick, err error) {
	request := pickingOf(ctx)
	begin := request.asks(p.r, in)
	if out, err = p.Around.Pick(ctx, in); err != nil {
		return out, err
	}
	waited := time.Since(begin)
	request.picked()
	done := out.Done
	out.Done = func(o *pdflow.Outcome) {
		defer func() {
			if o.Session != nil && o.Mode != "" { // not a pick that is given back unused
				request.attempted(o)
				p.r.add(o, waited, time.Now())
			}
		}()
		if done != nil {
			done(o)
		}
	}
	return out, nil
}

// Bind binds the picker. What is remembered is the model's, of all its flows.
func (p recentPicker) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return recentPicker{pick.NewAround(p.Around.Bind(c, serving)), p.r}
}
