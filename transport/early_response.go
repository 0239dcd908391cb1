// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"net/http"
	"time"
)

// patience is how long the transport writes a large body before it looks for an early response. An engine may refuse a
// request by its head, and then neither read the body nor close the connection.
const patience = 200 * time.Millisecond

// earlyResponse reads the head of a response while the request's body is still being written. It is the only goroutine
// of this package beside the caller's, and the caller waits for it.
type earlyResponse struct {
	timer *time.Timer
	done  chan struct{}
	h     *head
	err   error
}

func (c *conn) watchEarly(method string) *earlyResponse {
	w := &earlyResponse{done: make(chan struct{})}
	w.timer = time.AfterFunc(patience, func() {
		defer close(w.done)
		w.h, w.err = c.readHead(method)
		// A response or the connection's end has come: nobody reads the rest of the body.
		_ = c.rw.SetWriteDeadline(longAgo)
	})
	return w
}

// converseLong is converse for a body that does not fit the write buffer.
func (c *conn) converseLong(req *http.Request, m *message) (h *head, whole bool, err error) {
	w := c.watchEarly(methodOf(req))
	connErr, bodyErr := m.writeTo(c)
	if w.timer.Stop() {
		if bodyErr != nil {
			return nil, false, requestFault{bodyErr}
		}
		return c.answer(req, m, connErr)
	}
	if bodyErr != nil {
		c.abort()
		<-w.done
		return nil, false, requestFault{bodyErr}
	}
	if connErr != nil {
		_ = c.rw.SetReadDeadline(time.Now().Add(lastWords))
	}
	<-w.done
	if w.err != nil && connErr != nil && !isTimeout(connErr) && !isAlert(w.err) {
		return nil, false, connErr
	}
	if connErr == nil {
		// The whole body was written. Without the deadline the connection is as good as any.
		return w.h, c.rw.SetWriteDeadline(time.Time{}) == nil, w.err
	}
	if w.err == nil {
		w.err = c.rw.SetReadDeadline(time.Time{})
	}
	return w.h, false, w.err
}

func methodOf(req *http.Request) string { return cmp.Or(req.Method, http.MethodGet) }
