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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
