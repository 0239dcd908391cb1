// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"context"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

// start opens a connector's listener at a free port, or at the given address.
func start(t testing.TB, o lmcachepd.Options) *lmcachepd.Connector {
	t.Helper()
	if o.NotifyListen == "" {
		o.NotifyListen = "127.0.0.1:0"
	}
	c := open(t, &o)
	require.NoError(t, c.Start(context.Background()))
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c
}

func limit(d time.Duration) *config.Duration { return (*config.Duration)(&d) }

// freePort returns an address at which nobody listens.
func freePort(t testing.TB) string {
	t.Helper()
	port, err := freeport.One()
	require.NoError(t, err)
	return "127.0.0.1:" + port
}

// pusher is a rank of P: a ZeroMQ PUSH socket that shares no code with the listener.
func pusher(t testing.TB, address string) func(frames ...[]byte) {
	t.Helper()
	push, err := zmq.Dial(t.Context(), "PUSH", address, "")
	require.NoError(t, err)
	t.Cleanup(func() { _ = push.Close() })
	return func(frames ...[]byte) {
		t.Helper()
		require.NoError(t, push.Send(frames...))
	}
}

func encoded(t testing.TB, v any) []byte {
	t.Helper()
	raw, err := msgpack.Marshal(v)
	require.NoError(t, err)
	return raw
}

func notice(t testing.TB, id string) []byte {
	return encoded(t, struct {
		Type  string `msgpack:"type"`
		ReqID string `msgpack:"req_id"`
	}{"ProxyNotif", id})
}

// armed returns a session that expects notices.
func armed(t testing.TB, c *lmcachepd.Connector) (s *connector.Session,
	wait func(context.Context) (connector.Event, error), done func(error)) {
	t.Helper()
	s = session(t, connector.APICompletions, `{"prompt":"x"}`, receiverOfTwo)
	wait, done = c.Expect(s)
	return s, wait, done
}

// eventually waits until the listener has the given counts.
func eventually(t testing.TB, c *lmcachepd.Connector, want lmcachepd.Notices) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if got := c.Notices(); got == want || time.Now().After(deadline) {
			require.Equal(t, want, got)
			return
		}
	}
}

func TestTheWaitIsOverWithOneNoticePerReceiverPort(t *testing.T) {
	c := start(t, lmcachepd.Options{NotifyTimeout: limit(time.Minute)})
	s, wait, done := armed(t, c)
	defer done(nil)
	first, second := pusher(t, c.Addr()), pusher(t, c.Addr())

	first(notice(t, s.ID)) // a notice counts even if it comes before the wait
	eventually(t, c, lmcachepd.Notices{Matched: 1})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	_, err := wait(ctx)
	cancel()
	require.ErrorIs(t, err, context.DeadlineExceeded, "one of two ranks has not told yet")

	second(notice(t, s.ID))
	e, err := wait(t.Context())
	require.NoError(t, err)
	assert.Equal(t, notice(t, s.ID), e.Body)
	assert.WithinDuration(t, time.Now(), e.At, 5*time.Second)
}

// P's tensor-parallel size may differ from D's, and with MLA one rank of P sends for all.
func TestTheNumberOfNoticesCanBeSet(t *testing.T) {
	c := start(t, lmcachepd.Options{Notifications: 1})
	s, wait, done := armed(t, c)
	defer done(nil)
	pusher(t, c.Addr())(notice(t, s.ID))
	_, err := wait(t.Context())
	require.NoError(t, err)
}

// Nothing reports a push that failed: only the time limit ends the wait. The listener keeps nothing of it, and counts a
// late notice as unknown.
func TestLostNotices(t *testing.T) {
	c := start(t, lmcachepd.Options{NotifyTimeout: limit(20 * time.Millisecond), Notifications: 1})
	s, wait, done := armed(t, c)
	_, err := wait(t.Context())
	require.Error(t, err)
	assert.NotContains(t, err.Error(), s.ID)
	done(err)
	pusher(t, c.Addr())(notice(t, s.ID))
	eventually(t, c, lmcachepd.Notices{Unknown: 1})
}

func TestSurplusUnknownAndForeignMessagesAreCountedAndNothingElse(t *testing.T) {
	c := start(t, lmcachepd.Options{Notifications: 1})
	s, wait, done := armed(t, c)
	push := pusher(t, c.Addr())
	push(notice(t, s.ID))
	_, err := wait(t.Context())
	require.NoError(t, err)
	push(notice(t, s.ID))                              // a duplicate
	push(notice(t, "17"))                              // of another gateway, which counts from 1
	push([]byte("ProxyNotif"))                         // no msgpack
	push([]byte{})                                     // nothing
	push([]byte("a"), notice(t, s.ID))                 // two frames
	push(encoded(t, map[string]string{"req_id": "1"})) // no type
	push(encoded(t, map[string]string{"type": "AllocRequest", "req_id": s.ID}))
	eventually(t, c, lmcachepd.Notices{Matched: 1, Surplus: 1, Unknown: 1, Malformed: 5})
	done(nil)
	push(notice(t, s.ID))
	eventually(t, c, lmcachepd.Notices{Matched: 1, Surplus: 1, Unknown: 2, Malformed: 5})
}

// A faulty peer does not stop the listener or its other peers. The tests of internal/zmtp say who is let in.
func TestBadPeersHarmNobody(t *testing.T) {
	c := start(t, lmcachepd.Options{Notifications: 1})
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", c.Addr())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		return conn
	}
	hello := "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + strings.Repeat("\x00", 48)
	for rule, says := range map[string]string{"another protocol": "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"a SUB socket": hello + "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"} {
		conn := dial()
		_, err := io.WriteString(conn, says)
		require.NoError(t, err, rule)
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
		_, err = io.Copy(io.Discard, conn)
		require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "%s: it was not sent away", rule)
	}
	dial()                                         // sends nothing
	_, err := io.WriteString(dial(), hello+"\x04") // stops in the middle of the handshake
	require.NoError(t, err)
	require.NoError(t, dial().Close())

	s, wait, done := armed(t, c)
	defer done(nil)
	pusher(t, c.Addr())(notice(t, s.ID))
	_, err = wait(t.Context())
	require.NoError(t, err)
	assert.NoError(t, c.HealthCheck(t.Context()))
	eventually(t, c, lmcachepd.Notices{Matched: 1, Refused: 2}) // those who are slow are waited for
}

// All connectors of a process get the engines' notices at one address. The last one to close frees the address.
func TestOneListenerPerAddress(t *testing.T) {
	address := freePort(t)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	a, b := start(t, lmcachepd.Options{NotifyListen: address, Notifications: 1}),
		start(t, lmcachepd.Options{NotifyListen: "localhost:" + port, Notifications: 1})
	require.NoError(t, a.Start(t.Context()), "starting twice is starting once")
	assert.Equal(t, a.Addr(), b.Addr())
	sa, waitA, doneA := armed(t, a)
	sb, waitB, doneB := armed(t, b)
	defer doneA(nil)
	defer doneB(nil)
	push := pusher(t, address)
	push(notice(t, sb.ID))
	push(notice(t, sa.ID))
	_, err = waitA(t.Context())
	require.NoError(t, err)
	_, err = waitB(t.Context())
	require.NoError(t, err)

	require.NoError(t, a.Close())
	require.NoError(t, a.Close(), "closing twice is closing once")
	sb, waitB, done := armed(t, b)
	defer done(nil)
	push(notice(t, sb.ID))
	_, err = waitB(t.Context())
	require.NoError(t, err, "the other still listens")
	require.NoError(t, b.Close())
	ln, err := net.Listen("tcp", address)
	require.NoError(t, err, "the address is free at once")
	require.NoError(t, ln.Close())
	require.NoError(t, a.Start(t.Context()), "and may be taken again")
}

func TestAnAddressThatIsTakenIsToldByStart(t *testing.T) {
	ln, err := net.Listen("tcp", freePort(t))
	require.NoError(t, err)
	defer ln.Close()
	c := open(t, &lmcachepd.Options{NotifyListen: ln.Addr().String()})
	require.Error(t, c.Start(t.Context()))
	assert.Empty(t, c.Addr())
	require.NoError(t, ln.Close())
	require.NoError(t, c.Start(t.Context()))
	require.NoError(t, c.Close())
}

func TestWithoutStart(t *testing.T) {
	c := open(t, nil)
	assert.Error(t, c.HealthCheck(t.Context()))
	assert.Empty(t, c.Addr())
	assert.Zero(t, c.Notices())
	require.NoError(t, c.Close())
	_, wait, done := armed(t, c)
	_, err := wait(t.Context())
	require.Error(t, err)
	done(err)
}

// When a gateway stops, no session waits until the time limit.
func TestCloseEndsAllWaits(t *testing.T) {
	c := start(t, lmcachepd.Options{NotifyTimeout: limit(time.Hour)})
	_, wait, done := armed(t, c)
	defer done(nil)
	ended := make(chan error, 1)
	go func() { _, err := wait(context.Background()); ended <- err }()
	require.NoError(t, c.Close())
	select {
	case err := <-ended:
		require.Error(t, err)
	case <-time.After(20 * time.Second):
		t.Fatal("it still waits")
	}
}

// Many sessions run at once, and their notices come in any order over a few connections. Each session gets its own.
func TestManySessionsAtOnce(t *testing.T) {
	c := start(t, lmcachepd.Options{NotifyTimeout: limit(time.Minute)})
	var wg sync.WaitGroup
	ranks := []func(...[]byte){pusher(t, c.Addr()), pusher(t, c.Addr())}
	var sending sync.Mutex
	for range 200 {
		wg.Go(func() {
			s, wait, done := armed(t, c)
			defer done(nil)
			for _, push := range ranks {
				sending.Lock()
				push(notice(t, s.ID))
				sending.Unlock()
			}
			e, err := wait(context.Background())
			assert.NoError(t, err)
			assert.Contains(t, string(e.Body), s.ID)
		})
	}
	wg.Wait()
	eventually(t, c, lmcachepd.Notices{Matched: 400})
}
