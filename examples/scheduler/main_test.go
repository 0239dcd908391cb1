// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is two prefill and two decode engines behind the scheduler.
type world struct {
	*scheduler
	p, d [2]*enginesim.Engine
	url  string
	mu   sync.Mutex
	seen []seen // recorded by a post-hook of the test
}

type seen struct {
	prefill, decode string
	err             pdflow.Code
}

func start(t *testing.T, decode enginesim.Config, opts ...pdflow.Option) *world {
	t.Helper()
	w := &world{}
	for i := range w.p {
		port, err := freeport.Find(1) // which nobody takes when the engine has ended
		require.NoError(t, err)
		w.p[i], w.d[i], err = enginesim.Pair(enginesim.Config{Listen: "127.0.0.1:" + strconv.Itoa(port)}, decode)
		require.NoError(t, err)
		t.Cleanup(func() { _ = w.p[i].Close(); _ = w.d[i].Close() })
	}
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	w.scheduler, err = newScheduler(ctx, w.p[0].URL()+","+w.p[1].URL(), w.d[0].URL()+","+w.d[1].URL(), opts...)
	require.NoError(t, err)
	w.hooks = append(w.hooks, func(_ request, p, d string, o *pdflow.Outcome) {
		w.mu.Lock()
		defer w.mu.Unlock()
		x := seen{p, d, ""}
		if o.Err != nil {
			x.err = o.Err.Code
		}
		w.seen = append(w.seen, x)
	})
	server := httptest.NewUnstartedServer(w.flow)
	server.Config.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		_ = c.(*net.TCPConn).SetWriteBuffer(4096) // so that a client that reads nothing is noticed soon
		return ctx
	}
	server.Start()
	w.url = server.URL
	t.Cleanup(func() {
		server.Close()
		last, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, w.flow.Shutdown(last))
		cancel()
		http.DefaultClient.CloseIdleConnections()
	})
	require.NoError(t, w.set.WaitReady(t.Context(), func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 4 }))
	return w
}

func (w *world) hooked() []seen {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]seen(nil), w.seen...)
}

func (w *world) busy() int {
	w.scheduler.mu.Lock()
	defer w.scheduler.mu.Unlock()
	sum := 0
	for _, n := range w.load {
		sum += n
	}
	return sum
}

func (w *world) occupy(engine string, tokens int) {
	w.scheduler.mu.Lock()
	defer w.scheduler.mu.Unlock()
	w.load[engine] += tokens
}

func idOf(e *enginesim.Engine) string { return strings.TrimPrefix(e.URL(), "http://") }

func body(n int, stream bool) string {
	prompt := strings.Repeat("a cat on a mat that ", 40)
	return fmt.Sprintf(`{"model":"tiny","prompt":"%d %s","max_tokens":12,"temperature":0,"stream":%t}`, n, prompt,
		stream)
}

func post(t *testing.T, url, body string) (status int, h http.Header, response string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(b)
}

func TestARequestIsServedByThePairThatWasChosen(t *testing.T) {
	w := start(t, enginesim.Config{})
	alone, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer alone.Close()
	status, _, response := post(t, w.url+"/v1/completions", body(0, false))
	require.Equal(t, http.StatusOK, status, response)
	_, _, want := post(t, alone.URL()+"/v1/completions", body(0, false))
	assert.Equal(t, gjson.Get(want, "choices.0.text").String(), gjson.Get(response, "choices.0.text").String())
	moved := w.d[0].Stats().ExternalKVTransfer + w.d[1].Stats().ExternalKVTransfer
	assert.Positive(t, moved, "decode computed the prompt itself")
	require.Eventually(t, func() bool { return len(w.hooked()) == 1 }, 20*time.Second, time.Millisecond)
	assert.Empty(t, w.hooked()[0].err)
	assert.Zero(t, w.busy())
}

// The post-hooks learn of a stream when it has ended. Until then it counts as load of its engines, and the next request
// goes to other engines.
func TestAStreamCountsUntilItsEnd(t *testing.T) {
	w := start(t, enginesim.Config{ITL: 200 * time.Millisecond}) // the stream lasts while the second request begins
	resp, err := http.Post(w.url+"/v1/completions", "application/json", strings.NewReader(body(0, true)))
	require.NoError(t, err)
	defer resp.Body.Close()
	_, err = resp.Body.Read(make([]byte, 1))
	require.NoError(t, err)
	w.scheduler.mu.Lock()
	assert.Len(t, w.load, 2)
	for id, n := range w.load {
		assert.Positive(t, n, id)
	}
	w.scheduler.mu.Unlock()
	assert.Empty(t, w.hooked())
	status, _, response := post(t, w.url+"/v1/completions", body(1, false))
	require.Equal(t, http.StatusOK, status, response)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(w.hooked()) == 2 }, 20*time.Second, time.Millisecond)
	assert.NotEqual(t, w.hooked()[0].decode, w.hooked()[1].decode)
	assert.Zero(t, w.busy())
}

// Send bounds each write, so a client that reads nothing occupies the decode engine no longer than that.
func TestAClientThatReadsNothingFreesTheEngines(t *testing.T) {
	limits := config.Timeouts{}
	limits.Write = 100 * time.Millisecond
	w := start(t, enginesim.Config{}, pdflow.WithTimeouts(limits))
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, conn.(*net.TCPConn).SetReadBuffer(4096))
	b := strings.Replace(body(0, true), `"max_tokens":12`, `"max_tokens":20000`, 1)
	_, err = fmt.Fprintf(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\n\r\n%s", len(b), b)
	require.NoError(t, err)
	aborted := func() bool { return w.d[0].Stats().Aborted+w.d[1].Stats().Aborted == 1 }
	require.Eventually(t, aborted, 20*time.Second, 5*time.Millisecond,
		"decode still works for a client that reads nothing")
	require.Eventually(t, func() bool { return len(w.hooked()) == 1 }, 20*time.Second, time.Millisecond)
	assert.Equal(t, pdflow.CodeClientGone, w.hooked()[0].err)
	assert.Zero(t, w.busy())
}

func TestASuccessIsRememberedForTheNextPromptThatBeginsLikeIt(t *testing.T) {
	w := start(t, enginesim.Config{})
	for i := range 8 {
		if i == 4 {
			w.occupy(w.hooked()[0].prefill, 100_000) // so that the other prompt goes to the other engine once
		}
		status, _, response := post(t, w.url+"/v1/completions", body(i/4, false))
		require.Equal(t, http.StatusOK, status, response)
		require.Eventually(t, func() bool { return len(w.hooked()) == i+1 }, 20*time.Second, time.Millisecond)
		if i == 4 {
			w.occupy(w.hooked()[0].prefill, -100_000)
		}
	}
	for i, x := range w.hooked() {
		assert.Equal(t, i < 4, w.hooked()[0].prefill == x.prefill, "request %d went where its prefix is not", i)
	}
}

func TestTheNextPairServesWhatTheFirstCouldNot(t *testing.T) {
	w := start(t, enginesim.Config{})
	first, other := idOf(w.p[0]), idOf(w.p[1])
	w.occupy(other, 100_000)
	require.NoError(t, w.p[0].Close())
	status, _, response := post(t, w.url+"/v1/completions", body(0, false))
	require.Equal(t, http.StatusOK, status, response)
	require.Eventually(t, func() bool { return len(w.hooked()) == 2 }, 20*time.Second, time.Millisecond)
	got := w.hooked()
	assert.Equal(t, []string{first, other}, []string{got[0].prefill, got[1].prefill})
	assert.Equal(t, pdflow.CodePrefillFailed, got[0].err, "post-hooks hear of failures, too")
	assert.Empty(t, got[1].err)
	w.occupy(other, -100_000)
	assert.Zero(t, w.busy())
}

func TestWhatIsRefusedLeavesNoReservation(t *testing.T) {
	w := start(t, enginesim.Config{})
	limit := `{"model":"tiny","prompt":"x","max_tokens":-1}`
	for _, request := range []string{`{"prompt":`, `{"model":"tiny","prompt":7}`, limit} {
		status, _, response := post(t, w.url+"/v1/completions", request)
		assert.Equal(t, http.StatusBadRequest, status, response)
	}
	status, _, _ := post(t, w.url+"/nowhere", body(0, false))
	assert.Equal(t, http.StatusNotFound, status)
	assert.Zero(t, w.busy())
}

func TestWithoutAPairNothingIsServed(t *testing.T) {
	w := start(t, enginesim.Config{})
	for _, p := range w.p {
		w.set.SetHealthy(idOf(p), false)
	}
	status, h, _ := post(t, w.url+"/v1/completions", body(0, false))
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "1", h.Get("Retry-After"))
	require.ErrorIs(t, w.flow.Ready(t.Context()), pdflow.CodeNoEndpoint)
}
