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
	before, want, _ := strings.Cut(string(page), "$ pdctl watch --once\n")
	want, after, _ := strings.Cut(want, "```")
	if os.Getenv("PDKIT_UPDATE") != "" {
		require.NoError(t, os.WriteFile("README.md", []byte(before+"$ pdctl watch --once\n"+out+"```"+after), 0o600))
		want = out
	}
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
		"http://127.0.0.1:1 does not answer: connection refused: name the gateway's admin": "http://127.0.0.1:1",
		"--admin is no URL; write one like":                                                "http://\x7f",
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
		m.Admission = &admissionRow{Queued: 1e18, Refused: map[string]float64{strings.Repeat("queue_", 9): 1e18}}
		m.Totals.Reused = 1e300
		for j := range 4 {
			m.Endpoints = append(m.Endpoints, engineRow{ID: strings.Repeat("engine", 10*j), Role: "prefill",
				Phase: strings.Repeat("gone", 9), Load: 1e9})
			m.Pairs = append(m.Pairs, pairRow{Prefill: strings.Repeat("p", 40*j), Decode: strings.Repeat("ü", 50-9*j),
				Served: 1e18, State: strings.Repeat("bad", 9*j)})
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

// An engine that gets no requests is not called ready, whatever it is itself: neither by the word nor by the colour.
func TestWatchTellsWhichEnginesAreReady(t *testing.T) {
	for want, fields := range map[string]string{
		"\x1b[32mready":      `"healthy":true,"phase":"ready"`,
		"\x1b[33mcooldown":   `"healthy":true,"phase":"ready","state":"cooldown","left":900`,
		"\x1b[31mquarantine": `"healthy":true,"phase":"ready","state":"quarantine"`,
		"\x1b[31mfailing": `"healthy":true,"phase":"ready","state":"cooldown","recent":{"marks":[{"word":"failing"},` +
			`{"word":"slow"}]}`,
		"\x1b[31mcut streams": `"healthy":true,"phase":"ready","recent":{"marks":[{"word":"cut streams"}]}`,
		"\x1b[33mslow":        `"healthy":true,"phase":"ready","recent":{"marks":[{"word":"slow"}]}`,
		"\x1b[31mill":         `"healthy":false,"phase":"ready","lastProbeFault":"status 503"`,
		"\x1b[33mdraining":    `"healthy":true,"phase":"draining"`,
		"\x1b[31mnot ready":   `"healthy":true,"phase":"not_ready"`,
	} {
		url := admin(t, 200, []byte(`{"models":[{"ready":true,"endpoints":[{"id":"engine-0","role":"decode",`+
			fields+`}]}]}`))
		_, out, _ := pdctl(t, "", "watch", "--once", "--color", "always", "--admin", url)
		assert.Contains(t, out, want)
		_, out, _ = pdctl(t, "", "watch", "--once", "--admin", url)
		word := want[len("\x1b[32m"):]
		assert.Contains(t, out, "\n  engine-0  decode  "+word+strings.Repeat(" ", max(5-len(word), 0))+
			"         0      –      –      –\n")
	}
	url := admin(t, 200, []byte(`{"models":[{"ready":true,"endpoints":[{"id":"a","role":"prefill","healthy":true,`+
		`"phase":"ready"},{"id":"b","role":"decode","healthy":true,"phase":"ready","recent":{"marks":[`+
		`{"word":"slow"}]}},`+
		`{"id":"c","role":"decode","healthy":true,"phase":"ready","recent":{"marks":[{"word":"failing"}]}}]}]}`))
	_, out, _ := pdctl(t, "", "watch", "--once", "--admin", url)
	assert.Regexp(t, `(?s)\n  c .*\n  b .*\n  a `, out, "the worst first")
	now := &picture{Models: []modelRow{{Ready: true}, {Reason: "no decode engine is ready"}}}
	v := &view{width: 80}
	assert.True(t, strings.HasPrefix(v.draw(now, nil, nil)[0], "pdkit gateway  not ready  "))
}

// The pairs in trouble are shown, and then the busiest; the order is that of their names.
func TestWatchShowsTheBusiestPairs(t *testing.T) {
	var pairs []pairRow
	require.NoError(t, json.Unmarshal([]byte(`[
		{"prefill":"p2","decode":"d0","served":12345,"failed":0,"reused":0,"handoff":0.043,"transfer":8.24},
		{"prefill":"p1","decode":"d0","served":3,"failed":0,"reused":0},
		{"prefill":"p1","decode":"d1","served":2,"failed":0,"reused":0,"state":"cooldown","left":900},
		{"prefill":"p0","decode":"d0","served":0,"failed":1,"reused":0,"state":"quarantine"}]`), &pairs))
	v := &view{width: 80}
	assert.Equal(t, []string{
		"  busiest pairs  served  failed  handoff  first token  state",
		"  p0 → d0             0       1        –            –  quarantine",
		"  p1 → d1             2       0        –            –  cooldown",
		"  p2 → d0         12.3k       0    43 µs       8.2 ms  –",
	}, v.pairs(pairs, 3))
	assert.Empty(t, v.pairs(pairs, 0))
	pairs[0].Prefill, pairs[0].Decode = "10.128.14.77:8000", "10.128.14.78:8000"
	v.width = 44
	assert.Equal(t, []string{
		"  pair                         served  state",
		"  10.12…7:8000 → 10.12…8:8000   12.3k  –"}, v.pairs(pairs[:1], 1))
}

// Where there is admission, its queue and limits are told, and why it refused requests. No fact is cut that fits on a
// line of its own.
func TestWatchTellsWhatAdmissionDoes(t *testing.T) {
	m := &modelRow{}
	require.NoError(t, json.Unmarshal([]byte(`{"model":"tiny","connector":"nixl","ready":true,"totals":{"reused":48123},
		"admission":{"queued":3,"prefill":{"inFlight":2,"limit":8},"decode":{"inFlight":5,"limit":0},
		"refused":{"queue_full":12,"wait":0,"timeout":1}},"kv":{"taken":7,"bytes":0}}`), m))
	assert.Equal(t, []string{
		"tiny  nixl  ready   in flight 0   served 1.5/s   tokens taken over 48.1k",
		"  queue 3   prefill 2 of 8   decode 5   refused 13 (queue full 12, timeout 1)",
	}, (&view{width: 80}).model(m, "1.5/s", 0)[:2])
	m.Admission.Refused = nil
	assert.Equal(t, []string{
		"tiny  nixl  ready   in flight 0",
		"  served 1.5/s   tokens taken over 48.1k",
		"  queue 3   prefill 2 of 8   decode 5",
		"  refused 0",
	}, (&view{width: 44}).model(m, "1.5/s", 0)[:4])
	m.Totals.Reused = 0
	assert.Equal(t, "7", m.taken(), "by the engines' own counters")
	m.KV = nil
	assert.Equal(t, "–", m.taken(), "nobody counts it")
}

// An attempt in flight shows the parts that have ended, and where the gateway does not follow its legs, its phase.
func TestWatchDrawsAttemptsInFlight(t *testing.T) {
	ms := func(v float64) *float64 { return &v }
	v := &view{width: idSize + wordSize + tookSize + 8 + 10}
	for want, r := range map[string]attempt{
		"..........": {Phase: "pick"},
		".PPPPPPPPP": {Phase: "prefill", PrefillStart: ms(1)},
		".PPPhhhhhh": {Phase: "event", PrefillStart: ms(1), PrefillEnd: ms(4)},
		".PPPhttttt": {Phase: "decode", PrefillStart: ms(1), PrefillEnd: ms(4), DecodeStart: ms(5)},
		".PPPhsssss": {Phase: "stream", PrefillStart: ms(1), PrefillEnd: ms(4), DecodeStart: ms(5)},
		"ssssssssss": {Phase: "stream"},
	} {
		r.Running, r.End = true, 10
		assert.Equal(t, want, v.bar(&r, 10))
	}
}

func TestCountsAreShort(t *testing.T) {
	for n, want := range map[float64]string{0: "0", 9999: "9999", 12345: "12.3k", 99960: "100k", 999499: "999k",
		999501: "1.0M", 99.96e6: "100M", 999.6e6: "1.0G", 123e9: "123G", 1e300: "∞"} {
		assert.Equal(t, want, count(n))
	}
}

func TestTimesHaveThreeDigits(t *testing.T) {
	for ms, want := range map[float64]string{-1: "0 ms", .4: "0 ms", 3: "3 ms", 999.4: "999 ms", 999.6: "1.00 s",
		9994: "9.99 s", 9996: "10.0 s", 99960: "100 s", 1e300: "99999 s"} {
		assert.Equal(t, want, took(ms))
	}
}
