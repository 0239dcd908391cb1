// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
)

// begin sends a streamed request and returns when its response has begun.
func begin(t *testing.T, addr string, headers ...string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/v1/completions",
		strings.NewReader(completion(0, true)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, resp.StatusCode)
	return resp
}

// The sidecar, as a process of its own, goes on after SIGHUP, which ended it before, and ends with 0 after SIGTERM.
func TestSIGHUPEndsNothing(t *testing.T) {
	t.Parallel()
	cmd := command(t.Context(), t, "--port=0", "--secure-proxy=false", "--prefillers=127.0.0.1:1")
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(stderr)
	for lines.Scan() && !strings.Contains(lines.Text(), "msg=serving") {
	}
	for range 3 {
		require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
		time.Sleep(20 * time.Millisecond)
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	for lines.Scan() {
	}
	assert.NoError(t, cmd.Wait())
}

// After SIGTERM, requests that run continue to their end. A new request gets a response that sends it elsewhere. No
// request is cut and none begins.
func TestADrainLetsStreamsEndAndTakesNothingNew(t *testing.T) {
	t.Parallel()
	p, d, x := pair(t, enginesim.Config{}, enginesim.Config{ITL: 400 * time.Millisecond}, nil) // a stream of 4.4 s
	at := hostPort(t, p.URL())
	resp := begin(t, x.addr, header, at)
	defer resp.Body.Close()
	code := make(chan int, 1)
	go func() { code <- x.stop() }()
	health := func() int {
		return statusOf(fetch(t, x.addr+"/health"))
	}
	require.Eventually(t, func() bool { return health() == http.StatusServiceUnavailable }, 20*time.Second,
		time.Millisecond, "readiness is still told")
	for _, headers := range [][]string{{header, at}, nil} {
		status, h, response := complete(t, x.addr, 1, false, headers...)
		assert.Equal(t, http.StatusServiceUnavailable, status)
		assert.NotEmpty(t, h.Get("Retry-After"))
		assert.Equal(t, "draining", gjson.Get(response, "error.code").String())
	}
	status, _, response := fetch(t, x.addr+"/v1/models")
	assert.Equal(t, http.StatusServiceUnavailable, status)
	assert.Equal(t, "draining", gjson.Get(response, "error.code").String())
	require.Empty(t, code, "it ended while a stream ran")
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Contains(t, string(body), "[DONE]")
	assert.Equal(t, exitOK, <-code)
	assert.Len(t, p.Requests(), 1)
	assert.Len(t, d.Requests(), 1)
	assert.NotContains(t, x.log.String(), "were cut")
}

// Requests that only pass through, such as /v1/embeddings, are not cut either.
func TestADrainWaitsForWhatPassesToTheEngine(t *testing.T) {
	begun, finish := make(chan struct{}), make(chan struct{})
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-finish
		_, _ = io.WriteString(w, "whole")
	}))
	defer engine.Close()
	x := before(t, engine.URL, nil, "--prefillers=p:1")
	got := make(chan string, 1)
	go func() {
		resp, err := http.Post("http://"+x.addr+"/v1/embeddings", "application/json", strings.NewReader("{}"))
		if err != nil {
			got <- err.Error()
			return
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		got <- string(b)
	}()
	<-begun
	code := make(chan int, 1)
	go func() { code <- x.stop() }()
	require.Eventually(t, func() bool { return strings.Contains(x.log.String(), "draining") }, 20*time.Second,
		time.Millisecond)
	select {
	case <-code:
		t.Error("it ended while the engine answered")
	case <-time.After(100 * time.Millisecond): // a drain that does not wait would end at once
	}
	close(finish)
	assert.Equal(t, "whole", <-got)
	assert.Equal(t, exitOK, <-code)
}
