// SPDX-License-Identifier: Apache-2.0

package legs

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// blank is what all legs have in common.
var blank = &http.Request{Method: http.MethodPost, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}

// Request makes a leg's HTTP request, with an empty header. Its body is read from the client's own bytes and the leg's
// edits, without a copy. own says that pdkit's own transport sends it: then text.Drop must follow the end of sending.
// Any other round tripper may keep the request, and text is nil.
func Request(ctx context.Context, leg *connector.Leg, to *url.URL, own bool) (r *http.Request, text *Text, err error) {
	text, _ = texts.Get().(*Text)
	if err := contract.Leg(leg).Splice(&text.Segments); err != nil {
		return nil, nil, err
	}
	r, u, h := &text.req, &text.url, text.header
	if !own {
		r, u, h = new(http.Request), new(url.URL), make(http.Header, 8)
	}
	*u = *to
	u.Path += contract.Path(leg)
	*r = *blank.WithContext(ctx)
	r.URL, r.Host, r.Header, r.ContentLength, r.GetBody = u, u.Host, h, text.Len(), text.open
	if !own {
		r.GetBody, text = text.leave(), nil
	}
	r.Body, err = r.GetBody()
	return r, text, err
}

// smallBody is up to what size a leg's body is put together in one piece: round trippers send that together with its
// head in one write. A large one is written from where it lies.
const smallBody = 4 << 10

// Text is a leg's body, and the request that carries it. pdkit's own transport copies the body, or writes it from
// where it lies, and only reads the header. The memory then serves another leg, once every reader has read it to its
// end, and so looks at it no more.
type Text struct {
	jsonedit.Segments
	unread atomic.Int32                  // readers that are not at their end
	open   func() (io.ReadCloser, error) // read, as a value that is made once
	req    http.Request
	url    url.URL
	header http.Header
}

var texts = sync.Pool{New: func() any {
	t := &Text{header: make(http.Header, 8)}
	t.open = t.read
	return t
}}

// read begins to read the text. A reader serves once: net/http looks at it again when it is at its end.
func (t *Text) read() (io.ReadCloser, error) {
	t.unread.Add(1)
	return &reader{t: t, Reader: *t.NewReader()}, nil
}

// Drop follows the end of sending, after which nobody opens the text again. t may be nil.
func (t *Text) Drop() {
	if t != nil && t.unread.Load() == 0 {
		t.Reset()
		t.req, t.url = http.Request{}, url.URL{}
		clear(t.header)
		texts.Put(t)
	}
}

// leave returns what gives the body to a round tripper of the host's, as often and as long as it is asked for.
func (t *Text) leave() (body func() (io.ReadCloser, error)) {
	if t.Len() > smallBody {
		return func() (io.ReadCloser, error) { return io.NopCloser(t.NewReader()), nil }
	}
	whole := t.AppendTo(nil)
	t.Drop()
	return func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(whole)), nil }
}

type reader struct {
	jsonedit.Reader
	t *Text
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.noteEnd(n > 0)
	return n, err
}

func (r *reader) WriteTo(w io.Writer) (int64, error) {
	n, err := r.Reader.WriteTo(w)
	r.noteEnd(n > 0)
	return n, err
}

func (r *reader) noteEnd(moved bool) {
	if moved && r.Len() == 0 {
		r.t.unread.Add(-1)
	}
}

func (*reader) Close() error { return nil }
