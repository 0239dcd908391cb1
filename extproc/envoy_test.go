// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/enginesim"
)

func nixlWorld(t *testing.T, p, d enginesim.Config, opts ...pdflow.Option) *world {
	t.Helper()
	c, err := nixl.New(nil)
	require.NoError(t, err)
	return newWorld(t, c, p, d, opts...)
}

const prompt = "Two engines, one response: the first reads the prompt, the second writes what follows."

func completion(stream bool) string {
	body, _ := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": 8, "stream": stream})
	return string(body)
}

func post(t *testing.T, ctx context.Context, url, body string, header ...string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return http.DefaultClient.Do(r)
}

// ask returns status, header and body.
func ask(t *testing.T, url, body string, header ...string) (int, http.Header, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	resp, err := post(t, ctx, url, body, header...)
	require.NoError(t, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(got)
}

func TestEnvoySendsDecode(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	url := w.envoy()
	status, header, body := ask(t, url+"/v1/completions", completion(false), "X-Request-Id", "mine")
	assert.Equal(t, 200, status)
	t.Log(header, body)
	assert.Equal(t, []pdflow.Code{""}, w.wait(1))
	status, header, body = ask(t, url+"/v1/completions", completion(true))
	assert.Equal(t, 200, status)
	t.Log(header, body)
	assert.Equal(t, []pdflow.Code{"", ""}, w.wait(2))
	for _, r := range w.d.Requests() {
		t.Log(r.Method, r.Path, r.Header, string(r.Body))
	}
	assert.NoError(t, w.p.CheckKV())
	assert.NoError(t, w.d.CheckKV())
}
