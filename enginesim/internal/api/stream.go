// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// SSE writes a stream of server-sent events. Who writes events, or reads Broken, holds its lock.
type SSE struct {
	sync.Mutex

	w      http.ResponseWriter
	flush  *http.ResponseController
	buf    []byte
	events int // so far

	fault  func() // happens once, after the event with the number after
	after  int
	breaks bool // the fault leaves nothing to write on
	broken bool
}

// NewSSE makes a stream, and sends the response's headers.
func NewSSE(w http.ResponseWriter) *SSE {
	s := &SSE{w: w, flush: http.NewResponseController(w)}
	_ = s.flush.Flush()
	return s
}

// Script lets a fault happen after so many events. breaks says that nothing can be written afterwards.
func (s *SSE) Script(after int, breaks bool, fault func()) {
	if s.fault, s.after, s.breaks = fault, after, breaks; after == 0 {
		s.strike()
	}
}

// Broken reports whether a fault has broken the stream.
func (s *SSE) Broken() bool { return s.broken }

// data writes one event without a name, at once.
func (s *SSE) data(payload []byte) {
	s.buf = append(append(append(s.buf, "data: "...), payload...), "\n\n"...)
	if !s.broken {
		_, _ = s.w.Write(s.buf)
		_ = s.flush.Flush()
	}
	s.buf = s.buf[:0]
	if s.events++; s.fault != nil && s.events >= s.after {
		s.strike()
	}
}

// json writes one event without a name.
func (s *SSE) json(v any) { s.data(python.Encode(v)) }

// typed writes one event with a name, which is its type as well.
func (s *SSE) typed(kind string, fields map[string]any) {
	fields["type"] = kind
	s.buf = append(append(append(s.buf, "event: "...), kind...), '\n')
	s.json(fields)
}

func (s *SSE) done() { s.data([]byte("[DONE]")) }

func (s *SSE) strike() {
	fault := s.fault
	s.fault = nil
	s.broken = s.breaks
	fault()
}

// Fail ends a stream with an error event.
func (s *SSE) Fail(e *Error) {
	s.data([]byte(e.spaced()))
	s.done()
}
