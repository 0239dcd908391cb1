// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

// TestIdleConnectionsClose after KeepAlive, as uvicorn's do.
func TestIdleConnectionsClose(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{KeepAlive: 50 * time.Millisecond})
	require.NoError(t, err)
	defer e.Close()
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.URL(), "http://"))
	require.NoError(t, err)
	defer conn.Close()
	begun := time.Now() // not later: the response may be read long after it was written
	_, err = conn.Write([]byte("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	line, err := r.ReadString('\n')
	require.NoError(t, err)
	assert.Equal(t, "HTTP/1.1 200 OK\r\n", line)
	for err == nil {
		_, err = r.ReadString('\n')
	}
	assert.GreaterOrEqual(t, time.Since(begun), 40*time.Millisecond)
	assert.Less(t, time.Since(begun), 3*time.Second)
}

// TestRequestsAreKeptAsReceived, in order and bounded.
func TestRequestsAreKeptAsReceived(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{KeepRequests: 2})
	require.NoError(t, err)
	defer e.Close()
	c := simtest.NewClient(t)
	for _, p := range []string{"a", "b", "c"} {
		c.Post(t.Context(), e, simtest.Completions, `{ "prompt" : "`+p+`" }`, "X-Request-Id", p)
	}
	c.Get(e, "/health")
	got := e.Requests()
	require.Len(t, got, 2)
	assert.Equal(t, `{ "prompt" : "b" }`, string(got[0].Body))
	assert.Equal(t, simtest.Completions, got[1].Path)
	assert.Equal(t, "c", got[1].Header.Get("X-Request-Id"))
}

// Adapters come and go at run time, and a restart loses those that came.
func TestAdapters(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{Adapters: []string{"first"}})
	require.NoError(t, err)
	defer e.Close()
	c := simtest.NewClient(t)
	ask := func(model string) (status int, text string) {
		r := c.Post(t.Context(), e, simtest.Completions, `{"model":"`+model+`","prompt":"hello","max_tokens":8}`)
		if r.Status != 200 {
			require.Contains(t, r.Body, `"type":"NotFoundError","param":"model","code":404`)
		} else {
			require.Contains(t, r.Body, `"model":"`+model+`"`)
		}
		return r.Status, r.Text()
	}
	_, base := ask("tiny")
	_, first := ask("first")
	assert.NotEqual(t, base, first, "an adapter's text is its own")
	_, again := ask("tiny")
	assert.Equal(t, base, again, "nobody finds the KV of an adapter")
	status, _ := ask("second")
	assert.Equal(t, 404, status)
	loaded := c.Post(t.Context(), e, "/v1/load_lora_adapter", `{"lora_name":"second","lora_path":"/x"}`)
	assert.Equal(t, 200, loaded.Status)
	status, _ = ask("second")
	assert.Equal(t, 200, status)
	list := c.Get(e, "/v1/models").Body
	assert.Regexp(t, `"id":"first".*"parent":"tiny".*"id":"second".*"parent":"tiny"`, list)
	e.UnloadAdapter("first")
	status, _ = ask("first")
	assert.Equal(t, 404, status)
	require.NoError(t, e.Restart())
	status, _ = ask("second")
	assert.Equal(t, 404, status, "lost")
	status, _ = ask("first")
	assert.Equal(t, 200, status, "it is launched with this one")
}

func TestConfigIsChecked(t *testing.T) {
	rows := map[string]enginesim.Config{
		"Connector":     {Connector: "pigeon"},
		"KVRole":        {KVRole: "producer"},
		"LoadFailure":   {LoadFailure: "ignore"},
		"BytesPerToken": {BytesPerToken: 12},
		"MaxModelLen":   {MaxModelLen: 1000, BlockSize: 16, Blocks: 10},
		"positive":      {Blocks: -1},
		"negative":      {ITL: -1},
	}
	for name, cfg := range rows {
		_, err := enginesim.Start(cfg)
		assert.ErrorContains(t, err, name)
	}
}
