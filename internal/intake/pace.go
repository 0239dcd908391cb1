// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"net/http"
	"time"
)

// silent is the share of a body's time, 1/silent, in which it need not bring a byte, at its beginning and whenever it
// gets more memory.
const silent = 6

// pace ends a body that holds memory and does not fill it. A client that sends at an even pace fills each piece of
// memory well within the body's whole time: so when a piece's 1/silent of that time is over, the share of the piece
// that is filled must not fall behind the share of the time. A nil pace ends nothing.
type pace struct {
	w       http.ResponseWriter
	timeout time.Duration // of the whole body; 0: no limits
	end     time.Time     // of the whole body
	since   time.Time     // when the body got the memory that it fills now
	due     time.Time     // the deadline that is set
	room    int           // bytes of that memory
	filled  int           // bytes of it
}

// begin reports whether there is a limit.
func (p *pace) begin() bool {
	if p.timeout <= 0 {
		return false
	}
	p.since = time.Now()
	p.end = p.since.Add(p.timeout)
	p.due = p.since.Add(p.timeout / silent)
	if p.set(p.due) != nil {
		p.timeout = 0 // the writer has no deadlines
		return false
	}
	return true
}

// holds comes before each piece of memory of room bytes is filled. The time of the first one has begun.
func (p *pace) holds(room int) {
	if p == nil || p.timeout <= 0 {
		return
	}
	if first := p.room == 0; !first {
		p.since = time.Now()
		p.limit(0)
	}
	p.room, p.filled = room, 0
}

// came counts n bytes that do not fill the memory yet.
func (p *pace) came(n int) {
	if p == nil || p.timeout <= 0 {
		return
	}
	p.filled += n
	p.limit(float64(p.filled) / float64(p.room))
}

// limit sets the deadline for a piece of which a share is filled.
func (p *pace) limit(share float64) {
	due := p.since.Add(p.timeout/silent + time.Duration(share*float64(p.timeout)))
	if due.After(p.end) {
		due = p.end
	}
	if share == 0 || due.Sub(p.due) > p.timeout/64 { // not for each packet
		p.due = due
		_ = p.set(due)
	}
}

// set makes a controller each time: one that pace kept would be allocated.
func (p *pace) set(due time.Time) error { return http.NewResponseController(p.w).SetReadDeadline(due) }
