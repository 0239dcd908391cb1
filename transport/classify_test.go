// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The class of an error decides whether a leg may be sent again, so each row is a rule: what happens on the wire, and
// what may be concluded from it.
func TestErrorsSayHowFarTheRequestGot(t *testing.T) {
	t.Parallel()
	errGone := errors.New("client is gone")
	hangUntilClosed := func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		e.read(r)
		_, _ = r.ReadByte()
	}
	cancelledBy := func(cause error) func(context.Context, *engine) (context.Context, context.CancelFunc) {
		return func(ctx context.Context, e *engine) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(ctx)
			go func() {
				for e.requests.Load() == 0 {
					time.Sleep(time.Millisecond)
				}
				cancel(cause)
			}()
			return ctx, func() { cancel(nil) }
		}
	}
	for _, row := range []struct {
		rule    string
		script  func(*engine, net.Conn) // nil: nobody is reached
		url     string
		body    string // "" is a small one
		options Options
		context func(context.Context, *engine) (context.Context, context.CancelFunc)
		sent    Sent
		kind    Kind
		is      error
		final   bool
	}{
		{
			rule: "nobody listens: not sent", url: "http://" + refusedAddress(t),
			sent: SentNothing, kind: KindRefused, is: syscall.ECONNREFUSED,
		},
		{
			rule:    "a host that does not answer the dial: not sent, within the connect limit",
			options: Options{ConnectTimeout: 30 * time.Millisecond, DialContext: blackhole},
			sent:    SentNothing, kind: KindConnectTimeout,
		},
		{
			rule:    "a dial refused by its own limit of time: not sent",
			options: Options{DialContext: dialFails(os.ErrDeadlineExceeded)},
			sent:    SentNothing, kind: KindConnectTimeout,
		},
		{
			rule: "an unknown name: not sent",
			options: Options{DialContext: dialFails(
				&net.DNSError{Err: "no such host", Name: "engine.test", IsNotFound: true})},
			sent: SentNothing, kind: KindDNS,
		},
		{
			rule:    "no route to the engine: not sent",
			options: Options{DialContext: dialFails(os.NewSyscallError("connect", syscall.EHOSTUNREACH))},
			sent:    SentNothing, kind: KindRefused,
		},
		{
			rule: "reset after the request was read, before a head: maybe sent",
			script: func(e *engine, c net.Conn) {
				e.read(bufio.NewReader(c))
				reset(c)
			},
			sent: SentMaybe, kind: KindReset, is: syscall.ECONNRESET,
		},
		{
			rule: "reset within a large body, of which bytes have gone: maybe sent", body: strings.Repeat("x", 16<<20),
			script: func(_ *engine, c net.Conn) {
				_, _ = io.CopyN(io.Discard, c, 64<<10)
				reset(c)
			},
			sent: SentMaybe, kind: KindReset,
		},
		{
			rule:   "closed after the request was read: maybe sent",
			script: says(""),
			sent:   SentMaybe, kind: KindEOF, is: io.EOF,
		},
		{
			rule:   "closed within the head: maybe sent",
			script: says("HTTP/1.1 200 OK\r\n"),
			sent:   SentMaybe, kind: KindEOF, is: io.ErrUnexpectedEOF,
		},
		{
			rule:   "a response that is not HTTP: maybe sent",
			script: says("SSH-2.0-OpenSSH_9.9\r\n\r\n"),
			sent:   SentMaybe, kind: KindProtocol,
		},
		{
			rule: "a head longer than the limit: maybe sent", options: Options{MaxResponseHeaderBytes: 8 << 10},
			script: says("HTTP/1.1 200 OK\r\nX-Big: " + strings.Repeat("a", 64<<10) + "\r\nContent-Length: 0\r\n\r\n"),
			sent:   SentMaybe, kind: KindProtocol,
		},
		{
			rule: "cancelled while the engine works: maybe sent, and the cause is kept", script: hangUntilClosed,
			context: cancelledBy(errGone), sent: SentMaybe, kind: KindCanceled, is: errGone,
		},
		{
			rule: "deadline while the engine works: maybe sent", script: hangUntilClosed,
			context: func(ctx context.Context, _ *engine) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 3*time.Second) // so late that the engine has the request
			},
			sent: SentMaybe, kind: KindTimeout, is: context.DeadlineExceeded,
		},
		{
			rule: "a timer that cancels with a timeout as cause: a timeout", script: hangUntilClosed,
			context: cancelledBy(os.ErrDeadlineExceeded), sent: SentMaybe, kind: KindTimeout,
			is: context.DeadlineExceeded,
		},
		{
			rule: "cancelled while dialing: not sent", options: Options{DialContext: blackhole},
			context: func(ctx context.Context, _ *engine) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				timer := time.AfterFunc(20*time.Millisecond, cancel)
				return ctx, func() { timer.Stop(); cancel() }
			},
			sent: SentNothing, kind: KindCanceled, is: context.Canceled, final: true,
		},
		{
			rule: "deadline while dialing: not sent", options: Options{DialContext: blackhole},
			context: func(ctx context.Context, _ *engine) (context.Context, context.CancelFunc) {
				return context.WithTimeout(ctx, 20*time.Millisecond)
			},
			sent: SentNothing, kind: KindTimeout, is: context.DeadlineExceeded, final: true,
		},
		{
			rule: "a request that cannot be sent: not sent, and never will be", url: "gopher://engine.test",
			sent: SentNothing, kind: KindOther, final: true,
		},
	} {
		t.Run(row.rule, func(t *testing.T) {
			url := cmp.Or(row.url, "http://engine.test")
			var e *engine
			if row.script != nil {
				e = newEngine(t, row.script)
				url = e.url()
			}
			tr := newTransport(t, &row.options)
			req := post(t, url, cmp.Or(row.body, `{"prompt":"secret prompt"}`))
			if row.context != nil {
				ctx, cancel := row.context(t.Context(), e)
				defer cancel()
				req = req.WithContext(ctx)
			}

			_, err := tr.RoundTrip(req)

			got := failure(t, err, row.sent, row.kind)
			assert.Equal(t, row.final, got.final)
			assert.Equal(t, row.sent, Classify(fmt.Errorf("leg: %w", err)))
			assert.Equal(t, row.kind == KindTimeout || row.kind == KindConnectTimeout, got.Timeout())
			if row.is != nil {
				assert.ErrorIs(t, err, row.is)
			}
			for _, private := range []string{"127.0.0.1", "engine.test", "secret"} {
				assert.NotContains(t, err.Error(), private)
				assert.NotContains(t, got.LogValue().String(), private)
			}
		})
	}
}

// controlled is a connection whose reads and writes a test can break.
type controlled struct {
	net.Conn
	mu       sync.Mutex
	readErr  error
	writeErr error
	closed   chan struct{}
	once     sync.Once
}

func (c *controlled) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil && c.readErr != nil {
		err = c.readErr
	}
	return n, err
}

func (c *controlled) Write(p []byte) (int, error) {
	c.mu.Lock()
	err := c.writeErr
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *controlled) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// controlledDial keeps the connections it opens.
type controlledDial struct {
	mu    sync.Mutex
	conns []*controlled
}

func (d *controlledDial) dial(ctx context.Context, network, address string) (net.Conn, error) {
	raw, err := plainDial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c := &controlled{Conn: raw, closed: make(chan struct{})}
	d.conns = append(d.conns, c)
	return c, nil
}

func (d *controlledDial) first() *controlled {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.conns[0]
}

func keepAlive(e *engine, c net.Conn) {
	r := bufio.NewReader(c)
	for e.read(r) {
		_, _ = io.WriteString(c, okResponse)
	}
}

// The engine's and the pool's keep-alive timers may end at the same moment. What the engine does to an idle connection
// is noticed before a request is sent on it.
func TestAnIdleConnectionOnWhichAnythingCameIsNotUsed(t *testing.T) {
	ownOnly(t, "sees that beside the request, and may be too late: its error says so")
	for _, row := range []struct {
		rule string
		do   func(net.Conn)
	}{
		{"its end", func(c net.Conn) { _ = c.Close() }},
		{"a reset", reset},
		{"a response that nobody asked for", func(c net.Conn) {
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
		}},
	} {
		t.Run(row.rule, func(t *testing.T) {
			var first net.Conn
			e := newEngine(t, func(e *engine, c net.Conn) {
				if e.accepted.Load() == 1 {
					first = c
				}
				keepAlive(e, c)
			})
			tr := newTransport(t, nil)
			require.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "first")))
			row.do(first)
			idle := tr.pool.hosts[hostKey{host: e.Addr().String()}]
			require.Len(t, idle, 1)
			waitFor(t, "arrived", func() bool { return !idle[0].quiet() })

			req := post(t, e.url(), "second")
			req.GetBody = nil
			assert.Equal(t, "ok", exchange(t, tr, req))
			assert.EqualValues(t, 2, e.requests.Load())
			assert.EqualValues(t, 2, e.accepted.Load())
		})
	}
}

// The other case: the request was written to a reused connection, and the engine closed that without a response. Nobody
// knows whether the engine read the request, so the caller must get SentMaybe, and the request is sent once.
func TestAPostWrittenToADyingConnectionIsNeverSentTwice(t *testing.T) {
	for _, end := range []struct {
		name  string
		close func(net.Conn)
		kind  Kind
	}{
		{"closed", func(c net.Conn) { _ = c.Close() }, KindEOF},
		{"reset", reset, KindReset},
	} {
		t.Run(end.name, func(t *testing.T) {
			e := newEngine(t, func(e *engine, c net.Conn) {
				r := bufio.NewReader(c)
				e.read(r)
				_, _ = io.WriteString(c, okResponse)
				if e.read(r) {
					end.close(c)
				}
			})
			tr := newTransport(t, nil)
			require.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "first")))

			_, err := tr.RoundTrip(post(t, e.url(), "second"))

			got := failure(t, err, SentMaybe, end.kind)
			assert.True(t, got.Reused)
			assert.EqualValues(t, 2, e.requests.Load(), "one for each RoundTrip")
			assert.EqualValues(t, 1, e.accepted.Load(), "no second connection was tried")
		})
	}
}

// If nothing of a request was written, it goes out on another connection, provided its body can be read again or is
// still in the write buffer. If not, the caller must learn that nothing was sent.
func TestAWriteThatFailsBeforeItsFirstByteIsNotSent(t *testing.T) {
	ownOnly(t, "sends again only what GetBody gives, and reports the rest as SentNothing")
	large := strings.Repeat("x", 1<<20)
	for _, row := range []struct {
		rule       string
		body       string
		rewindable bool
		again      bool
	}{
		{"small", "second", false, true},
		{"large, rewindable", large, true, true},
		{"large, to be had once", large, false, false},
	} {
		t.Run(row.rule, func(t *testing.T) {
			e := newEngine(t, keepAlive)
			d := new(controlledDial)
			tr := newTransport(t, &Options{DialContext: d.dial})
			require.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "first")))
			c := d.first()
			c.mu.Lock()
			c.writeErr = syscall.EPIPE
			c.mu.Unlock()

			req := post(t, e.url(), row.body)
			if !row.rewindable {
				req.GetBody = nil
			}
			resp, err := tr.RoundTrip(req)

			if row.again {
				require.NoError(t, err)
				drain(t, resp)
				assert.EqualValues(t, 2, e.requests.Load())
				return
			}
			got := failure(t, err, SentNothing, KindReset)
			assert.True(t, got.Reused)
			assert.False(t, got.final, "another connection may well work")
			assert.EqualValues(t, 1, e.requests.Load())
		})
	}
}

// An idle connection may die at any time. If a new one dies, the engine has failed, and the caller decides what to do.
func TestAWriteThatFailsOnANewConnectionIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	e := newEngine(t, keepAlive)
	d := new(controlledDial)
	tr := newTransport(t, &Options{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := d.dial(ctx, network, address)
		if err == nil {
			c.(*controlled).writeErr = syscall.EPIPE
		}
		return c, err
	}})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := tr.RoundTrip(post(t, e.url(), "x").WithContext(ctx))
	got := failure(t, err, SentNothing, KindReset)
	assert.False(t, got.Reused)
	assert.Len(t, d.conns, 1)
}

func TestABodyLongerThanItsLengthIsAnErrorAndCutThere(t *testing.T) {
	ownOnly(t, "connects before it reads a body")
	// The short one is read before there is a connection.
	for announced, sent := range map[int64]Sent{5: SentNothing, 100 << 10: SentMaybe} {
		got := make(chan int64, 1)
		e := newEngine(t, func(_ *engine, c net.Conn) {
			r := bufio.NewReader(c)
			req, err := http.ReadRequest(r)
			if err != nil {
				got <- -1
				return
			}
			n, _ := io.Copy(io.Discard, req.Body)
			got <- n
			_, _ = r.ReadByte() // it is the client that gives up
		})
		tr := newTransport(t, nil)
		req := post(t, e.url(), strings.Repeat("x", 200<<10))
		req.ContentLength = announced
		_, err := tr.RoundTrip(req)
		var failed *Error
		require.ErrorAs(t, err, &failed)
		assert.Equal(t, sent, failed.Sent)
		assert.True(t, failed.final, "the request is at fault, not the engine")
		if sent == SentMaybe {
			assert.LessOrEqual(t, <-got, announced)
		} else {
			assert.Zero(t, e.accepted.Load())
		}
	}
}

func TestErrorsOfReadingAResponseAreOfClassAnswered(t *testing.T) {
	for _, row := range []struct {
		rule string
		end  func(net.Conn, context.CancelFunc)
		kind Kind
	}{
		{"closed mid-stream", func(c net.Conn, _ context.CancelFunc) { _ = c.Close() }, KindEOF},
		{"reset mid-stream", func(c net.Conn, _ context.CancelFunc) { reset(c) }, KindReset},
		{"broken chunk", func(c net.Conn, _ context.CancelFunc) { _, _ = io.WriteString(c, "zz\r\n") }, KindProtocol},
		{"caller cancelled", func(_ net.Conn, cancel context.CancelFunc) { cancel() }, KindCanceled},
	} {
		t.Run(row.rule, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			goOn := make(chan struct{})
			e := newEngine(t, func(e *engine, c net.Conn) {
				r := bufio.NewReader(c)
				e.read(r)
				_, _ = io.WriteString(c, chunkedHead+"3\r\nabc\r\n")
				<-goOn
				row.end(c, cancel)
				_, _ = r.ReadByte()
			})
			tr := newTransport(t, nil)
			resp, err := tr.RoundTrip(post(t, e.url(), "x").WithContext(ctx))
			require.NoError(t, err)
			first := make([]byte, 3)
			_, err = io.ReadFull(resp.Body, first)
			require.NoError(t, err)
			assert.Equal(t, "abc", string(first))
			close(goOn)

			_, err = io.ReadAll(resp.Body)

			failure(t, err, SentAnswered, row.kind)
			assert.NotContains(t, err.Error(), "127.0.0.1")
			_ = resp.Body.Close()
		})
	}
}

func TestClassifyOfForeignErrorsAllowsTheLeast(t *testing.T) {
	assert.Equal(t, SentNothing, Classify(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}))
	assert.Equal(t, SentNothing, Classify(&net.DNSError{Err: "no such host"}))
	assert.Equal(t, SentMaybe, Classify(&net.OpError{Op: "read", Err: syscall.ECONNRESET}))
	assert.Equal(t, SentMaybe, Classify(io.EOF))
	assert.Equal(t, SentMaybe, Classify(errors.New("other")))
	assert.Equal(t, SentMaybe, Classify(nil))
}

func TestNamesSuitMetricsLabels(t *testing.T) {
	seen := map[string]bool{}
	for k := KindOther; k <= KindProtocol; k++ {
		assert.Regexp(t, `^[a-z_]+$`, k.String())
		assert.False(t, seen[k.String()], "two kinds are called %s", k)
		seen[k.String()] = true
	}
	assert.Equal(t, "other", Kind(200).String())
	assert.Equal(t, "maybe sent", SentMaybe.String())
	assert.Equal(t, slog.KindGroup, (&Error{}).LogValue().Kind())
}
