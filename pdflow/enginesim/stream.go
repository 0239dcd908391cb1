// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"sync"
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

// fail ends a stream with an error event.
func (s *sse) fail(e *apiError) {
	s.data([]byte(e.spaced()))
	s.data([]byte("[DONE]"))
}
