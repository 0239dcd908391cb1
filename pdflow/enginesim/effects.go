// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"strconv"
	"time"
)

// arm hands a fault to the generations it concerns.
func (c *call) arm(f *Fault) {
	if f == nil {
		return
	}
	for _, g := range c.gens {
		g.failLoad = f.Kind == FaultLoadFailure
		if f.Kind == FaultMutateHandoff {
			g.mutate = f.Mutate
		}
	}
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
		writeJSON(w, f.Status, body)
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
		writeJSON(w, http.StatusOK, []byte(body))
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
