// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"
)

// writeEvery is for how long a write deadline is left as it is: setting one costs more than the rest of a write. A
// write may take that much longer than its limit.
const writeEvery = 2 * time.Second

// Send writes the response to the client of r as [Flow.ServeHTTP] does, for hosts that call [Flow.Do]: it sends the
// head with X-Request-Id and X-PD-Mode, flushes each piece of a stream, bounds each write by Timeouts.Write, keeps the
// client alive while a stream is silent ([WithKeepAlive]), and closes Body. Nothing of Body may have been read before.
//
// Without an error the client has got the whole response. With one, which is an *[Error], Send has cut the client's
// connection or has ended the response in an error (see [Flow.ServeHTTP]): the host writes nothing more. A host whose
// writers hide their connection may panic with [http.ErrAbortHandler] then, to have net/http cut it.
func (resp *Response) Send(w http.ResponseWriter, r *http.Request) error {
	x := resp.Body.request()
	limit := x.f.limits.Write
	alive := x.f.keepAlive(w, r, &x.call, limit, nil)
	if alive != nil {
		defer alive.close()
		defer context.AfterFunc(alive.ctx, func() { resp.Body.x.Stop(context.Cause(alive.ctx)) })()
	}
	return resp.send(w, r, limit, alive)
}

// send is Send with a limit of each write, not above 0 for none, and with what has kept the client waiting.
func (resp *Response) send(w http.ResponseWriter, r *http.Request, limit time.Duration, alive *keepAlive) error {
	b := resp.Body
	defer b.Close()
	piece, err := b.next()
	if errors.Is(err, errClosedBody) {
		return &Error{Code: CodeInternal, Phase: "stream", Message: "the response was closed before it was sent"}
	}
	if !alive.begun() {
		resp.writeHead(w)
	} else if !b.sse {
		piece, err = nil, b.fail("", b.failed(CodeDecodeFailed, "the decode engine's response is no stream"))
	}
	b.a.x.phase.Store(phaseStream)
	writes := writeLimit{x: b.request(), limit: max(limit, 0), each: r.ProtoAtLeast(2, 0)}
	for ; ; piece, err = b.next() {
		if len(piece) > 0 {
			if werr := alive.through(&writes, w, piece, err != nil, b.sse); werr != nil {
				err = b.fail("the client left", werr)
			}
		}
		if err == nil {
			continue
		}
		alive.stop()
		if !errors.Is(err, io.EOF) {
			e := b.fail("the request was ended", err) // by Steps.End, unless it has failed
			cutShort(w, r, b, writes.limit, e, alive.begun())
			return e
		}
		writes.lift(w) // the connection serves more requests
		return nil
	}
}

// writeLimit bounds each write of a response. It lies on the stack of each stream.
type writeLimit struct {
	x     *serving      // since whose start due is counted
	limit time.Duration // 0: none
	due   time.Duration // when the deadline that is set passes; 0: none is set
	each  bool          // a deadline ends with its write: over HTTP/2 it ends the stream, also while nothing is written
}

// write writes a piece, which goes out at once if flush is true.
func (l *writeLimit) write(w http.ResponseWriter, piece []byte, flush bool) error {
	rc := http.NewResponseController(w)
	if now := time.Since(l.x.tel.Start); l.limit > 0 && now+l.limit > l.due {
		l.due = now + l.limit + writeEvery
		if rc.SetWriteDeadline(l.x.tel.Start.Add(l.due)) != nil {
			l.limit = 0
			l.x.f.warnOfWriter(w)
		}
	}
	_, err := w.Write(piece)
	if err == nil && flush {
		err = rc.Flush()
	}
	if l.each {
		l.lift(w)
	}
	if errors.Is(err, http.ErrNotSupported) {
		l.x.f.warnOfWriter(w)
		return nil
	}
	return err
}

// lift ends the deadline of the last write.
func (l *writeLimit) lift(w http.ResponseWriter) {
	if l.limit > 0 && l.due > 0 {
		l.due = 0
		_ = http.NewResponseController(w).SetWriteDeadline(time.Time{})
	}
}

func (resp *Response) writeHead(w http.ResponseWriter) {
	h := w.Header()
	maps.Copy(h, resp.Header)
	if v := h[headerRequestID]; len(v) != 1 || v[0] != resp.RequestID { // ServeHTTP has set it
		h[headerRequestID] = []string{resp.RequestID}
	}
	h[headerMode] = modeHeader(resp.Mode)
	w.WriteHeader(resp.Status)
}

// fail ends the response by the client's side, or with err if that is an *Error, unless it has failed before. It
// returns the response's error.
func (b *Body) fail(message string, err error) *Error {
	b.lock()
	defer b.unlock()
	if b.err != nil {
		return b.err
	}
	var own bool
	if b.err, own = errors.AsType[*Error](err); !own {
		b.err = &Error{Code: CodeClientGone, Leg: LegDecode, Phase: "stream", Connector: b.a.f.name,
			Message: message, Err: err}
	}
	return b.err
}

// request is what the client asked. Another flow may serve it, if the first fell back to that.
func (b *Body) request() *serving {
	if b.outer != nil {
		return b.outer
	}
	return b.x
}

// warnOfWriter logs, once for each type of writer, that middleware hides what a stream needs.
func (f *Flow) warnOfWriter(w http.ResponseWriter) {
	of := reflect.TypeOf(w)
	if _, told := f.warned.LoadOrStore(of, true); told {
		return
	}
	f.opts.telemetry.Logger.Warn("middleware hides methods of the ResponseWriter: streams may be buffered, and "+
		"clients that read nothing may hold engines; an Unwrap method on its writer helps",
		slog.String("writer", of.String()), slog.String("missing", strings.Join(hiddenMethods(w), ", ")))
}

// hiddenMethods names what http.ResponseController does not find, of all that reading a body and writing a stream need.
func hiddenMethods(w http.ResponseWriter) []string {
	missing := map[string]bool{"Flush": true, "SetReadDeadline": true, "SetWriteDeadline": true}
	for {
		switch w.(type) {
		case http.Flusher, interface{ FlushError() error }:
			delete(missing, "Flush")
		}
		if _, ok := w.(interface{ SetReadDeadline(time.Time) error }); ok {
			delete(missing, "SetReadDeadline")
		}
		if _, ok := w.(interface{ SetWriteDeadline(time.Time) error }); ok {
			delete(missing, "SetWriteDeadline")
		}
		inner, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return slices.Sorted(maps.Keys(missing))
		}
		w = inner.Unwrap()
	}
}
