// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// sse writes a stream of server-sent events.
type sse struct {
	w     http.ResponseWriter
	flush *http.ResponseController
	join  int // events per write

	mu      sync.Mutex
	buf     []byte
	pending int
	events  int
	struck  func() // a scripted fault that waits for its event
	breaks  bool   // it leaves nothing to write on
	strikes int
	broken  bool
}

// data writes one event without a name.
func (s *sse) data(payload []byte) {
	s.buf = append(s.buf, "data: "...)
	s.buf = append(s.buf, payload...)
	s.buf = append(s.buf, "\n\n"...)
	s.event()
}

// named writes one event with a name.
func (s *sse) named(name string, payload []byte) {
	s.buf = append(s.buf, "event: "...)
	s.buf = append(s.buf, name...)
	s.buf = append(s.buf, '\n')
	s.data(payload)
}

func (s *sse) event() {
	s.events++
	if s.pending++; s.pending >= s.join {
		s.send()
	}
	if s.struck != nil && s.events >= s.strikes {
		s.strike()
	}
}

// strike lets the scripted fault happen, once.
func (s *sse) strike() {
	struck := s.struck
	s.struck = nil
	s.send()
	s.broken = s.breaks
	struck()
}

func (s *sse) send() {
	if !s.broken && s.pending > 0 {
		_, _ = s.w.Write(s.buf)
		_ = s.flush.Flush()
	}
	s.buf, s.pending = s.buf[:0], 0
}

// serveStream answers a call as a stream. The status is sent before anything is
// known of the KV, as vLLM does: a failed load is an event within a 200.
func (n *node) serveStream(ctx context.Context, w http.ResponseWriter, c *call, fault *Fault) {
	h := w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	s := &sse{w: w, flush: http.NewResponseController(w), join: 1}
	if n.cfg.ITL == 0 {
		s.join = n.cfg.ChunksPerWrite
	}
	_ = s.flush.Flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script(ctx, n, fault)

	format := c.format(s)
	format.begin()
	s.send() // it says that the request is there, and waits for nothing
	s.mu.Unlock()
	outs, err := n.run(ctx, c, func(st step) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		format.step(st)
		if s.broken {
			return errKilled
		}
		return nil
	})
	s.mu.Lock()
	switch {
	case s.broken:
		panic(http.ErrAbortHandler)
	case err == nil:
		format.end(outs)
	case errors.Is(err, errLoadFailed):
		s.fail(errInternal)
	case errors.Is(err, errCoreDead):
		s.fail(errEngine)
	default:
		panic(http.ErrAbortHandler)
	}
	if s.send(); s.broken {
		panic(http.ErrAbortHandler)
	}
}

// fail ends a stream with an error event.
func (s *sse) fail(e *apiError) {
	s.data([]byte(e.spaced()))
	s.data([]byte("[DONE]"))
}

// script prepares the faults that strike within a stream.
func (s *sse) script(ctx context.Context, n *node, fault *Fault) {
	if fault == nil {
		return
	}
	switch fault.Kind {
	case FaultResetStream:
		s.struck = func() { reset(s.w) }
	case FaultStallStream:
		s.struck = func() { <-ctx.Done() }
	case FaultKill:
		s.struck = n.fall
	case FaultTerminate:
		s.struck = n.bow
	case FaultDeath:
		s.struck = n.die
	default:
		return
	}
	s.breaks = fault.Kind != FaultTerminate && fault.Kind != FaultDeath
	if s.strikes = fault.AfterChunks; s.strikes == 0 {
		s.strike()
	}
}

// strike plays the faults that come before a request is looked at, and says
// whether that was the answer.
func (n *node) strike(ctx context.Context, w http.ResponseWriter, f *Fault) bool {
	switch f.Kind {
	case FaultStatus:
		maps.Copy(w.Header(), f.Header)
		body := []byte(f.Body)
		if f.Body == "" {
			body = encode(errorBody{&apiError{Message: http.StatusText(f.Status), Type: "InternalServerError", Code: f.Status}})
		}
		n.writeJSON(w, f.Status, body)
	case FaultReset:
		reset(w)
		panic(http.ErrAbortHandler)
	case FaultStall:
		<-ctx.Done()
		panic(http.ErrAbortHandler)
	case FaultGarbage:
		body := f.Body
		if body == "" {
			body = "<html>this is not the answer</html>"
		}
		n.writeJSON(w, http.StatusOK, []byte(body))
	case FaultRedirect:
		w.Header().Set("Location", f.Location)
		w.WriteHeader(http.StatusTemporaryRedirect)
	case FaultOversize:
		oversize(w, f.Size)
	case FaultDelay:
		if sleep(ctx, f.Delay) != nil {
			panic(http.ErrAbortHandler)
		}
		return false
	default:
		return false
	}
	return true
}

// oversize answers with size bytes of valid JSON.
func oversize(w http.ResponseWriter, size int) {
	const head, tail = `{"id":"`, `"}`
	size = max(size, len(head)+len(tail))
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(size))
	_, _ = io.WriteString(w, head)
	fill := make([]byte, 32<<10)
	for i := range fill {
		fill[i] = 'x'
	}
	for left := size - len(head) - len(tail); left > 0; left -= len(fill) {
		if _, err := w.Write(fill[:min(left, len(fill))]); err != nil {
			return
		}
	}
	_, _ = io.WriteString(w, tail)
}

// breakBody sends half of an answer, then breaks the connection or falls silent.
func (n *node) breakBody(ctx context.Context, w http.ResponseWriter, data []byte, f *Fault) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data[:len(data)/2])
	_ = http.NewResponseController(w).Flush()
	if f.Kind == FaultResetStream {
		reset(w)
	} else {
		<-ctx.Done()
	}
	panic(http.ErrAbortHandler)
}

// reset breaks the connection with a RST.
func reset(w http.ResponseWriter) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.SetDeadline(time.Now())
	_ = conn.Close()
}

func itoa(n int) string { return strconv.Itoa(n) }
