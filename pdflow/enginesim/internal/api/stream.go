// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/http"
	"sync"
)

// SSE writes a stream of server-sent events.
type SSE struct {
	W     http.ResponseWriter
	Flush *http.ResponseController
	Join  int // events per write

	Mu      sync.Mutex
	buf     []byte
	pending int
	events  int
	Struck  func() // a scripted fault that waits for its event
	Breaks  bool   // it leaves nothing to write on
	Strikes int
	Broken  bool
}

// data writes one event without a name.
func (s *SSE) data(payload []byte) {
	s.buf = append(s.buf, "data: "...)
	s.buf = append(s.buf, payload...)
	s.buf = append(s.buf, "\n\n"...)
	s.event()
}

// named writes one event with a name.
func (s *SSE) named(name string, payload []byte) {
	s.buf = append(s.buf, "event: "...)
	s.buf = append(s.buf, name...)
	s.buf = append(s.buf, '\n')
	s.data(payload)
}

func (s *SSE) event() {
	s.events++
	if s.pending++; s.pending >= s.Join {
		s.Send()
	}
	if s.Struck != nil && s.events >= s.Strikes {
		s.Strike()
	}
}

// Strike lets the scripted fault happen, once.
func (s *SSE) Strike() {
	struck := s.Struck
	s.Struck = nil
	s.Send()
	s.Broken = s.Breaks
	struck()
}

func (s *SSE) Send() {
	if !s.Broken && s.pending > 0 {
		_, _ = s.W.Write(s.buf)
		_ = s.Flush.Flush()
	}
	s.buf, s.pending = s.buf[:0], 0
}

// Fail ends a stream with an error event.
func (s *SSE) Fail(e *Error) {
	s.data([]byte(e.spaced()))
	s.data([]byte("[DONE]"))
}
