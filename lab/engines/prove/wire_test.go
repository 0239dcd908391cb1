// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// recorded reads one of the project's recordings.
func recorded(t *testing.T, name string) *recording {
	t.Helper()
	connector, _, _ := strings.Cut(name, "/")
	list, err := readRecordings("../../../"+recordings, connector)
	require.NoError(t, err)
	for _, r := range list {
		if strings.HasPrefix(r.name, name) {
			return r
		}
	}
	require.Fail(t, "no recording "+name)
	return nil
}

// engines plays back what P and D said in the recording, after edit, and keeps what they were sent.
func engines(t *testing.T, r *recording, edit func(i int, body string) string) (*wirePair, *[]map[string]any) {
	t.Helper()
	var mu sync.Mutex
	sent := make([]map[string]any, 0, len(r.Exchanges))
	engine := func(name string) string {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
			var body map[string]any
			assert.NoError(t, json.NewDecoder(request.Body).Decode(&body))
			mu.Lock()
			i := len(sent)
			sent = append(sent, body)
			mu.Unlock()
			assert.Equal(t, name, r.Exchanges[i].Engine)
			for header, value := range r.Exchanges[i].Response.Headers {
				if header != "content-length" {
					w.Header().Set(header, value)
				}
			}
			w.WriteHeader(r.Exchanges[i].Response.Status)
			_, _ = io.WriteString(w, edit(i, string(r.Exchanges[i].Response.Body)))
		}))
		t.Cleanup(server.Close)
		return server.URL
	}
	return &wirePair{p: engine("P"), d: engine("D")}, &sent
}

func TestReplay(t *testing.T) {
	for name, test := range map[string]struct {
		edit func(i int, body string) string
		want string
	}{
		"values differ": {func(_ int, body string) string { return body }, "nixl/01-completions: same\n"},
		"a member is gone from P's handoff": {func(i int, body string) string {
			if i == 0 {
				return strings.Replace(body, `"tp_size": 1,`, "", 1)
			}
			return body
		}, "  1. P POST /v1/completions\n     gone   body.kv_transfer_params.tp_size: number\n"},
		"D tells a number as a string": {func(i int, body string) string {
			if i == 1 {
				return strings.Replace(body, `"total_tokens": 264`, `"total_tokens": "264"`, 1)
			}
			return body
		}, "  2. D POST /v1/completions\n     type   body.usage.total_tokens: string, was number\n"},
	} {
		t.Run(name, func(t *testing.T) {
			r := recorded(t, "nixl/01-")
			pair, sent := engines(t, r, func(i int, body string) string {
				body = strings.ReplaceAll(body, "5600", "41234")
				return test.edit(i, strings.ReplaceAll(body, "e3e63b5c", "aaaaaaaa"))
			})
			var out strings.Builder
			w := wire{out: &out}
			w.report(r, pair.replay(t.Context(), r))
			assert.Contains(t, out.String(), test.want)
			assert.Equal(t, strings.HasSuffix(test.want, "same\n"), w.different == 0)

			decode, ok := (*sent)[1][kvParams].(map[string]any)
			require.True(t, ok)
			assert.InDelta(t, 41234, decode["remote_port"], 0, "D must get P's handoff of now")
			assert.Equal(t, "aaaaaaaa-0c22-4617-8345-a0ce1bca7526", decode["remote_engine_id"])
			_, found := decode["tp_size"]
			assert.Equal(t, !strings.Contains(test.want, "tp_size"), found)
		})
	}
}

func TestSplice(t *testing.T) {
	told := map[string]any{"remote_engine_id": "e1", "remote_port": 5600.0, "remote_block_ids": []any{1.0}}
	now := map[string]any{"remote_engine_id": "e2", "remote_port": 41.0, "remote_block_ids": []any{7.0}, "new": true}
	other := handoff{maps.Clone(told), told}
	other.recorded["remote_block_ids"] = []any{3.0}
	handoffs := []handoff{other, {told, now}, other}
	assert.Equal(t, now, splice(told, handoffs, where{}), "with what this version adds")

	planted := maps.Clone(told)
	planted["remote_engine_id"] = "nobody"
	assert.Equal(t, map[string]any{"remote_engine_id": "nobody", "remote_port": 41.0, "remote_block_ids": []any{7.0}},
		splice(planted, handoffs, where{}))
	assert.Equal(t, map[string]any{"remote_port": 41.0},
		splice(map[string]any{"remote_port": 5600.0}, handoffs[1:2], where{}), "what the client left out stays out")
	assert.Equal(t, "e1", told["remote_engine_id"], "the recording is not changed")
}

func TestSpliceWithoutHandoff(t *testing.T) {
	const id = "6fe655f2-dd0f-46d2-97d3-5918e4d0bc27"
	here := where{side: "41", engineID: "made-now"}
	assert.Equal(t, map[string]any{"remote_bootstrap_addr": "http://127.0.0.1:41", "remote_engine_id": "made-now"},
		splice(map[string]any{"remote_bootstrap_addr": "http://127.0.0.1:38699", "remote_engine_id": id}, nil, here))
	planted := map[string]any{"remote_bootstrap_addr": "http://127.0.0.1:1", "remote_engine_id": "nobody"}
	assert.Equal(t, planted, splice(planted, nil, here))
	assert.Equal(t, map[string]any{"remote_port": json.Number("41"), "remote_engine_id": "pdkit-prefill"},
		splice(map[string]any{"remote_port": 49871.0, "remote_engine_id": "pdkit-prefill"}, nil, here))
	asked := map[string]any{"do_remote_decode": true, "remote_port": nil, "remote_engine_id": nil}
	assert.Equal(t, asked, splice(asked, nil, here), "what P is asked")
}

func TestStartOfExchanges(t *testing.T) {
	for name, want := range map[string][]struct {
		after []int
		pause time.Duration
	}{
		"nixl/01-":     {{}, {after: []int{0}, pause: 2 * time.Millisecond}, {after: []int{0, 1}}},
		"mooncake/03-": {{pause: 1500 * time.Millisecond}, {}, {after: []int{0, 1}, pause: 5 * time.Millisecond}},
		"nixl/46-":     {{}, {after: []int{0}, pause: 36095 * time.Millisecond}, {after: []int{0, 1}}},
	} {
		r := recorded(t, name)
		for i := range r.Exchanges {
			after, pause := r.start(i)
			assert.Equal(t, want[i].after, append([]int(nil), after...), "%s %d", name, i)
			assert.InDelta(t, want[i].pause, pause, float64(10*time.Millisecond), "%s %d", name, i)
		}
	}
}

// Each recording must be readable, and each obstacle must name one.
func TestEveryRecordingIsKnown(t *testing.T) {
	obstacles := maps.Clone(cannotReplay)
	for _, engines := range recordedEngines {
		list, err := readRecordings("../../../"+recordings, engines.connector)
		require.NoError(t, err)
		assert.Equal(t, []string{"0.32.0"}, recordedVersions(list))
		for _, r := range list {
			require.NotEmpty(t, r.Exchanges, r.name)
			for _, e := range r.Exchanges {
				assert.NotEmpty(t, e.Request.Path, r.name)
				assert.True(t, e.Response != nil && e.Response.Status > 0 || e.ClientError != "", r.name)
			}
			for prefix := range obstacles {
				if strings.HasPrefix(r.name, prefix) {
					delete(obstacles, prefix)
				}
			}
		}
	}
	assert.Empty(t, obstacles)
}

func TestWhichRecordingsAreReplayed(t *testing.T) {
	for name, alone := range map[string]bool{"nixl/01-": false, "nixl/30-": false, "mooncake/00-": false,
		"nixl/51e-": true /* D must not have met P */, "nixl/35-": true, /* D ends */
		"nixl/51-": true /* D is unhealthy */, "mooncake/08-": true /* D waits */} {
		assert.Equal(t, alone, recorded(t, name).alone(), name)
	}
	r := recorded(t, "nixl/51-")
	for name, want := range map[string]bool{"nixl": true, "nixl/51": true, "nixl/51b": false, "nixl-push": false} {
		assert.Equal(t, want, (&wire{names: []string{"mooncake", name}}).wants(r), name)
	}
	assert.Equal(t, "P is killed", recorded(t, "nixl/52-").obstacle())
	assert.Empty(t, r.obstacle())
}
