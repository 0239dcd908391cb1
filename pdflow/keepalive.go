// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// WithKeepAlive has ServeHTTP, Middleware and a [Mux] write to the client of a streamed request whenever it has had
// nothing for it for that long, so that no balancer in between ends a connection that is well: comments, and ping
// events on /v1/messages. The first one comes with the head of the response, status 200, while waits for engines,
// attempts and retries go on behind it; later ones stand between the events of a stream whose engine is silent.
// Default, and 0: never.
//
// What is not known when the head goes out is not told: it has no X-PD-Mode. An error after it has neither a status nor
// a Retry-After: it is an error event in the shape of the client's API, and then the connection is cut. What a
// [WithErrorHandler] writes as its body is that event's data, if it is JSON.
//
// Requests that are not streamed, and those over HTTP/1.0 or behind a writer that cannot flush, are served without it.
//
// [Response.Send] writes while a stream is silent, and no head before there is one: until [Flow.Do] returns, nobody has
// told the flow where the client is. A host may write by itself meanwhile; one of [Steps] can end a wait of Next by its
// context and call it again. [Flow.RoundTripper] keeps nobody alive: a status 200 before an engine has answered would
// take the status of a failure away from the retries and the error handlers of the client or proxy around it. Put
// ServeHTTP in that proxy's place.
func WithKeepAlive(after time.Duration) Option {
	return optionFunc(func(o *options) error {
		o.keepAlive = after
		return needs("WithKeepAlive", after >= 0, "a time that is not negative")
	})
}

// What clients ignore. An empty line follows the comment too: programs that cut streams at empty lines, as vLLM's own
// benchmark does, would take the next event for a part of the comment.
var (
	comment = []byte(": keep-alive\n\n")
	ping    = []byte("event: ping\ndata: {\"type\": \"ping\"}\n\n")
)

// earlyType is the Content-Type of a stream that no engine has begun.
var earlyType = []string{"text/event-stream; charset=utf-8"}

// keepAlive writes to the client of one request while there is nothing for it. The handler and a timer share the
// client's writer: who holds the lock writes. Methods of a nil keepAlive do nothing.
type keepAlive struct {
	f     *Flow
	w     http.ResponseWriter
	ctx   context.Context // the request's; it ends, too, when the client cannot be written to
	end   context.CancelCauseFunc
	beat  []byte        // what is written
	limit time.Duration // of a write, not above 0: none

	mu      sync.Mutex
	timer   *time.Timer
	last    time.Time // when something was written
	early   bool      // the head went out before anything was known
	head    bool      // a head went out, early or not
	between bool      // the timer may write: no event and no response is begun
	lifted  bool      // the timer has lifted the deadline of the handler's last write
	stopped bool
}

// keepAlive begins to keep a request's client waiting. before is what another flow has begun, and stopped, for the same
// request.
func (f *Flow) keepAlive(w http.ResponseWriter, r *http.Request, c *call, limit time.Duration,
	before *keepAlive) *keepAlive {
	if f.opts.keepAlive == 0 || !c.req.Stream || !r.ProtoAtLeast(1, 1) {
		return before
	}
	k := &keepAlive{f: f, w: w, beat: comment, limit: limit, last: time.Now(), between: true}
	if c.req.API == connector.APIMessages {
		k.beat = ping
	}
	k.ctx, k.end = context.WithCancelCause(r.Context())
	if before != nil {
		k.early, k.head = before.early, before.head
		before.end(nil)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.timer = time.AfterFunc(f.opts.keepAlive, k.tick)
	return k
}

// context is the context of the request, r's without a keepAlive.
func (k *keepAlive) context(r *http.Request) context.Context {
	if k == nil {
		return r.Context()
	}
	return k.ctx
}

// tick writes if nothing has been written for long enough, and comes again.
func (k *keepAlive) tick() {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer func() {
		if cause := recover(); cause != nil { // of a middleware's writer
			k.stopped = true
			k.end(&Error{Code: CodeInternal, Phase: "keep-alive", Connector: k.f.name, Message: "the gateway failed",
				Err: fmt.Errorf("panic: %v", cause)})
		}
	}()
	if k.stopped {
		return
	}
	wait := k.f.opts.keepAlive - time.Since(k.last)
	if wait <= 0 && k.between {
		if err := k.write(); err != nil {
			k.stopped = true
			k.end(err)
			return
		}
		k.last = time.Now()
	}
	if wait <= 0 {
		wait = k.f.opts.keepAlive
	}
	k.timer.Reset(wait)
}

// write writes to the client, its head first if it has none.
func (k *keepAlive) write() error {
	if slices.Contains(hiddenMethods(k.w), "Flush") { // nothing would go out
		k.f.warnOfWriter(k.w)
		return nil
	}
	rc := http.NewResponseController(k.w)
	if !k.head {
		h := k.w.Header()
		h["Content-Type"], h["Cache-Control"], h["X-Accel-Buffering"] = earlyType, noCache, noBuffering
		k.early, k.head = true, true
	}
	if k.limit > 0 && rc.SetWriteDeadline(time.Now().Add(k.limit)) == nil {
		k.lifted = true
		defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // over HTTP/2 it would end the stream when it passes
	}
	if _, err := k.w.Write(k.beat); err != nil {
		return err
	}
	if err := rc.Flush(); !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	return nil
}

// begun reports whether the response's head has gone out. If not, it will be the handler's.
func (k *keepAlive) begun() bool {
	if k == nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.between = k.early
	return k.early
}

// through writes a piece of the response, while the timer does not. events is true of a response that is a stream.
func (k *keepAlive) through(l *writeLimit, w http.ResponseWriter, piece []byte, last, events bool) error {
	if k == nil {
		return l.write(w, piece, last || events)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.lifted {
		l.due, k.lifted = 0, false
	}
	k.head, k.last = true, time.Now()
	k.between = events && (bytes.HasSuffix(piece, []byte("\n\n")) || bytes.HasSuffix(piece, []byte("\n\r\n")))
	return l.write(w, piece, last || events)
}

// stop has the timer write no more. It waits for a write that is under way.
func (k *keepAlive) stop() {
	if k == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopped = true
	k.timer.Stop()
}

// close comes before the handler returns.
func (k *keepAlive) close() {
	if k != nil {
		k.stop()
		k.end(nil)
	}
}
