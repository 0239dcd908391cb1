// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

const tooLarge = "HTTP/1.1 413 Content Too Large\r\nContent-Length: 9\r\n\r\ntoo large"

// An engine may refuse a request by its head, before it has read the body. The caller must get this response, and not
// the error of the write that broke.
func TestAResponseBeforeTheBodyWasReadIsReturned(t *testing.T) {
	for _, row := range []struct {
		rule   string
		script func(*engine, net.Conn)
	}{
		{"and the connection reset", func(_ *engine, c net.Conn) {
			_, _ = c.Read(make([]byte, 1<<10))
			_, _ = io.WriteString(c, tooLarge)
		}},
		{"and the connection left open", func(e *engine, c net.Conn) {
			_, _ = c.Read(make([]byte, 1<<10))
			_, _ = io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\n"+tooLarge)
			for e.requests.Load() == 0 {
				time.Sleep(time.Millisecond)
			}
		}},
	} {
		t.Run(row.rule, func(t *testing.T) {
			if row.rule == "and the connection reset" {
				ownOnly(t, "may return the broken write in place of a response before a reset")
			}
			e := newEngine(t, row.script)
			tr := newTransport(t, nil)
			start := time.Now()
			resp := roundTrip(t, tr, post(t, e.url(), strings.Repeat("x", 64<<20)))
			assert.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
			assert.Equal(t, "too large", drain(t, resp))
			assert.Less(t, time.Since(start), 20*time.Second)
			assert.Empty(t, tr.pool.hosts, "half a request is on the connection")
			e.requests.Add(1)
		})
	}
}

// The engine closes the connection without a response while the request is still being written.
func TestAnEndInPlaceOfAnEarlyResponseEndsTheWriting(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		_ = c.(*net.TCPConn).CloseWrite()
		for e.requests.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	_, err := newTransport(t, nil).RoundTrip(post(t, e.url(), strings.Repeat("x", 64<<20)))
	e.requests.Add(1)
	var got *Error
	require.ErrorAs(t, err, &got)
	if !netHTTP { // which may see the end before it has written anything
		assert.Equal(t, SentMaybe, got.Sent)
	}
	assert.Equal(t, KindEOF, got.Kind)
}

// net/http calls a new connection idle that ends before a byte of the request was written. Nothing of the request was
// sent, and the request itself is not at fault.
func TestANewConnectionThatEndsBeforeTheRequest(t *testing.T) {
	w := newWatch()
	w.connected = true
	got := w.failure(t.Context(), errors.New("http: server closed idle connection"))
	assert.Equal(t, SentNothing, got.Sent)
	assert.Equal(t, KindEOF, got.Kind)
	assert.False(t, got.final)
}

// If an engine reads slowly, neither the request nor the connection is given up: the read that looks for an early
// response also reads the response when it comes.
func TestASlowlyReadBodyIsWrittenToItsEnd(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		time.Sleep(patience + 100*time.Millisecond)
		keepAlive(e, c)
	})
	tr := newTransport(t, nil)
	for range 2 {
		assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), strings.Repeat("x", 32<<20))))
		time.Sleep(2 * minPause) // which a connection needs after a long exchange
	}
	assert.EqualValues(t, 1, e.accepted.Load())
}

func TestTheContextEndsARequestWhereverItIs(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{}, 1) // the engine has the first byte
	first := func(c net.Conn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		begun <- struct{}{}
	}
	silent := func(_ *engine, c net.Conn) { first(c); _, _ = io.Copy(io.Discard, c) }
	deaf := func(e *engine, c net.Conn) {
		first(c)
		for e.requests.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	for _, row := range []struct {
		rule   string
		script func(*engine, net.Conn)
		size   int
	}{
		{"while the head is awaited", silent, 10},
		{"while a large body is written", deaf, 64 << 20},
	} {
		for _, kind := range []Kind{KindCanceled, KindTimeout} {
			t.Run(row.rule+": "+kind.String(), func(t *testing.T) {
				e := newEngine(t, row.script)
				req := post(t, e.url(), strings.Repeat("x", row.size))
				ctx, cancel := context.WithCancel(t.Context())
				if kind == KindTimeout {
					ctx, cancel = context.WithTimeout(t.Context(), 3*time.Second)
				}
				defer cancel()
				var waiting sync.WaitGroup
				waiting.Go(func() {
					<-begun
					if kind == KindCanceled {
						time.Sleep(20 * time.Millisecond)
						cancel()
					}
				})
				start := time.Now()
				_, err := newTransport(t, nil).RoundTrip(req.WithContext(ctx))
				waiting.Wait()
				e.requests.Add(1)
				assert.Less(t, time.Since(start), 20*time.Second)
				failure(t, err, SentMaybe, kind)
			})
		}
	}
}

func TestAContextThatHasEndedSendsNothing(t *testing.T) {
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	exchange(t, tr, post(t, e.url(), "x"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := tr.RoundTrip(post(t, e.url(), "x").WithContext(ctx))
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, SentNothing, Classify(err))
	assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "x")))
	assert.EqualValues(t, 1, e.accepted.Load(), "the idle connection was left alone")
}

// A context belongs to one request, not to the connection that carried it.
func TestTheContextOfAnEarlierRequestEndsNothing(t *testing.T) {
	t.Parallel()
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "x").WithContext(ctx)))
		cancel()
	}
	opened := e.accepted.Load() // a connection pauses after an exchange that took long, as on a busy machine
	time.Sleep(2100 * time.Millisecond)
	assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "x")))
	assert.Equal(t, opened, e.accepted.Load())
}

// A caller ends a stream with Close, which any goroutine may call.
func TestCloseEndsARunningRead(t *testing.T) {
	e := newEngine(t, func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		e.read(r)
		_, _ = io.WriteString(c, chunkedHead)
		_, _ = r.ReadByte()
	})
	resp, err := newTransport(t, nil).RoundTrip(post(t, e.url(), "x"))
	require.NoError(t, err)
	time.AfterFunc(20*time.Millisecond, func() { _ = resp.Body.Close() })
	_, err = resp.Body.Read(make([]byte, 4096))
	require.ErrorIs(t, err, http.ErrBodyReadAfterClose)
	assert.Equal(t, SentAnswered, Classify(err))
	_, err = resp.Body.Read(make([]byte, 4096))
	require.ErrorIs(t, err, http.ErrBodyReadAfterClose)
	require.NoError(t, resp.Body.Close())
}

func TestCloseBesideReadNeverHarmsTheNextRequest(t *testing.T) {
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	for range 300 {
		resp := roundTrip(t, tr, post(t, e.url(), "x"))
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = resp.Body.Close()
		}()
		_, _ = io.Copy(io.Discard, resp.Body)
		assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "x")))
		<-done
	}
}

func TestReadsAfterTheEndSaySo(t *testing.T) {
	e := newEngine(t, keepAlive)
	resp, err := newTransport(t, nil).RoundTrip(post(t, e.url(), "x"))
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	_, err = resp.Body.Read(make([]byte, 1))
	assert.Equal(t, io.EOF, err)
	_, err = resp.Body.Read(nil)
	assert.Equal(t, io.EOF, err)
	require.NoError(t, resp.Body.Close())
	_, err = resp.Body.Read(make([]byte, 1))
	require.ErrorIs(t, err, http.ErrBodyReadAfterClose)
}

// Each read becomes a write to the client, so what the socket has should leave at once, whatever the size of its
// chunks, and none of it be waited for.
func TestChunksThatCameTogetherAreReadTogether(t *testing.T) {
	ownOnly(t, "reads by its own buffer")
	goOn := make(chan struct{})
	e := newEngine(t, func(e *engine, c net.Conn) {
		r := bufio.NewReader(c)
		e.read(r)
		_, _ = io.WriteString(c, chunkedHead)
		for range goOn {
			_, _ = io.WriteString(c, strings.Repeat("64\r\n"+strings.Repeat("x", 100)+"\r\n", 30)+"64\r\nhalf")
			<-goOn
			_, _ = io.WriteString(c, strings.Repeat("x", 96)+"\r\n")
		}
	})
	defer close(goOn)
	resp := roundTrip(t, newTransport(t, nil), post(t, e.url(), "x"))
	defer resp.Body.Close()
	b := resp.Body.(*body)
	for _, room := range []int{4 << 10, 32 << 10, 8 << 10} {
		goOn <- struct{}{}
		if b.c.quietCheck != nil {
			waitFor(t, "arrived", func() bool { return !b.c.quiet() })
		}
		n, err := resp.Body.Read(make([]byte, room))
		require.NoError(t, err)
		assert.Equal(t, 3004, n, "all that was there")
		assert.Nil(t, b.c.buf, "a stream that waits holds no buffer")
		goOn <- struct{}{}
		n, err = io.ReadFull(resp.Body, make([]byte, 96))
		require.NoError(t, err)
		assert.Equal(t, 96, n)
	}
}

// A caller learns from a full read that more is waiting, and takes a larger buffer then. Chunks' framing must not keep
// reads from ever being full.
func TestABusyStreamFillsReads(t *testing.T) {
	e := newEngine(t, says(chunkedHead+strings.Repeat("64\r\n"+strings.Repeat("x", 100)+"\r\n", 4000)+"0\r\n\r\n"))
	resp, err := newTransport(t, nil).RoundTrip(post(t, e.url(), "x"))
	require.NoError(t, err)
	defer resp.Body.Close()
	full, total := 0, 0
	p := make([]byte, 4<<10)
	for err == nil {
		var n int
		n, err = resp.Body.Read(p)
		total += n
		if n == len(p) {
			full++
		}
	}
	assert.Equal(t, io.EOF, err)
	assert.Equal(t, 400_000, total)
	assert.Greater(t, full, 50, "of 98")
}

func TestARoundTripAllocatesLittle(t *testing.T) {
	ownOnly(t, "allocates 48 times")
	e := newEngine(t, func(_ *engine, c net.Conn) {
		buf := make([]byte, 8<<10)
		for {
			if _, err := c.Read(buf); err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"+
				"content-length: 2\r\ncontent-type: application/json\r\n\r\nok")
		}
	})
	tr := newTransport(t, nil)
	payload := make([]byte, 2<<10)
	req := post(t, e.url(), "")
	req.ContentLength = int64(len(payload))
	p := make([]byte, 512)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req = req.WithContext(ctx)
	count := testing.AllocsPerRun(200, func() {
		req.Body = io.NopCloser(bytes.NewReader(payload))
		resp, err := tr.RoundTrip(req)
		if err != nil {
			panic(err)
		}
		for err == nil {
			_, err = resp.Body.Read(p)
		}
	})
	assert.LessOrEqual(t, count, 20.0)
}

// TLS may have read more from the socket than the response. A look at the socket does not find those bytes.
func TestWordsUnaskedUnderTLSAreSeen(t *testing.T) {
	ca := sharedtest.NewAuthority(t, "ca")
	certPEM, keyPEM := ca.Issue(t, "engine")
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	require.NoError(t, err)
	for _, row := range []struct {
		rule, more string
		kept       bool
	}{
		{"a response alone", "", true},
		{"another that nobody asked for", okResponse, false},
	} {
		t.Run(row.rule, func(t *testing.T) {
			if !row.kept {
				ownOnly(t, "may send the next request before it has seen them")
			}
			e := newEngine(t, func(e *engine, c net.Conn) {
				joined := &joining{Conn: c}
				secured := tls.Server(joined, &tls.Config{Certificates: []tls.Certificate{cert}})
				r := bufio.NewReader(secured)
				for e.read(r) {
					joined.hold = true
					_, _ = io.WriteString(secured, okResponse)
					if row.more != "" {
						_, _ = io.WriteString(secured, row.more)
					}
					joined.hold = false
					_, _ = c.Write(joined.held)
					joined.held = nil
				}
			})
			tr := newTransport(t, &Options{TLS: trustOnly(ca)})
			for range 3 {
				assert.Equal(t, "ok", exchange(t, tr, post(t, "https"+e.url()[4:], "x")))
			}
			if row.kept {
				assert.EqualValues(t, 1, e.accepted.Load())
			} else {
				assert.EqualValues(t, 3, e.accepted.Load())
			}
		})
	}
}

// joining sends several TLS records in one segment.
type joining struct {
	net.Conn
	hold bool
	held []byte
}

func (j *joining) Write(p []byte) (int, error) {
	if j.hold {
		j.held = append(j.held, p...)
		return len(p), nil
	}
	return j.Conn.Write(p)
}

// The worst that a pool can do is to give one client's response to another. Here requests end in every way at any
// moment, and each response names its request.
func TestAResponseIsAlwaysThatOfItsRequest(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		if len(b)%2 == 0 {
			w.Header().Set("Content-Length", strconv.Itoa(10*len(b)))
		}
		for range 10 {
			_, _ = w.Write(b)
			if len(b)%2 == 1 {
				_ = http.NewResponseController(w).Flush()
			}
		}
	})
	tr := newTransport(t, nil)
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(worker)))
			for i := range 60 {
				id := strings.Repeat(fmt.Sprintf("<%d.%d>", worker, i), 1+random.IntN(300))
				ctx, cancel := context.WithCancel(t.Context())
				var timer *time.Timer
				if random.IntN(2) == 0 {
					timer = time.AfterFunc(time.Duration(random.IntN(1500))*time.Microsecond, cancel)
				}
				resp, err := tr.RoundTrip(post(t, s.URL, id).WithContext(ctx))
				if err == nil {
					limit := int64(len(id) * 11)
					if random.IntN(3) == 0 {
						limit = random.Int64N(limit)
					}
					b, err := io.ReadAll(io.LimitReader(resp.Body, limit))
					assert.True(t, strings.HasPrefix(strings.Repeat(id, 10), string(b)), "another request's response")
					assert.True(t, err == nil || ctx.Err() != nil, "%v", err)
					_ = resp.Body.Close()
				} else {
					assert.ErrorIs(t, err, context.Canceled)
				}
				cancel()
				if timer != nil {
					timer.Stop()
				}
			}
		})
	}
	wg.Wait()
}
