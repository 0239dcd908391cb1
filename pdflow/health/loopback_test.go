// SPDX-License-Identifier: Apache-2.0

package health_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/health"
)

// serve runs a prober with the default client against real servers, until the test ends.
func serve(t testing.TB, o *health.Options, urls ...string) *discovery.Set {
	t.Helper()
	var endpoints []discovery.Endpoint
	for _, u := range urls {
		e, err := discovery.New(u, discovery.RoleBoth)
		require.NoError(t, err)
		endpoints = append(endpoints, e)
	}
	set, err := static.NewSet(endpoints...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- health.New(set, o).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	return set
}

func server(t testing.TB, h http.HandlerFunc, hook func(net.Conn, http.ConnState)) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ConnState = hook
	s.Start()
	t.Cleanup(s.Close)
	return s.URL
}

func TestOneConnectionCarriesAllProbesOfAnEndpoint(t *testing.T) {
	var probes, conns atomic.Int32
	url := server(t, func(w http.ResponseWriter, _ *http.Request) {
		probes.Add(1)
		_, _ = w.Write([]byte(`{"status":"ok"}`))
	}, func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	})
	// A probe that is given up takes its connection with it.
	serve(t, &health.Options{Interval: 5 * time.Millisecond, Timeout: time.Minute}, url)
	require.Eventually(t, func() bool { return probes.Load() >= 20 }, 20*time.Second, 5*time.Millisecond)
	assert.EqualValues(t, 1, conns.Load())
}

func TestConnectionsCloseWithTheRun(t *testing.T) {
	closed := make(chan struct{})
	busy := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }
	url := server(t, busy, func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			close(closed)
		}
	})
	t.Run("run", func(t *testing.T) {
		probed := make(chan struct{})
		serve(t, &health.Options{Interval: time.Hour, Observe: func(string, bool, error) { close(probed) }}, url)
		<-probed
	})
	select {
	case <-closed:
	case <-time.After(3 * time.Second): // the idle timeout is 4 s
		assert.Fail(t, "the connection outlives the prober")
	}
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	var followed atomic.Int32
	url := server(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/health" {
			followed.Add(1)
		}
		http.Redirect(w, req, "/elsewhere", http.StatusFound)
	}, nil)
	set := serve(t, &health.Options{Interval: 5 * time.Millisecond}, url)
	require.NoError(t, set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool {
		return len(s.Endpoints) == 1 && s.Endpoints[0].Phase == discovery.PhaseNotReady
	}))
	assert.Zero(t, followed.Load())
}
