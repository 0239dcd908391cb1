// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// streamStub answers a decode leg with a stream of pieces, each of which is one read.
type streamStub struct {
	piece []byte
	left  int           // pieces, with the last one's [DONE]
	pause time.Duration // before each piece
}

var sseHeader = http.Header{"Content-Type": {"text/event-stream; charset=utf-8"}}

func (s *streamStub) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == "p:1" {
		return stubs{}.RoundTrip(r)
	}
	_, _ = io.Copy(io.Discard, r.Body)
	_ = r.Body.Close()
	return &http.Response{StatusCode: 200, Header: sseHeader, Body: s, ContentLength: -1,
		TransferEncoding: []string{"chunked"}, Request: r}, nil
}

func (s *streamStub) Read(p []byte) (int, error) {
	time.Sleep(s.pause)
	switch s.left--; {
	case s.left > 0:
		return copy(p, s.piece), nil
	case s.left == 0:
		return copy(p, "data: [DONE]\n\n"), nil
	}
	return 0, io.EOF
}

func (s *streamStub) Close() error { return nil }

const tokenEvent = `data: {"id":"chatcmpl-6b4d9b0c","object":"chat.completion.chunk","created":1795258775,` +
	`"model":"tiny","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,` +
	`"token_ids":null}]}` + "\n\n"

// BenchmarkStreamPiece is what each read of a stream costs between the transport and the client's writer: one event,
// twenty, and as many as a large buffer takes, the last of them cut.
func BenchmarkStreamPiece(b *testing.B) {
	many := strings.Repeat(tokenEvent, 200)
	for _, c := range []struct{ name, piece string }{
		{"paced", tokenEvent}, {"coalesced", strings.Repeat(tokenEvent, 15)}, {"bulk", many[:32<<10]},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := &streamStub{piece: []byte(c.piece), left: b.N}
			flow := benchFlowOver(b, "http://p:1", "http://d:1", pdflow.WithTransport(s))
			b.SetBytes(int64(len(c.piece)))
			b.ReportAllocs()
			b.ResetTimer()
			flow.ServeHTTP(&deadlines{discard: discard{http.Header{}}}, streamRequest())
		})
	}
}

func streamRequest() *http.Request {
	return request2KB(bytes.Replace(body2KB(), []byte(`"max_tokens"`), []byte(`"stream":true,"max_tokens"`), 1))
}

// deadlines is a writer that keeps the time that each write has.
type deadlines struct {
	discard
	set  time.Time
	left []time.Duration
	keep bool
}

func (d *deadlines) SetWriteDeadline(at time.Time) error { d.set = at; return nil }
func (d *deadlines) FlushError() error                   { return nil }

func (d *deadlines) Write(b []byte) (int, error) {
	if d.keep {
		d.left = append(d.left, time.Until(d.set))
	}
	return len(b), nil
}

// A deadline is set for several writes. None of them may have less time than the limit, however far apart they are.
func TestEachWriteOfAStreamHasItsTime(t *testing.T) {
	const limit = time.Second
	for _, pause := range []time.Duration{0, 20 * time.Millisecond, time.Second, 1900 * time.Millisecond, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			s := &streamStub{piece: []byte(tokenEvent), left: 300, pause: pause}
			flow := benchFlowOver(t, "http://p:1", "http://d:1", pdflow.WithTransport(s),
				pdflow.WithTimeouts(config.Timeouts{Write: limit, Idle: time.Hour}))
			w := &deadlines{discard: discard{http.Header{}}, keep: true}
			flow.ServeHTTP(w, streamRequest())
			require.Len(t, w.left, 300)
			require.GreaterOrEqual(t, slices.Min(w.left), limit)
			require.LessOrEqual(t, slices.Max(w.left), 3*limit)
			require.True(t, w.set.IsZero(), "the deadline is in force for the connection's next request")
		})
	}
}

// deepStub is a stream that notes how deep in the stack it is read.
type deepStub struct{ streamStub }

func (d *deepStub) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := d.streamStub.RoundTrip(r)
	if r.URL.Host != "p:1" {
		resp.Body = d
	}
	return resp, err
}

var readAt uintptr

func (d *deepStub) Read(p []byte) (int, error) {
	var here byte
	readAt = uintptr(unsafe.Pointer(&here))
	return d.streamStub.Read(p)
}

// grown makes the stack so large that it is not moved while f runs.
func grown(f func(), steps int) (used [1 << 10]byte) {
	if used[steps] = 1; steps > 0 {
		return grown(f, steps-1)
	}
	f()
	return used
}

// A connection's goroutine has a stack of 16 KB once a request needed it, and the runtime halves it if less than a
// quarter is in use. Of these 4 KB net/http and the transport use 2, and the runtime counts 0.8 as used. With more
// than the rest here, each open stream holds 8 KB more.
func TestAStreamThatWaitsUsesLittleStack(t *testing.T) {
	if raceDetector {
		t.Skip("frames are larger under the race detector")
	}
	s := &deepStub{streamStub{piece: []byte(tokenEvent), left: 5}}
	flow := benchFlowOver(t, "http://p:1", "http://d:1", pdflow.WithTransport(s))
	w, r := &deadlines{discard: discard{http.Header{}}}, streamRequest()
	flow.ServeHTTP(w, r)
	s.left, r = 5, streamRequest()
	used := uintptr(0)
	grown(func() {
		var here byte
		above := uintptr(unsafe.Pointer(&here))
		flow.ServeHTTP(w, r)
		used = above - readAt
	}, 20)
	require.Less(t, used, uintptr(1<<10+256))
}
