// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// wire returns what is written for a request.
func wire(t *testing.T, req *http.Request) string {
	t.Helper()
	tr := newTransport(t, nil)
	m := message{t: tr}
	err := m.make(req)
	require.NoError(t, err)
	defer m.free()
	said := &played{}
	connErr, bodyErr := m.writeTo(tr.newConn(hostKey{}, said, nil))
	require.NoError(t, connErr)
	require.NoError(t, bodyErr)
	return said.said.String()
}

func TestARequestOnTheWire(t *testing.T) {
	req := post(t, "http://user:pass@engine.test:8000/v1/chat?x=1#frag", `{"a":1}`)
	assert.Equal(t, "POST /v1/chat?x=1 HTTP/1.1\r\nHost: engine.test:8000\r\nContent-Length: 7\r\n\r\n{\"a\":1}",
		wire(t, req))

	req = post(t, "http://[fe80::1%25eth0]:80", "")
	req.Body, req.Method, req.Close = nil, "", true
	assert.Equal(t, "GET / HTTP/1.1\r\nHost: [fe80::1]:80\r\nConnection: close\r\n\r\n", wire(t, req))

	req = post(t, "http://engine.test", "")
	req.Host, req.Body = "other.test", nil
	req.Header = http.Header{"X-A": {" padded\t", ""}}
	assert.Equal(t, "POST / HTTP/1.1\r\nHost: other.test\r\nContent-Length: 0\r\nX-A: padded\r\nX-A: \r\n\r\n",
		wire(t, req))
}

// net/http's server reads the written request as the one that was given.
func TestRequestsAreReadAsTheyWereMeant(t *testing.T) {
	req := post(t, "http://engine.test/a%2Fb/c%20d?q=%0A", strings.Repeat("x", 9000))
	req.Header = http.Header{"X-A": {"1", "2"}, "Authorization": {"Bearer x"}, "User-Agent": {"pdkit"},
		"X-Utf": {"\u00fc"}}
	got, err := http.ReadRequest(bufio.NewReader(strings.NewReader(wire(t, req))))
	require.NoError(t, err)
	assert.Equal(t, "/a%2Fb/c%20d?q=%0A", got.RequestURI)
	req.Header.Set("Content-Length", "9000")
	assert.Equal(t, req.Header, got.Header)
	assert.EqualValues(t, 9000, got.ContentLength)
	assert.Empty(t, got.TransferEncoding)
	body, err := io.ReadAll(got.Body)
	require.NoError(t, err)
	assert.Len(t, body, 9000)
}

// If a request says in two ways where its body ends, an engine may read it as two requests. So a caller's headers about
// it are not written.
func TestNoHeaderSaysWhereTheMessageEnds(t *testing.T) {
	req := post(t, "http://engine.test", "body")
	req.Header = http.Header{
		"Content-Length": {"1"}, "content-length": {"2"}, "Transfer-Encoding": {"chunked"},
		"tRANSFER-eNCODING": {"chunked"},
		"Trailer":           {"X"}, "Host": {"evil.test"}, "HOST": {"evil.test"}, "User-Agent": {""},
	}
	req.TransferEncoding = []string{"chunked"}
	assert.Equal(t, "POST / HTTP/1.1\r\nHost: engine.test\r\nContent-Length: 4\r\n\r\nbody", wire(t, req))
}

func TestRequestsThatWouldBreakTheirHeadAreNotSent(t *testing.T) {
	ownOnly(t, "refuses requests by rules and errors of its own, some after it has connected")
	for _, row := range []struct {
		rule string
		with func(*http.Request)
		err  error
	}{
		{"CR LF in a value", func(r *http.Request) { r.Header["X-A"] = []string{"1\r\nX-B: 2"} }, errField},
		{"LF in a value", func(r *http.Request) { r.Header["X-A"] = []string{"1\nX-B: 2"} }, errField},
		{"CR in a value", func(r *http.Request) { r.Header["X-A"] = []string{"1\rX"} }, errField},
		{"NUL in a value", func(r *http.Request) { r.Header["X-A"] = []string{"\x00"} }, errField},
		{"DEL in a value", func(r *http.Request) { r.Header["X-A"] = []string{"\x7f"} }, errField},
		{"a colon in a name", func(r *http.Request) { r.Header["X-A:"] = []string{"1"} }, errField},
		{"a space in a name", func(r *http.Request) { r.Header["X A"] = []string{"1"} }, errField},
		{"CR LF in a name", func(r *http.Request) { r.Header["X-A: 1\r\nX-B"] = []string{"1"} }, errField},
		{"an empty name", func(r *http.Request) { r.Header[""] = []string{"1"} }, errField},
		{"CR LF in the method", func(r *http.Request) { r.Method = "GET / HTTP/1.1\r\nX: " }, errMethod},
		{"CONNECT", func(r *http.Request) { r.Method = http.MethodConnect }, errMethod},
		{"CR LF in the host", func(r *http.Request) { r.Host = "a\r\nX-B: 2" }, errHost},
		{"a slash in the host", func(r *http.Request) { r.Host = "a/b" }, errHost},
		{"no host", func(r *http.Request) { r.URL.Host = "" }, errHost},
		{"a host not in ASCII", func(r *http.Request) { r.URL.Host = "m\u00fcnchen.test" }, errHost},
		{"CR LF in the query", func(r *http.Request) { r.URL.RawQuery = "a HTTP/1.1\r\nX-B: 2" }, errTarget},
		{"a space in the query", func(r *http.Request) { r.URL.RawQuery = "a b" }, errTarget},
		{"CR LF in an opaque URL", func(r *http.Request) { r.URL.Opaque = "/a\r\nX-B: 2" }, errTarget},
		{"a trailer", func(r *http.Request) { r.Trailer = http.Header{"X-A": {"1"}} }, errTrailer},
		{"another scheme", func(r *http.Request) { r.URL.Scheme = "ftp" }, errScheme},
		{"no URL", func(r *http.Request) { r.URL = nil }, errNoHeader},
		{"no header", func(r *http.Request) { r.Header = nil }, errNoHeader},
		{"a body that fails", func(r *http.Request) { r.Body = io.NopCloser(failing{}) }, errFailing},
		{"a body shorter than announced", func(r *http.Request) { r.ContentLength = 5 }, errBodyTooShort},
		{"a body longer than announced", func(r *http.Request) { r.ContentLength = 3 }, errBodyTooLong},
	} {
		t.Run(row.rule, func(t *testing.T) {
			e := newEngine(t, keepAlive)
			req := post(t, e.url(), "body")
			row.with(req)
			closed := &closeTeller{ReadCloser: req.Body}
			req.Body = closed
			_, err := newTransport(t, nil).RoundTrip(req)
			got := failure(t, err, SentNothing, KindOther)
			require.ErrorIs(t, err, row.err)
			assert.True(t, got.final)
			assert.Zero(t, e.accepted.Load())
			assert.True(t, closed.closed, "the body is closed whatever happens")
		})
	}
}

var errFailing = errors.New("no more")

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errFailing }

type closeTeller struct {
	io.ReadCloser
	closed bool
}

func (c *closeTeller) Close() error {
	c.closed = true
	return c.ReadCloser.Close()
}

// If a large body ends early, a part of it was sent already. Nothing may follow on that connection.
func TestALargeBodyThatFailsIsMaybeSentAndTakesItsConnectionWithIt(t *testing.T) {
	got := make(chan error, 1)
	e := newEngine(t, func(_ *engine, c net.Conn) {
		_, err := io.Copy(io.Discard, c)
		got <- err
	})
	req := post(t, e.url(), "")
	req.Body = io.NopCloser(io.MultiReader(strings.NewReader(strings.Repeat("x", 100<<10)), failing{}))
	req.ContentLength = 200 << 10
	_, err := newTransport(t, nil).RoundTrip(req)
	var failed *Error
	require.ErrorAs(t, err, &failed)
	require.ErrorIs(t, err, errFailing)
	assert.Equal(t, SentMaybe, failed.Sent)
	assert.True(t, failed.final)
	<-got
}

func TestABodyOfUnknownLengthIsSentWithItsLength(t *testing.T) {
	ownOnly(t, "sends it chunked")
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		assert.Empty(t, r.TransferEncoding)
		b, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		assert.EqualValues(t, len(b), r.ContentLength)
		_, _ = w.Write(b)
	})
	for _, body := range []string{"", "small", strings.Repeat("x", 100<<10)} {
		for _, length := range []int64{-1, 0} {
			req := post(t, s.URL, body)
			req.Body, req.ContentLength = plainReader{strings.NewReader(body)}, length
			assert.Equal(t, body, exchange(t, newTransport(t, nil), req))
		}
	}
}

func TestHostsWithoutPortGetTheSchemes(t *testing.T) {
	for text, want := range map[string]string{
		"http://engine.test": "engine.test:80", "https://engine.test": "engine.test:443",
		"http://engine.test:": "engine.test:80",
		"http://[::1]":        "[::1]:80", "https://[::1]:8443": "[::1]:8443",
	} {
		u, err := url.Parse(text)
		require.NoError(t, err)
		assert.Equal(t, want, address(&http.Request{URL: u}))
	}
}
