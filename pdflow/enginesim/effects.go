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

// effectKind is what a scripted fault does. The face documents each kind.
type effectKind int

// Kinds of effects.
const (
	effectStatus effectKind = iota + 1
	effectReset
	effectResetStream
	effectStall
	effectStallStream
	effectGarbage
	effectRedirect
	effectOversize
	effectDelay
	effectMutateHandoff
	effectLoadFailure
	effectKill
	effectTerminate
	effectDeath
	effectRefuse
)

// effect is a scripted fault that strikes a request.
type effect struct {
	Kind        effectKind
	Status      int
	Header      http.Header
	Body        string
	AfterChunks int
	Delay       time.Duration
	Size        int
	Location    string
	Mutate      func(handoff map[string]any)
}

// arm hands a fault to the generations it concerns.
func arm(c *call, f *effect) {
	if f == nil {
		return
	}
	for _, g := range c.gens {
		g.failLoad = f.Kind == effectLoadFailure
		if f.Kind == effectMutateHandoff {
			g.mutate = f.Mutate
		}
	}
}

// script prepares the faults that strike within a stream.
func (n *node) script(ctx context.Context, s *sse, fault *effect) {
	if fault == nil {
		return
	}
	switch fault.Kind {
	case effectResetStream:
		s.struck = func() { reset(s.w) }
	case effectStallStream:
		s.struck = func() { <-ctx.Done() }
	case effectKill:
		s.struck = n.killSoon
	case effectTerminate:
		s.struck = n.terminateSoon
	case effectDeath:
		s.struck = n.die
	default:
		return
	}
	s.breaks = fault.Kind != effectTerminate && fault.Kind != effectDeath
	if s.strikes = fault.AfterChunks; s.strikes == 0 {
		s.strike()
	}
}

// strike plays the faults that come before a request is looked at, and says
// whether that was the answer.
func (n *node) strike(ctx context.Context, w http.ResponseWriter, f *effect) bool {
	switch f.Kind {
	case effectStatus:
		maps.Copy(w.Header(), f.Header)
		body := []byte(f.Body)
		if f.Body == "" {
			body = encode(errorBody{&apiError{Message: http.StatusText(f.Status), Type: "InternalServerError", Code: f.Status}})
		}
		writeJSON(w, f.Status, body)
	case effectReset:
		reset(w)
		panic(http.ErrAbortHandler)
	case effectStall:
		<-ctx.Done()
		panic(http.ErrAbortHandler)
	case effectGarbage:
		body := f.Body
		if body == "" {
			body = "<html>this is not the answer</html>"
		}
		writeJSON(w, http.StatusOK, []byte(body))
	case effectRedirect:
		w.Header().Set("Location", f.Location)
		w.WriteHeader(http.StatusTemporaryRedirect)
	case effectOversize:
		oversize(w, f.Size)
	case effectDelay:
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
func (n *node) breakBody(ctx context.Context, w http.ResponseWriter, data []byte, f *effect) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data[:len(data)/2])
	_ = http.NewResponseController(w).Flush()
	if f.Kind == effectResetStream {
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
