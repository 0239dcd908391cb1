// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"sync"
)

// SSE writes a stream of server-sent events. Who writes events, or reads Broken, holds its lock.
type SSE struct {
	sync.Mutex

	w       http.ResponseWriter
	flush   *http.ResponseController
	join    int // events per write
	buf     []byte
	pending int // events in buf
	events  int // all events so far

	fault  func() // happens once, after the event with the number after
	after  int
	breaks bool // the fault leaves nothing to write on
	broken bool
}

// NewSSE makes a stream that writes so many events at a time, and sends the response's headers.
func NewSSE(w http.ResponseWriter, eventsPerWrite int) *SSE {
	s := &SSE{w: w, flush: http.NewResponseController(w), join: eventsPerWrite}
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

// data writes one event without a name.
func (s *SSE) data(payload []byte) {
	s.buf = append(s.buf, "data: "...)
	s.buf = append(s.buf, payload...)
	s.buf = append(s.buf, "\n\n"...)
	s.events++
	if s.pending++; s.pending >= s.join {
		s.Send()
	}
	if s.fault != nil && s.events >= s.after {
		s.strike()
	}
}

// named writes one event with a name.
func (s *SSE) named(name string, payload []byte) {
	s.buf = append(s.buf, "event: "...)
	s.buf = append(s.buf, name...)
	s.buf = append(s.buf, '\n')
	s.data(payload)
}

func (s *SSE) strike() {
	fault := s.fault
	s.fault = nil
	s.Send()
	s.broken = s.breaks
	fault()
}

// Send writes the events that were joined so far.
func (s *SSE) Send() {
	if !s.broken && s.pending > 0 {
		_, _ = s.w.Write(s.buf)
		_ = s.flush.Flush()
	}
	s.buf, s.pending = s.buf[:0], 0
}

// Fail ends a stream with an error event.
func (s *SSE) Fail(e *Error) {
	s.data([]byte(e.spaced()))
	s.data([]byte("[DONE]"))
}
