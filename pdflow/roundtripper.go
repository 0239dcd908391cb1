// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/intake"
)

// RoundTripper puts the flow behind an HTTP client or a reverse proxy of the caller's:
//
//	proxy.Transport = flow.RoundTripper(http.DefaultTransport)
//
// POST requests of the client APIs' paths run over two engines, whatever host their URL names, and their legs go out
// through next; other requests go to next as they are. next must not follow redirects, and should be the same for all
// of a flow's requests. Its errors are asked for what was sent by transport.Classify.
//
// What ServeHTTP answers with a status is a response here, too, with the same header and body. The only error is that
// of the request's context, or that the request has no URL. A response that breaks on its way ends with
// io.ErrUnexpectedEOF. The request is not changed, and its body always closed. A body that does not end within
// Timeouts.Body is refused; one whose Read blocks may be closed after RoundTrip has returned, as by net/http.
func (f *Flow) RoundTripper(next http.RoundTripper) http.RoundTripper {
	if next == nil {
		next = f.opts.transport
	}
	return &roundTripper{f: f, next: next, sender: newSender(next)}
}

type roundTripper struct {
	f      *Flow
	next   http.RoundTripper
	sender *sender
}

// RoundTrip sends one request: see [Flow.RoundTripper].
func (t *roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL == nil {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return nil, errNoURL
	}
	api := connector.APIOf(r.URL.Path)
	if api == connector.APIUnknown || r.Method != http.MethodPost {
		return t.next.RoundTrip(r)
	}
	id := t.f.handler.idsOf(r)[0]
	resp, e := t.run(r, api, id)
	switch {
	case e == nil:
		h := resp.Header.Clone()
		h[headerMode], h[headerRequestID] = modeHeader(resp.Mode), []string{id}
		out := responseTo(r, resp.Status, h, &clientBody{resp.Body})
		if n, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64); err == nil {
			out.ContentLength = n
		}
		return out, nil
	case r.Context().Err() != nil:
		return nil, context.Cause(r.Context())
	}
	w := &memory{header: http.Header{}, status: http.StatusOK}
	t.f.writeError(w, r, id, e)
	out := responseTo(r, w.status, w.header, io.NopCloser(&w.body))
	out.ContentLength = int64(w.body.Len())
	return out, nil
}

func (t *roundTripper) run(r *http.Request, api connector.API, id string) (*Response, *Error) {
	in := t.read(r, Refusal{RequestID: id, API: api})
	if in.e != nil {
		t.f.handler.refusals.tell(r.Context(), in.told, in.e)
		return nil, in.e
	}
	return t.f.do(r.Context(), &call{req: in.req, header: r.Header, id: id, sender: t.sender})
}

var errNoURL = errors.New("pdflow: the request has no URL")

// bodyRead is what came of a request's body.
type bodyRead struct {
	req      *connector.ClientRequest
	told     Refusal
	e        *Error
	panicked any
}

// read reads a request's body and closes it. A body that lies in memory (GetBody) does not block. Any other may, and
// knows nothing of the request's context, so that a goroutine reads it, which may outlive the call: Close is to end its
// Read.
func (t *roundTripper) read(r *http.Request, told Refusal) bodyRead {
	if r.GetBody != nil || r.Body == nil || r.Body == http.NoBody {
		return t.readNow(r, told)
	}
	ch := make(chan bodyRead, 1)
	go func() {
		in := bodyRead{told: told}
		defer func() {
			in.panicked = recover() // the caller's to recover from
			ch <- in
		}()
		in = t.readNow(r, told)
	}()
	var expired <-chan time.Time
	if limit := t.f.handler.bodyTimeout; limit > 0 {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case in := <-ch:
		if in.panicked != nil {
			panic(in.panicked)
		}
		return in
	case <-r.Context().Done():
	case <-expired:
	}
	go r.Body.Close() // it may wait for Read
	if r.Context().Err() != nil {
		return bodyRead{told: told, e: t.f.whyEnded(r.Context(), "", "body")}
	}
	late := intake.Late()
	return bodyRead{told: told, e: &Error{Code: Code(late.Code), Phase: "body", Message: late.Message}}
}

func (t *roundTripper) readNow(r *http.Request, told Refusal) (in bodyRead) {
	if r.Body != nil {
		defer r.Body.Close()
	}
	in.told = told
	in.req, _, in.e = t.f.handler.route(nil, r, &in.told, nil)
	if in.e == nil && r.GetBody == nil && r.ContentLength > 0 {
		if n, _ := io.ReadFull(r.Body, make([]byte, 1)); n > 0 {
			in.e = &Error{Code: CodeInvalid, Phase: "body", Message: "the body is longer than its Content-Length"}
		}
	}
	return in
}

// writeError writes an error for hosts that have no server of ours.
func (f *Flow) writeError(w http.ResponseWriter, r *http.Request, id string, e *Error) {
	w.Header()[headerRequestID] = []string{id}
	f.handler.write(w, r, e)
}

func responseTo(r *http.Request, status int, h http.Header, body io.ReadCloser) *http.Response {
	return &http.Response{Status: strconv.Itoa(status) + " " + http.StatusText(status), StatusCode: status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: h, Body: body, ContentLength: -1, Request: r}
}

// clientBody gives a response's body the errors that users of an HTTP client know.
type clientBody struct{ *Body }

func (b *clientBody) Read(p []byte) (int, error) {
	n, err := b.Body.Read(p)
	if err != nil && err != io.EOF {
		if err = context.Cause(b.a.x.client); err == nil {
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// memory is a ResponseWriter that keeps a short response.
type memory struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (m *memory) Header() http.Header         { return m.header }
func (m *memory) Write(p []byte) (int, error) { return m.body.Write(p) }
func (m *memory) WriteHeader(status int)      { m.status = status }
