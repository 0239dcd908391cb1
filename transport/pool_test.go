// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestThePoolKeepsNoMoreThanItsLimit(t *testing.T) {
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	for _, limit := range []int{-1, 3} {
		url, accepted := barrier(t, 10)
		tr := newTransport(t, &Options{MaxIdlePerHost: limit})
		burst(t, tr, url, 10)
		kept := 0
		for _, idle := range tr.pool.hosts {
			kept += len(idle)
		}
		assert.Equal(t, max(limit, 0), kept)
		assert.EqualValues(t, 10, accepted.Load())
	}
}

// Engines come and go; a pool that remembered each would grow for ever.
func TestThePoolForgetsEngines(t *testing.T) {
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	e := newEngine(t, keepAlive)
	tr := newTransport(t, &Options{IdleTimeout: 20 * time.Millisecond})
	exchange(t, tr, post(t, e.url(), "x"))
	waitFor(t, "forgotten", func() bool {
		tr.pool.mu.Lock()
		defer tr.pool.mu.Unlock()
		return len(tr.pool.hosts) == 0 && !tr.pool.armed
	})
	assert.Equal(t, "ok", exchange(t, tr, post(t, e.url(), "x")))
	assert.EqualValues(t, 2, e.accepted.Load())
}

// The sweep may be late. Until then the pool does not hand out a connection whose time is over.
func TestAConnectionIdleForTooLongIsNotUsedThoughTheSweepIsLate(t *testing.T) {
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	e := newEngine(t, keepAlive)
	tr := newTransport(t, nil)
	exchange(t, tr, post(t, e.url(), "x"))
	idle := tr.pool.hosts[hostKey{host: e.Addr().String()}]
	require.Len(t, idle, 1)
	idle[0].since = time.Now().Add(-defaultIdleTimeout)
	exchange(t, tr, post(t, e.url(), "x"))
	assert.EqualValues(t, 2, e.accepted.Load())
}

// The connections of a large fleet come due one after another. The pool must not look at all of them for each.
func TestTheSweepPausesBetweenConnectionsThatComeDue(t *testing.T) {
	t.Parallel()
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	e := newEngine(t, keepAlive)
	tr := newTransport(t, &Options{IdleTimeout: 8 * time.Second}) // a pause is a quarter of it
	var looks atomic.Int32
	const n = 20
	look := func() bool { looks.Add(1); return true }
	for i := range n {
		c := tr.newConn(hostKey{host: strconv.Itoa(i)}, mustDial(t, e), nil)
		c.quietCheck = look
		tr.pool.put(c)
	}
	tr.pool.mu.Lock()
	begin := time.Now().Add(-8*time.Second + 800*time.Millisecond)
	for i := range n { // due in 800, 810, 820 ms, ...
		tr.pool.hosts[hostKey{host: strconv.Itoa(i)}][0].since = begin.Add(time.Duration(i) * 10 * time.Millisecond)
	}
	tr.pool.mu.Unlock()
	tr.pool.sweep()
	assert.EqualValues(t, n, looks.Load())
	time.Sleep(900 * time.Millisecond) // some of them are due
	assert.EqualValues(t, n, looks.Load())
	waitFor(t, "closed", func() bool {
		tr.pool.mu.Lock()
		defer tr.pool.mu.Unlock()
		return len(tr.pool.hosts) == 0 && !tr.pool.armed
	})

	before := looks.Load()
	c := tr.newConn(hostKey{host: "x"}, mustDial(t, e), nil)
	c.quietCheck = look
	tr.pool.put(c)
	tr.pool.sweep()
	assert.Equal(t, before, looks.Load(), "one that was just used is not looked at")
}

// Without a limit of time, connections that engines closed would stay half closed for ever.
func TestTheSweepClosesWhatEnginesClosed(t *testing.T) {
	ownOnly(t, "has a pool of its own, which cannot be looked into")
	e := newEngine(t, keepAlive)
	tr := newTransport(t, &Options{IdleTimeout: -1})
	exchange(t, tr, post(t, e.url(), "x"))
	tr.pool.sweep()
	require.Len(t, tr.pool.hosts, 1, "without a limit, the living stay")
	c := tr.pool.hosts[hostKey{host: e.Addr().String()}][0]
	e.mu.Lock()
	_ = e.conns[0].Close()
	e.mu.Unlock()
	waitFor(t, "arrived", func() bool { return !c.quiet() })
	tr.pool.sweep()
	assert.Empty(t, tr.pool.hosts)
	_, err := c.raw.Write([]byte("x"))
	assert.Error(t, err, "closed")
}

func TestARequestCanHaveANewConnection(t *testing.T) {
	for name, options := range map[string]*Options{"own": nil, "net/http": {NetHTTP: true}} {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t, keepAlive)
			tr := newTransport(t, options)
			for accepted := range 3 {
				resp, err := Send(WithNewConnection(t.Context()), tr, post(t, e.url(), "x"))
				require.NoError(t, err)
				drain(t, resp)
				assert.EqualValues(t, accepted+1, e.accepted.Load())
			}
		})
	}
}

// What ended one idle connection unseen has likely ended the engine's others too, and no other engine's.
func TestAReusedConnectionThatDiesTakesTheIdleOnesOfItsEngineWithIt(t *testing.T) {
	ownOnly(t, "cannot close the idle connections of one engine")
	e, other := newEngine(t, keepAlive), newEngine(t, keepAlive)
	var controls controlledDial
	tr := newTransport(t, &Options{DialContext: controls.dial})
	exchange(t, tr, post(t, other.url(), "x"))
	var open []*http.Response
	for range 5 {
		resp := roundTrip(t, tr, post(t, e.url(), "x"))
		open = append(open, resp)
	}
	for _, resp := range open {
		drain(t, resp)
	}
	key := hostKey{host: e.Addr().String()}
	for _, c := range tr.pool.hosts[key] {
		raw := c.raw.(*controlled) //nolint:forcetypeassert // what the dialer returned
		raw.readErr = syscall.ECONNRESET
		require.NoError(t, raw.SetReadDeadline(longAgo))
	}
	_, err := tr.RoundTrip(post(t, e.url(), "x"))
	var got *Error
	require.ErrorAs(t, err, &got)
	assert.Equal(t, Error{Sent: SentMaybe, Kind: KindReset, Reused: true, Err: syscall.ECONNRESET}, *got)
	// A failure must not print a connection and all that it leads to.
	kept := map[string]int{"dead": len(tr.pool.hosts[key]),
		"other": len(tr.pool.hosts[hostKey{host: other.Addr().String()}])}
	assert.Equal(t, map[string]int{"dead": 0, "other": 1}, kept)
}

func mustDial(t *testing.T, e *engine) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", e.Addr().String())
	require.NoError(t, err)
	return c
}
