// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"time"
)

// writeEvery is for how long a write deadline is left as it is: setting one costs more than the rest of a write.
const writeEvery = time.Second

// Send writes the response to the client of r as [Flow.ServeHTTP] does, for hosts that call [Flow.Do]: it sends the head
// with X-Request-Id and X-PD-Mode, flushes each piece of a stream, bounds each write by Timeouts.Write, and closes Body.
// Nothing of Body may have been read before.
//
// Without an error the client has got the whole response. With one, which is an *[Error], Send has cut the client's
// connection or has ended the response in an error (see [Flow.ServeHTTP]): the host writes nothing more. A host whose
// writers hide their connection may panic with [http.ErrAbortHandler] then, to have net/http cut it.
func (resp *Response) Send(w http.ResponseWriter, r *http.Request) error {
	b := resp.Body
	if b.closed {
		return &Error{Code: CodeInternal, Phase: "stream", Message: "the response was closed before it was sent"}
	}
	defer b.Close()
	h := w.Header()
	maps.Copy(h, resp.Header)
	if v := h[headerRequestID]; len(v) != 1 || v[0] != resp.RequestID {
		h[headerRequestID] = []string{resp.RequestID}
	}
	h[headerMode] = modeHeader(resp.Mode)
	w.WriteHeader(resp.Status)
	b.a.x.phase.Store(phaseStream)
	s := sender{w: w, rc: http.NewResponseController(w), limit: b.flow().limits.Write}
	for {
		piece, err := b.next()
		if len(piece) > 0 {
			if werr := s.send(piece, b.sse || err != nil); werr != nil {
				b.err = &Error{Code: CodeClientGone, Leg: LegDecode, Phase: "stream", Connector: b.flow().name,
					Message: "the client left", Err: werr}
				err = b.err
			}
			if s.noFlush || s.noDeadline {
				b.flow().warnOfWriter(&s)
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			s.relax()
			return nil
		default:
			cut(w, r, b)
			return b.err
		}
	}
}

// sender writes the pieces of one response.
type sender struct {
	w          http.ResponseWriter
	rc         *http.ResponseController
	limit      time.Duration // of one write; 0: none
	deadline   time.Time
	noFlush    bool // the writer cannot flush
	noDeadline bool // the writer has no write deadlines
}

func (s *sender) send(piece []byte, flush bool) error {
	if now := time.Now(); s.limit > 0 && !s.noDeadline && now.Add(s.limit).Sub(s.deadline) > writeEvery {
		s.deadline = now.Add(s.limit + writeEvery)
		s.noDeadline = s.rc.SetWriteDeadline(s.deadline) != nil
	}
	_, err := s.w.Write(piece)
	if err == nil && flush && !s.noFlush {
		err = s.rc.Flush()
		if errors.Is(err, http.ErrNotSupported) {
			s.noFlush, err = true, nil
		}
	}
	return err
}

// relax removes the deadline, because the connection serves more requests.
func (s *sender) relax() {
	if !s.deadline.IsZero() && !s.noDeadline {
		_ = s.rc.SetWriteDeadline(time.Time{})
	}
}

// flow is the flow that the client asked. Another one may serve, if the first fell back to it.
func (b *Body) flow() *Flow {
	if b.outer != nil {
		return b.outer.f
	}
	return b.a.f
}

// warnOfWriter logs, once for each flow, that middleware hides what a stream needs.
func (f *Flow) warnOfWriter(s *sender) {
	f.warned.Do(func() {
		f.opts.logger.Warn("the ResponseWriter lacks Flush or SetWriteDeadline: give the middleware's writer an Unwrap method",
			slog.Bool("streams_are_buffered", s.noFlush), slog.Bool("slow_clients_are_bounded", !s.noDeadline))
	})
}
