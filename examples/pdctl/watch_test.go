// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
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
	assert.Contains(t, out, "\x1b[34m▆▆▆", "prefill is blue")
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

// No line is longer than a terminal is wide, and no picture higher than it is.
func TestWatchFitsIntoAnyTerminal(t *testing.T) {
	now := &picture{Models: make([]modelRow, 2)}
	for i := range now.Models {
		m := &now.Models[i]
		m.Model, m.Connector = strings.Repeat("model ", 20), strings.Repeat("kind", 20)
		m.Reason = strings.Repeat("no engines ", 20)
		m.Totals.Errors = map[string]float64{strings.Repeat("broken_", 20): 1, "timeout": 1e9}
		for j := range 4 {
			m.Endpoints = append(m.Endpoints, engineRow{ID: strings.Repeat("engine", 10*j), Role: "prefill",
				Phase: strings.Repeat("gone", 9), Load: 1e9})
		}
	}
	for i := range 40 {
		now.Requests = append(now.Requests, attempt{RequestID: strings.Repeat("é", i), Mode: strings.Repeat("m", i),
			Attempt: i % 3, End: float64(i * i * i), Running: i%3 == 0})
	}
	for columns := 1; columns < 130; columns++ {
		for _, height := range []int{0, 1, 2, 9, 24, 60} {
			v := &view{width: columns, height: height, rows: 20, colours: columns%2 == 0}
			lines := v.draw(now, now, errors.New(strings.Repeat("no answer ", 30)))
			if height > 0 {
				assert.LessOrEqual(t, len(lines), height)
			}
			for _, line := range lines {
				assert.LessOrEqual(t, width(colourCodes.ReplaceAllString(line, "")), columns, "%q", line)
			}
		}
	}
}

func TestTimesHaveThreeDigits(t *testing.T) {
	for ms, want := range map[float64]string{-1: "0 ms", .4: "0 ms", 3: "3 ms", 999.4: "999 ms", 999.6: "1.00 s",
		9994: "9.99 s", 9996: "10.0 s", 99960: "100 s", 1e300: "99999 s"} {
		assert.Equal(t, want, took(ms))
	}
}
