// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/transport"
)

func TestAKeyFileIsReadAgainWhenItChanges(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	write := func(text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	for _, text := range []string{"", " \n", "secret one", "secret\x00", "schlüssel"} {
		write(text)
		_, err := transport.KeyFile(path)
		require.Error(t, err, "%q", text)
		assert.Contains(t, err.Error(), path)
		assert.NotContains(t, err.Error(), "secret")
	}
	write("  one\n")
	header, err := transport.KeyFile(path)
	require.NoError(t, err)
	assert.Equal(t, http.Header{"Authorization": {"Bearer one"}}, header())
	write("")
	assert.Equal(t, "Bearer one", header().Get("Authorization"), "it is being written")
	write("another\n")
	assert.Equal(t, "Bearer another", header().Get("Authorization"))
	require.NoError(t, os.Remove(path))
	assert.Equal(t, "Bearer another", header().Get("Authorization"))
	_, err = transport.KeyFile(path)
	require.Error(t, err)
}

func TestAHeaderIsAddedToRequestsThatDoNotHaveIt(t *testing.T) {
	t.Parallel()
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, there := r.Header["Authorization"]
		w.Header().Set("Saw", r.Header.Get("Authorization"))
		w.Header().Set("X-Other", r.Header.Get("X-Other"))
		assert.Equal(t, r.URL.Path != "/none", there)
	}))
	t.Cleanup(engine.Close)
	key := http.Header{"Authorization": {"Bearer own"}}
	for _, next := range []http.RoundTripper{transport.New(nil), &http.Transport{}} {
		rt := transport.WithHeader(next, func() http.Header { return key })
		for path, c := range map[string]struct {
			sent http.Header
			want string
		}{
			"/without": {http.Header{"X-Other": {"x"}}, "Bearer own"},
			"/nil":     {nil, "Bearer own"},
			"/with":    {http.Header{"Authorization": {"Bearer client's"}, "X-Other": {"x"}}, "Bearer client's"},
			"/none":    {http.Header{"Authorization": nil, "X-Other": {"x"}}, ""},
		} {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, engine.URL+path, nil)
			require.NoError(t, err)
			r.Header = c.sent.Clone()
			resp, err := rt.RoundTrip(r)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			assert.Equal(t, c.want, resp.Header.Get("Saw"), path)
			assert.Equal(t, c.sent.Get("X-Other"), resp.Header.Get("X-Other"), path)
			assert.Equal(t, c.sent, r.Header, "the request is as it was")
		}
		if own, ok := next.(interface{ CloseIdleConnections() }); ok {
			own.CloseIdleConnections()
		}
	}
	assert.Equal(t, http.Header{"Authorization": {"Bearer own"}}, key)
}
