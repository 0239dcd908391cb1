// SPDX-License-Identifier: Apache-2.0

package paced

import (
	"context"
	"io"
	"net/http"
	"sync"
)

// Handlers calls handlers, by host, as a round tripper: in the time of a testing/synctest bubble, which HTTP over a
// network does not have.
type Handlers map[string]http.Handler

// RoundTrip returns when the handler has written something, or when the request's context has ended.
func (h Handlers) RoundTrip(r *http.Request) (*http.Response, error) {
	body, pipe := io.Pipe()
	w := &writer{PipeWriter: pipe, header: http.Header{}, status: make(chan int, 1)}
	go func() {
		if r.Body != nil {
			defer r.Body.Close()
		}
		h[r.URL.Host].ServeHTTP(w, r)
		w.WriteHeader(http.StatusOK)
		_ = pipe.Close()
	}()
	select {
	case status := <-w.status:
		return &http.Response{StatusCode: status, Status: http.StatusText(status), Proto: "HTTP/1.1", ProtoMajor: 1,
			ProtoMinor: 1, Header: w.header, Body: body, ContentLength: -1, Request: r}, nil
	case <-r.Context().Done():
		_ = body.Close()
		return nil, context.Cause(r.Context())
	}
}

type writer struct {
	*io.PipeWriter
	header http.Header
	once   sync.Once
	status chan int
}

func (w *writer) Header() http.Header    { return w.header }
func (w *writer) WriteHeader(status int) { w.once.Do(func() { w.status <- status }) }
func (*writer) Flush()                   {}

func (w *writer) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.PipeWriter.Write(b)
}
