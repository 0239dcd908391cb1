// SPDX-License-Identifier: Apache-2.0

package live

import (
	"context"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// An engine may be silent for minutes in mid-stream, and be well: a tool parser holds a call's arguments back until
// they are whole, and hidden reasoning sends nothing. So when a stream has been silent for as long as Timeouts.Idle,
// its engine's health is asked for: one that is well may be silent up to Timeouts.Silence.

// Silence is what is known of a stream that its engine is silent in.
type Silence struct {
	streams atomic.Bool  // the response's body is being read
	since   atomic.Int64 // when the last silence began, Unix nanoseconds
	until   atomic.Int64 // how far the last silence was let go on, likewise
}

// The results of silences, as the counter has them.
const (
	SilenceWell    = "well"     // it goes on
	SilenceIll     = "ill"      // the engine is not well
	SilenceTooLong = "too_long" // Timeouts.Silence is over
)

// Stream says that the response's body is being read from now on: before that, no silence may go on.
func (s *Silence) Stream() {
	if !s.streams.Load() {
		s.streams.Store(true)
	}
}

// Streams reports whether Stream was called.
func (s *Silence) Streams() bool { return s.streams.Load() }

// GoesOn reports whether a watchdog that has expired lets its phase go on, and with which result; "" counts for
// nothing. idle and most are Timeouts.Idle and Timeouts.Silence; well tells how the engine is. The caller is the
// watchdog's owner, in Expire, which may be a timer: a well that panics says that the engine is not well.
func (s *Silence) GoesOn(ctx context.Context, w *Watchdog, idle, most time.Duration, well func() bool) (yes bool,
	result string) {
	if !s.streams.Load() || idle <= 0 || most > 0 && most <= idle {
		return false, ""
	}
	due := w.Deadline()
	if due.IsZero() { // bytes have come
		return true, ""
	}
	if due.UnixNano() != s.until.Load() {
		s.since.Store(due.Add(-idle).UnixNano())
	}
	more := idle
	if most > 0 {
		more = min(idle, time.Until(time.Unix(0, s.since.Load()).Add(most)))
	}
	switch result = SilenceWell; {
	case more <= 0:
		result = SilenceTooLong
	case !safely(well):
		result = SilenceIll
	}
	if !w.Over() || ctx.Err() != nil { // bytes have come meanwhile, or nobody waits for more
		return true, ""
	}
	if result != SilenceWell {
		return false, result
	}
	w.Extend(more)
	s.until.Store(w.Deadline().UnixNano())
	return true, result
}

// For returns for how long the engine has been silent in a stream, if that is longer than Timeouts.Idle.
func (s *Silence) For(w *Watchdog) time.Duration {
	if due := w.Deadline(); due.IsZero() || due.UnixNano() != s.until.Load() {
		return 0
	}
	return time.Since(time.Unix(0, s.since.Load()))
}

func safely(ask func() bool) (is bool) {
	defer func() {
		if recover() != nil {
			is = false
		}
	}()
	return ask()
}

// Healthy probes an engine: GET /health within a time, 2 s if that is not above 0. An engine that answers anything but
// 5xx is well: 404 is the word of one that lives. A send that panics is that of an engine that is not.
func Healthy(ctx context.Context, base *url.URL, limit time.Duration,
	send func(*http.Request) (*http.Response, error)) bool {
	if limit <= 0 {
		limit = 2 * time.Second
	}
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	return safely(func() bool {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("/health").String(), http.NoBody)
		if err != nil {
			return false
		}
		resp, err := send(r)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode < http.StatusInternalServerError
	})
}

// probedFor is how long the result of a probe holds: many streams fall silent at the same time.
const probedFor = time.Second

// Probes are those of engines, or of pairs: each is asked once for all that wait for the result. The zero value is
// ready.
type Probes struct {
	mu     sync.Mutex
	latest map[string]*probed
}

type probed struct {
	done  chan struct{}
	ended time.Time // after done
	well  bool
	known bool // false: whose probe it was has left
}

// Well returns what a probe says, which must not panic.
func (p *Probes) Well(ctx context.Context, id string, probe func(context.Context) bool) bool {
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
