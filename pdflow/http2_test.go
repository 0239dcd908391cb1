// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// overHTTP2 serves h over HTTP/2, and returns a client and how many connections it has made.
func overHTTP2(t *testing.T, h http.Handler) (url string, c *http.Client, connections *atomic.Int64) {
	t.Helper()
	connections = new(atomic.Int64)
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			connections.Add(1)
		}
	}
	s.StartTLS()
	t.Cleanup(s.Close)
	return s.URL, s.Client(), connections
}

// A proxy sends the requests of many clients over one connection. A client whose request is refused must end its own
// stream: the connection's end (GOAWAY) drops requests of others that are on their way.
func TestARefusedRequestEndsNothingButItsStream(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(fromD), pdflow.WithMaxBody(1<<10))
	url, c, connections := overHTTP2(t, x.flow)
	for _, r := range []struct {
		path, kind, body string
		status           int
	}{
		{"/v1/completions", "application/json", `{"prompt":"hi"}`, http.StatusOK},
		{"/v1/completions", "application/json", `{"prompt":"` + strings.Repeat("a", 2<<10) + `"}`, 413},
		{"/v1/completions", "text/plain", `{"prompt":"hi"}`, http.StatusUnsupportedMediaType},
		{"/v1/completions", "application/json", `{"prompt":`, http.StatusBadRequest},
		{"/elsewhere", "application/json", `{}`, http.StatusNotFound},
		{"/v1/completions", "application/json", `{"prompt":"hi"}`, http.StatusOK},
	} {
		resp, err := c.Post(url+r.path, r.kind, strings.NewReader(r.body))
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		_ = resp.Body.Close()
		assert.Equal(t, 2, resp.ProtoMajor)
		assert.Equal(t, r.status, resp.StatusCode, r.path)
	}
	assert.EqualValues(t, 1, connections.Load())
}

// A client that reads nothing of its stream holds an engine no longer than Timeouts.Write, and the other streams of its
// connection go on.
func TestAStreamThatNobodyReadsEndsAlone(t *testing.T) {
	ended := make(chan struct{})
	endless := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		if strings.Contains(body, "short") {
			_, _ = io.WriteString(w, fromD)
			return
		}
		defer close(ended)
		w.Header().Set("Content-Type", "text/event-stream")
		event := "data: {\"choices\":[{\"text\":\"" + strings.Repeat("a", 32<<10) + "\"}]}\n\n"
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, event); err != nil {
				return
			}
		}
	}
	x := script(t, &fake{}, answer(ok), endless, pdflow.WithTimeouts(config.Timeouts{Write: 200 * time.Millisecond}))
	url, c, connections := overHTTP2(t, x.flow)
	resp, err := c.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"hi","stream":true}`))
	require.NoError(t, err)
	defer resp.Body.Close()
	for range 20 {
		other, err := c.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"short"}`))
		require.NoError(t, err)
		_ = other.Body.Close()
		assert.Equal(t, http.StatusOK, other.StatusCode)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the engine is held by a client that does not read")
	}
	assert.EqualValues(t, 1, connections.Load())
}
