// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// EffectKind is what a scripted fault does. The face documents each kind.
type EffectKind int

// Kinds of effects.
const (
	EffectStatus EffectKind = iota + 1
	EffectReset
	EffectResetStream
	EffectStall
	EffectStallStream
	EffectGarbage
	EffectRedirect
	EffectOversize
	EffectDelay
	EffectMutateHandoff
	EffectLoadFailure
	EffectKill
	EffectTerminate
	EffectDeath
	EffectRefuse
	EffectCorruptKV
	EffectSurplus
	EffectEnding
	EffectHangTransfer
)

// Effect is a scripted fault that strikes a request.
type Effect struct {
	Kind        EffectKind
	Status      int
	Header      http.Header
	Body        string
	AfterChunks int
	Delay       time.Duration
	Size        int
	Location    string
	Ending      string
	Mutate      func(handoff map[string]any)
}

// arm hands a fault to the generations it concerns.
func arm(c *api.Call, f *Effect) {
	if f == nil {
		return
	}
	for _, g := range c.Gens {
		g.FailLoad = f.Kind == EffectLoadFailure
		g.Corrupt = f.Kind == EffectCorruptKV
		g.HangLoad = f.Kind == EffectHangTransfer
		if f.Kind == EffectEnding {
			g.Ending, g.EndAfter = f.Ending, f.AfterChunks
		}
		if f.Kind == EffectMutateHandoff {
			g.Mutate = f.Mutate
		}
	}
}

// script prepares the faults that strike within a stream.
func (n *Node) script(ctx context.Context, s *api.SSE, w http.ResponseWriter, fault *Effect) {
	if fault == nil {
		return
	}
	switch fault.Kind {
	case EffectResetStream:
		s.Script(fault.AfterChunks, true, func() { resetLater(w) })
	case EffectStallStream:
		if fault.Delay > 0 {
			s.Script(fault.AfterChunks, false, func() { _ = core.Sleep(ctx, fault.Delay) })
			return
		}
		s.Script(fault.AfterChunks, true, func() { <-ctx.Done() })
	case EffectKill:
		s.Script(fault.AfterChunks, true, n.killSoon)
	case EffectTerminate:
		s.Script(fault.AfterChunks, false, n.terminateSoon)
	case EffectDeath:
		s.Script(fault.AfterChunks, false, n.die)
	}
}

// strike plays the faults that come before a request is parsed, and reports whether it has answered the request.
func (n *Node) strike(ctx context.Context, w http.ResponseWriter, f *Effect) bool {
	switch f.Kind {
	case EffectStatus:
		maps.Copy(w.Header(), f.Header)
		if f.Body == "" {
			api.WriteError(w, &api.Error{Message: http.StatusText(f.Status), Type: "InternalServerError",
				Code: f.Status})
		} else {
			api.WriteJSON(w, f.Status, []byte(f.Body))
		}
	case EffectReset:
		reset(w)
		panic(http.ErrAbortHandler)
	case EffectStall:
		<-ctx.Done()
		panic(http.ErrAbortHandler)
	case EffectGarbage:
		body := f.Body
		if body == "" {
			body = "<html>this is not the response</html>"
		}
		api.WriteJSON(w, http.StatusOK, []byte(body))
	case EffectRedirect:
		w.Header().Set("Location", f.Location)
		w.WriteHeader(http.StatusTemporaryRedirect)
	case EffectOversize:
		oversize(w, f.Size)
	case EffectDelay:
		if core.Sleep(ctx, f.Delay) != nil {
			panic(http.ErrAbortHandler)
		}
		return false
	default:
		return false
	}
	return true
}

// surplus sends a response that nobody has asked for on the connection of a request, some time after its own.
// The request's handler calls it last.
func surplus(conn *accepted, f *Effect) {
	body := cmp.Or(f.Body, "{}")
	time.AfterFunc(f.Delay, func() {
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			len(body), body)
	})
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

// breakBody sends half of a response, then breaks the connection or falls silent, for some time or for ever.
func (n *Node) breakBody(ctx context.Context, w http.ResponseWriter, data []byte, f *Effect) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	_, _ = w.Write(data[:len(data)/2])
	_ = http.NewResponseController(w).Flush()
	switch {
	case f.Kind == EffectResetStream:
		resetLater(w)
	case f.Delay > 0 && core.Sleep(ctx, f.Delay) == nil:
		_, _ = w.Write(data[len(data)/2:])
		return
	default:
		<-ctx.Done()
	}
	panic(http.ErrAbortHandler)
}

// arrives is how long what was sent has to arrive. On a busy machine Linux hands a RST over loopback to the other side
// before data that another CPU has sent earlier, and the data is lost.
const arrives = 5 * time.Millisecond

// resetLater breaks a connection on which something was sent.
func resetLater(w http.ResponseWriter) {
	time.Sleep(arrives)
	reset(w)
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
