// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// admin serves a recorded picture (testdata/live.json, which a test of the gateway writes), or another body.
func admin(t *testing.T, status int, body []byte) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "/debug/live/live.json", r.URL.Path)
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}))
	t.Cleanup(func() { s.Close(); http.DefaultClient.CloseIdleConnections() })
	return s.URL
}

// One picture is what the README says.
func TestWatchDrawsAPicture(t *testing.T) {
	recorded, err := os.ReadFile("testdata/live.json")
	require.NoError(t, err)
	code, out, errs := pdctl(t, "", "watch", "--once", "--admin", admin(t, 200, recorded))
	require.Equal(t, exitOK, code, errs)
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, want, _ := strings.Cut(string(page), "$ pdctl watch --once\n")
	want, _, _ = strings.Cut(want, "```")
	assert.Equal(t, want, out)

	_, out, _ = pdctl(t, "", "watch", "--once", "--color", "always", "--admin", admin(t, 200, recorded))
	assert.Contains(t, out, "\x1b[34mPPP", "prefill is blue")
	code, out, _ = pdctl(t, "", "watch", "--once", "--json", "--admin", admin(t, 200, recorded))
	assert.Equal(t, exitOK, code)
	var same bytes.Buffer
	require.NoError(t, json.Compact(&same, recorded))
	assert.Equal(t, same.String()+"\n", out)
}

// What comes from the network cannot command the terminal, and a gateway that is none is an error.
func TestWatchTrustsNobody(t *testing.T) {
	hostile := []byte(`{"models":[{"model":"\u001b[2Jm","endpoints":[{"id":"\u0007\n","role":"decode"}]}],` +
		`"requests":[{"requestId":"\u001b]0;x","end":-1},{"end":1e300,"phase":"none","running":true}]}`)
	code, out, _ := pdctl(t, "", "watch", "--once", "--admin", admin(t, 200, hostile))
	assert.Equal(t, exitOK, code)
	assert.NotContains(t, out, "\x1b")
	assert.NotContains(t, out, "\a")
	for want, url := range map[string]string{
		"status 403":                        admin(t, 403, nil),
		"not that of a gateway's live view": admin(t, 200, []byte("<html>")),
		"does not answer: name it with":     "http://127.0.0.1:1",
		"--admin is no URL; write one like": "http://\x7f",
	} {
		code, out, errs := pdctl(t, "", "watch", "--once", "--admin", url)
		assert.Equal(t, exitUsage, code)
		assert.Empty(t, out)
		assert.Contains(t, errs, want)
	}
	code, _, errs := pdctl(t, "", "watch", "--every", "0s")
	assert.Equal(t, exitUsage, code)
	assert.Contains(t, errs, "--every")
}
