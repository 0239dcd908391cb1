// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// A decode engine may be silent for minutes in mid-stream, and be well: a tool parser holds a call's arguments back
// until they are whole, and hidden reasoning sends nothing. So when Timeouts.Idle is over, the engine is probed: one
// that is well may be silent up to Timeouts.Silence.

// silence is what is known of a stream that its engine is silent in.
type silence struct {
	streams atomic.Bool  // the response's body is being read
	since   atomic.Int64 // when the last silence began, Unix nanoseconds
	until   atomic.Int64 // how far the last silence was let go on, likewise
}

// The results of silences, as the counter has them.
const (
	silenceWell    = "well"     // it goes on
	silenceIll     = "ill"      // the engine does not answer its probe
	silenceTooLong = "too_long" // Timeouts.Silence is over
)

// mayBeSilent reports whether a phase that has run out of time goes on all the same. Its caller is the watch, whose
// owner's end waits for it.
func (a *attempt) mayBeSilent() bool {
	idle, most := a.f.limits.Idle, a.f.limits.Silence
	if !a.silent.streams.Load() || a.x.sender.steps != nil || idle <= 0 || most > 0 && most <= idle {
		return false
	}
	due := a.watch.Deadline()
	if due.IsZero() { // bytes have come
		return true
	}
	if due.UnixNano() != a.silent.until.Load() {
		a.silent.since.Store(due.Add(-idle).UnixNano())
	}
	more, result := idle, silenceWell
	if most > 0 {
		more = min(idle, time.Until(time.Unix(0, a.silent.since.Load()).Add(most)))
	}
	switch {
	case more <= 0:
		result = silenceTooLong
	case !a.f.probes.well(a.ctx, a.s.Decode.ID, func(ctx context.Context) bool { return a.probe(ctx, a.s.Decode) }):
		result = silenceIll
	}
	if !a.watch.Over() || a.ctx.Err() != nil { // bytes have come meanwhile, or nobody waits for more
		return true
	}
	a.x.tel.Silent(result)
	if result != silenceWell {
		return false
	}
	a.watch.Extend(more)
	a.silent.until.Store(a.watch.Deadline().UnixNano())
	return true
}

// silentFor returns for how long the engine has been silent in a stream, if that is longer than Timeouts.Idle.
func (a *attempt) silentFor() time.Duration {
	if due := a.watch.Deadline(); due.IsZero() || due.UnixNano() != a.silent.until.Load() {
		return 0
	}
	return time.Since(time.Unix(0, a.silent.since.Load()))
}

// probe asks an engine whether it is well. A transport of the host's that panics has no goroutine to end but a timer's.
func (a *attempt) probe(ctx context.Context, e discovery.Endpoint) (well bool) {
	_ = a.guard(LegDecode, "probe", func() error { well = a.healthy(ctx, e); return nil })
	return well
}

func (a *attempt) healthy(ctx context.Context, e discovery.Endpoint) bool {
	limit := a.f.limits.HealthCheck
	if limit <= 0 {
		limit = 2 * time.Second
	}
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL.JoinPath("/health").String(), http.NoBody)
	if err != nil {
		return false
	}
	resp, err := a.caller(ctx)(r)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode < http.StatusInternalServerError // 404 is the word of an engine that lives
}

// probedFor is how long the result of a probe holds: many streams fall silent at the same time.
const probedFor = time.Second

// probes are those of a flow's silent engines: each is asked once for all streams that wait for the result.
type probes struct {
	mu     sync.Mutex
	latest map[string]*probed
}

type probed struct {
	done  chan struct{}
	ended time.Time // after done
	well  bool
	known bool // false: whose probe it was has left
}

// well returns what a probe of an engine says.
func (p *probes) well(ctx context.Context, id string, probe func(context.Context) bool) bool {
	for {
		p.mu.Lock()
		last := p.latest[id]
		if last == nil || last.over() {
			last = &probed{done: make(chan struct{})}
			if p.latest == nil {
				p.latest = map[string]*probed{}
			}
			for other, old := range p.latest { // of engines that nobody waits for any more
				if old.over() {
					delete(p.latest, other)
				}
			}
			p.latest[id] = last
			p.mu.Unlock()
			last.well = probe(ctx)
			last.known, last.ended = last.well || ctx.Err() == nil, time.Now()
			close(last.done)
			return last.well
		}
		p.mu.Unlock()
		select {
		case <-last.done:
		case <-ctx.Done():
			return false
		}
		if last.known {
			return last.well
		}
	}
}

// over reports whether the probe has ended, and its result holds no more.
func (p *probed) over() bool {
	select {
	case <-p.done:
		return !p.known || time.Since(p.ended) > probedFor
	default:
		return false
	}
}
