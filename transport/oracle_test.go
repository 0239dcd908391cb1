// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// played is a connection whose other side sends a text in pieces, and reads nothing.
type played struct {
	text   []byte
	pieces []byte // sizes, over and over; none means all at once
	next   int
	said   bytes.Buffer
	closed bool
}

func (p *played) Read(b []byte) (int, error) {
	if p.closed {
		return 0, net.ErrClosed
	}
	if len(p.text) == 0 {
		return 0, io.EOF
	}
	n := len(p.text)
	if len(p.pieces) > 0 {
		n = min(n, int(p.pieces[p.next%len(p.pieces)])+1)
		p.next++
	}
	n = copy(b, p.text[:n])
	p.text = p.text[n:]
	return n, nil
}

func (p *played) Write(b []byte) (int, error)      { return p.said.Write(b) }
func (p *played) Close() error                     { p.closed = true; return nil }
func (p *played) LocalAddr() net.Addr              { return nil }
func (p *played) RemoteAddr() net.Addr             { return nil }
func (p *played) SetDeadline(time.Time) error      { return nil }
func (p *played) SetReadDeadline(time.Time) error  { return nil }
func (p *played) SetWriteDeadline(time.Time) error { return nil }

// outcome is what a reader returned for a response.
type outcome struct {
	headErr, bodyErr error
	resp             *http.Response
	body             string
	kept             bool // the connection would serve again
}

// ours reads a response with this package, room bytes at a time.
func ours(tr *Transport, method, text string, pieces []byte, room int) (out outcome) {
	conn := &played{text: []byte(text), pieces: pieces}
	c := tr.newConn(hostKey{host: "engine.test"}, conn, nil)
	req := &http.Request{Method: method}
	m := &message{t: tr}
	resp, failed := c.roundTrip(context.Background(), req, m)
	if failed != nil {
		return outcome{headErr: failed.Err}
	}
	out.resp = resp
	var all bytes.Buffer
	_, out.bodyErr = io.CopyBuffer(struct{ io.Writer }{&all}, struct{ io.Reader }{resp.Body}, make([]byte, room))
	if failed, ok := errors.AsType[*Error](out.bodyErr); ok {
		out.bodyErr = failed.Err
	}
	out.body = all.String()
	_ = resp.Body.Close()
	// What has not been read yet, the look at the idle connection sees.
	out.kept = !conn.closed && len(conn.text) == 0
	tr.CloseIdleConnections()
	return out
}

// oracle reads a response with net/http.
func oracle(method, text string) (out outcome) {
	r := bufio.NewReaderSize(strings.NewReader(text), 64<<10)
	req := &http.Request{Method: method}
	for range maxInterim + 1 {
		out.resp, out.headErr = http.ReadResponse(r, req)
		if out.headErr != nil || out.resp.StatusCode >= 200 || out.resp.StatusCode == 101 {
			break
		}
	}
	if out.headErr != nil {
		return out
	}
	body, err := io.ReadAll(out.resp.Body)
	out.body, out.bodyErr = string(body), err
	out.kept = err == nil && !out.resp.Close && r.Buffered() == 0
	return out
}

var (
	plainStatus = regexp.MustCompile(`^HTTP/1\.[01] [1-9][0-9][0-9]( [\t -~\x80-\xff]*)?\r?\n`)
	spacedName  = regexp.MustCompile(`(?m)^[^:\n]* [^:\n]*:`)
)

// stricter lists what net/http accepts and this package refuses.
func stricter(err error, text string) bool {
	switch {
	case errors.Is(err, errNotHTTP):
		for plainStatus.MatchString(text) { // interim responses come before
			end := headEnd([]byte(text), 0)
			if end < 0 {
				return false
			}
			text = text[end:]
		}
		return true
	case errors.Is(err, errMalformed):
		return spacedName.MatchString(text)
	case errors.Is(err, errEncoding):
		return strings.Contains(text, "HTTP/1.0 ")
	}
	return errors.Is(err, errFolded) || errors.Is(err, errLengthTwice) || errors.Is(err, errSwitch) ||
		errors.Is(err, errInterim)
}

func stricterTrailer(err error) bool {
	return errors.Is(err, errFolded) || errors.Is(err, errMalformed) || errors.Is(err, errTrailerLong)
}

// agree fails unless this package reads text as net/http does, in pieces of any size.
func agree(t *testing.T, tr *Transport, method, text string, pieces []byte, room int) {
	t.Helper()
	want, got := oracle(method, text), ours(tr, method, text, pieces, room)
	if got.headErr != nil {
		if want.headErr == nil {
			require.True(t, stricter(got.headErr, text), "%v, which net/http reads: %q", got.headErr, text)
		}
		return
	}
	require.NoError(t, want.headErr, "net/http does not read: %q", text)
	line := func(r *http.Response) []any {
		return []any{r.Status, r.StatusCode, r.Proto, r.ProtoMinor, r.ContentLength, r.TransferEncoding, r.Close}
	}
	assert.Equal(t, line(want.resp), line(got.resp))
	if _, ok := got.resp.Header["Pragma"]; ok {
		delete(want.resp.Header, "Cache-Control") // net/http makes one up
		delete(got.resp.Header, "Cache-Control")
	}
	assert.Equal(t, want.resp.Header, got.resp.Header)
	if got.bodyErr != nil {
		assert.True(t, strings.HasPrefix(want.body, got.body), "net/http %q, here %q", want.body, got.body)
		if want.bodyErr == nil {
			assert.True(t, stricterTrailer(got.bodyErr), "%v, which net/http reads: %q", got.bodyErr, text)
		}
		return
	}
	assert.NoError(t, want.bodyErr, "net/http does not read: %q", text)
	assert.Equal(t, want.body, got.body)
	assert.Equal(t, want.resp.Trailer, got.resp.Trailer)
	if got.kept {
		assert.True(t, want.kept, "the connection would be used again after %q", text)
	}
}

// responses are the seeds of the fuzz test, and the cases of another test.
var responses = []string{
	okResponse,
	"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
	"HTTP/1.1 200\r\ncontent-length: 2\r\nserver: uvicorn\r\ncontent-type: application/json\r\ndate: x\r\n\r\nok",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;a=b\r\nde\r\n0\r\n\r\n",
	"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\nTrailer: X-Sum, X-B\r\n\r\nA\r\n0123456789\r\n000  \r\nX-Sum: " +
		"1\r\nx-c: 2\r\n\r\n",
	"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + okResponse,
	"HTTP/1.1 101 Switching Protocols\r\n\r\n",
	"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
	"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
	"HTTP/1.0 200 OK\r\n\r\nto the end",
	"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
	"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nPragma: no-cache\r\n\r\nto the end",
	"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
	"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n",
	"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-A: \t1 \r\nX-A: 2\r\n\r\n",
	"HTTP/1.1 500 \r\nContent-Length: 1\r\n\r\nx",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" +
		strings.Repeat("1;"+strings.Repeat("x", 4000)+"\r\na\r\n", 6) + "0\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nabc",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3 \t\r\nabc\r\n0\r\nBad\r\n\r\n",
	"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n",
}

func FuzzResponsesAreReadAsNetHTTPReadsThem(f *testing.F) {
	for i, text := range responses {
		f.Add(text, []byte{0}, uint16(1), i%2 == 0)
		f.Add(text, []byte{3, 40}, uint16(2000), false)
	}
	tr := New(&Options{ReadBuffer: 1 << 10})
	f.Cleanup(func() { _ = tr.Close() })
	f.Fuzz(func(t *testing.T, text string, pieces []byte, room uint16, head bool) {
		method := http.MethodPost
		if head {
			method = http.MethodHead
		}
		agree(t, tr, method, text, pieces, int(room)+1)
	})
}

func TestResponsesAreReadAsNetHTTPReadsThemHoweverTheyAreCut(t *testing.T) {
	tr := newTransport(t, &Options{ReadBuffer: 1 << 10})
	for _, text := range responses {
		for _, pieces := range [][]byte{nil, {0}, {1}, {6, 0, 30}, {255}} {
			for _, room := range []int{1, 7, 512, 1500, 32 << 10} {
				agree(t, tr, http.MethodPost, text, pieces, room)
				agree(t, tr, http.MethodHead, text, pieces, room)
			}
		}
	}
}

// Where readers of one response could differ about its end, there is no response: the next one would be another
// request's.
func TestAmbiguousResponsesAreErrors(t *testing.T) {
	long := strings.Repeat("a", 64<<10)
	for _, row := range []struct {
		rule, text string
		err        error
	}{
		{"both lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
			errLengthTwice},
		{"two lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", errLength},
		{"a list of lengths", "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\nhello", errLength},
		{"a signed length", "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello", errLength},
		{"an empty length", "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n", errLength},
		{"a length beyond 63 bits", "HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775808\r\n\r\n", errLength},
		{"another encoding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", errEncoding},
		{"two encodings", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
			errEncoding},
		{"chunks in HTTP/1.0", "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", errEncoding},
		{"a folded field", "HTTP/1.1 200 OK\r\nX-A: 1\r\n 2\r\nContent-Length: 0\r\n\r\n", errFolded},
		{"a space before the colon", "HTTP/1.1 200 OK\r\nContent-Length : 0\r\n\r\n", errMalformed},
		{"no colon", "HTTP/1.1 200 OK\r\nContent-Length\r\n\r\n", errMalformed},
		{"no name", "HTTP/1.1 200 OK\r\n: 0\r\n\r\n", errMalformed},
		{"NUL in a value", "HTTP/1.1 200 OK\r\nX-A: \x00\r\n\r\n", errMalformed},
		{"CR in a value", "HTTP/1.1 200 OK\r\nX-A: 1\rContent-Length: 0\r\n\r\n", errMalformed},
		{"another version", "HTTP/2.0 200 OK\r\n\r\n", errNotHTTP},
		{"HTTP/1.2", "HTTP/1.2 200 OK\r\n\r\n", errNotHTTP},
		{"a status of two digits", "HTTP/1.1 20 OK\r\n\r\n", errNotHTTP},
		{"a status of four digits", "HTTP/1.1 2000 OK\r\n\r\n", errNotHTTP},
		{"a status below 100", "HTTP/1.1 099 OK\r\n\r\n", errNotHTTP},
		{"an empty line first", "\r\nHTTP/1.1 200 OK\r\n\r\n", errNotHTTP},
		{"a head beyond the limit", "HTTP/1.1 200 OK\r\nX-A: " + long + "\r\n\r\n", errHeadTooLong},
		{"interim responses without end", strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 100), errInterim},
	} {
		t.Run(row.rule, func(t *testing.T) {
			tr := newTransport(t, &Options{MaxResponseHeaderBytes: 32 << 10})
			for _, pieces := range [][]byte{nil, {0}} {
				got := ours(tr, http.MethodPost, row.text, pieces, 4<<10)
				require.ErrorIs(t, got.headErr, row.err)
				assert.False(t, got.kept)
			}
		})
	}
}

func TestBrokenChunksEndTheResponseAndItsConnection(t *testing.T) {
	tr := newTransport(t, nil)
	for _, row := range []struct {
		rule, text string
		err        error
	}{
		{"no size", "\r\n", errChunk},
		{"no number", "xyz\r\n", errChunk},
		{"a negative size", "-1\r\n", errChunk},
		{"a prefix", "0x1\r\na\r\n0\r\n\r\n", errChunk},
		{"a space first", " 1\r\na\r\n0\r\n\r\n", errChunk},
		{"too many digits", "00000000000000001\r\na\r\n0\r\n\r\n", errChunk},
		{"a size beyond all", "7fffffffffffffff\r\na", errChunk},
		{"a bare LF", "1\na\r\n0\r\n\r\n", errChunk},
		{"a CR within the line", "1;\ra\r\n0\r\n\r\n", errChunk},
		{"data longer than its size", "1\r\nab\r\n0\r\n\r\n", errChunk},
		{"data's end without LF", "1\r\na\rb", errChunk},
		{"a line without end", strings.Repeat("0", 4) + ";" + strings.Repeat("x", 5000), errChunk},
		{"extensions without end", strings.Repeat("1;"+strings.Repeat("x", 4000)+"\r\na\r\n", 10), errChunkWaste},
		{"a trailer without end", "0\r\n" + strings.Repeat("X-A: 1\r\n", 10_000), errTrailerLong},
		{"a folded trailer", "0\r\nX-A: 1\r\n 2\r\n\r\n", errFolded},
		{"a bare LF in the trailer", "0\r\nX-A: 1\n\r\n", errMalformed},
		{"an end within a chunk", "5\r\nabc", io.ErrUnexpectedEOF},
		{"an end before the last chunk", "1\r\na\r\n", io.ErrUnexpectedEOF},
		{"an end within the trailer", "0\r\n", io.ErrUnexpectedEOF},
	} {
		t.Run(row.rule, func(t *testing.T) {
			for _, pieces := range [][]byte{nil, {0}} {
				for _, room := range []int{100, 32 << 10} {
					got := ours(tr, http.MethodPost, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+row.text,
						pieces, room)
					require.NoError(t, got.headErr)
					require.ErrorIs(t, got.bodyErr, row.err)
					assert.False(t, got.kept)
				}
			}
		})
	}
}

func TestWhichResponsesLeaveAConnectionToTheNextRequest(t *testing.T) {
	tr := newTransport(t, nil)
	for _, row := range []struct {
		rule, method, text string
		body               string
		kept               bool
	}{
		{"a length", "POST", okResponse, "ok", true},
		{"chunks", "POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "ok", true},
		{"HEAD has no body, whatever its length", "HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", "", true},
		{"204 has no body", "POST", "HTTP/1.1 204 No Content\r\n\r\n", "", true},
		{"304 has no body", "GET", "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n", "", true},
		{"HTTP/1.0 that asks for it", "POST", "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: " +
			"2\r\n\r\nok", "ok", true},
		{"HTTP/1.0", "POST", "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", "ok", false},
		{"Connection: close", "POST", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", "ok",
			false},
		{"only the end tells the length", "POST", "HTTP/1.1 200 OK\r\n\r\nok", "ok", false},
		{"bytes after a length", "POST", okResponse + "x", "ok", false},
		{"bytes after the last chunk", "POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n" +
			"0\r\n\r\nx", "ok", false},
		{"a body where none may be", "HEAD", okResponse, "", false},
	} {
		t.Run(row.rule, func(t *testing.T) {
			head := byte(headEnd([]byte(row.text), 0) - 1)
			for _, pieces := range [][]byte{nil, {head, 255}} { // the body with the head, and after it
				for _, room := range []int{100, 32 << 10} {
					got := ours(tr, row.method, row.text, pieces, room)
					require.NoError(t, got.headErr)
					require.NoError(t, got.bodyErr)
					assert.Equal(t, row.body, got.body)
					assert.Equal(t, row.kept, got.kept)
				}
			}
		})
	}
}
