// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"go.uber.org/goleak"

	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var layered = simtest.Of("ascend-layerwise")

// proxy is a proxy's callback server: it gives the callbacks, and answers them with a status.
func proxy(t *testing.T, status int) (url string, callbacks <-chan string, calls *atomic.Int64) {
	t.Helper()
	ch, calls := make(chan string, 8), new(atomic.Int64)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		assert.Equal(t, http.MethodPost, r.Method)
		assert.Equal(t, "/v1/metaserver", r.URL.Path)
		b, _ := io.ReadAll(r.Body)
		w.WriteHeader(status)
		ch <- string(b)
	}))
	t.Cleanup(server.Close)
	return server.URL + "/v1/metaserver", ch, calls
}

// layerDecode is D's leg.
func layerDecode(body simtest.Obj, url string) simtest.Obj {
	return simtest.Leg(body, simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "metaserver": url})
}

func layerPrefill(s *simtest.Scene, body simtest.Obj, params, id string) simtest.Response {
	return s.Ask(s.P, simtest.With(body, simtest.Obj{"max_tokens": 1, "min_tokens": 1, "stream": false,
		"kv_transfer_params": json.RawMessage(params)}), "X-Request-Id", id)
}

func next(t testing.TB, callbacks <-chan string) string {
	t.Helper()
	select {
	case c := <-callbacks:
		return c
	case <-time.After(20 * time.Second):
		t.Fatal("D does not call back")
		return ""
	}
}

// TestLayerwisePush: D calls back with its blocks and its own id less the random end; P's response tells nothing.
func TestLayerwisePush(t *testing.T) {
	for path, id := range map[string]string{simtest.Completions: "cmpl-a-0", simtest.Chat: "chatcmpl-a"} {
		t.Run(path, func(t *testing.T) {
			s := simtest.New(t, layered)
			url, callbacks, _ := proxy(t, 200)
			body := simtest.Request(path, "x", 12)
			got := s.AskLater(s.D, layerDecode(body, url), "X-Request-Id", "a")
			c := next(t, callbacks)
			assert.Equal(t, id, gjson.Get(c, "request_id").String())
			assert.True(t, gjson.Get(c, "do_remote_decode").Bool())
			assert.Len(t, gjson.Parse(c).Map(), 13)
			p := layerPrefill(s, body, c, "a")
			require.Equal(t, 200, p.Status, p.Body)
			assert.Equal(t, gjson.Null, p.Get("kv_transfer_params").Type)
			s.Right(body, <-got)
			assert.Positive(t, s.P.Stats().BytesTransferred, "P is the writer, and counts")
			assert.Zero(t, s.D.Stats().BytesTransferred)
			simtest.WaitFor(t, "P is free", func() bool { return s.P.Stats().PinnedBlocks == 0 })
			s.Clean()
		})
	}
}

// TestLayerwiseDecodeThatNobodyPushesTo waits until its client leaves, and never gets its blocks back. The callback's
// status is not read.
func TestLayerwiseDecodeThatNobodyPushesTo(t *testing.T) {
	for name, act := range map[string]func(s *simtest.Scene, body simtest.Obj, callbacks <-chan string){
		"P is not asked": func(s *simtest.Scene, _ simtest.Obj, callbacks <-chan string) {
			next(s.T, callbacks)
		},
		"P has another id": func(s *simtest.Scene, body simtest.Obj, callbacks <-chan string) {
			require.Equal(s.T, 200, layerPrefill(s, body, next(s.T, callbacks),
				"b").Status)
		},
		"P is not told what for": func(s *simtest.Scene, body simtest.Obj, callbacks <-chan string) {
			c := next(s.T, callbacks)
			var m simtest.Obj
			require.NoError(s.T, json.Unmarshal([]byte(c), &m))
			delete(m, "do_remote_decode")
			raw, _ := json.Marshal(m)
			require.Equal(s.T, 200, layerPrefill(s, body, string(raw), "a").Status)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, layered)
			url, callbacks, calls := proxy(t, http.StatusBadGateway)
			leave := s.Waits(layerDecode(simtest.Completion("x"), url), "X-Request-Id", "a")
			act(s, simtest.Completion("x"), callbacks)
			time.Sleep(50 * time.Millisecond)
			assert.EqualValues(t, 1, calls.Load(), "a status is no reason to try again")
			leave()
			s.Lost()
			simtest.WaitFor(t, "P keeps nothing", func() bool { return s.P.Stats().PinnedBlocks == 0 })
		})
	}
}

// TestLayerwiseCallbackIsTriedThreeTimes where the connection breaks.
func TestLayerwiseCallbackIsTriedThreeTimes(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var calls atomic.Int64
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			calls.Add(1)
			_ = conn.Close()
		}
	}()
	s := simtest.New(t, layered)
	leave := s.Waits(layerDecode(simtest.Completion("x"), "http://"+ln.Addr().String()+"/v1/metaserver"))
	simtest.WaitFor(t, "it gives up", func() bool { return calls.Load() == 3 })
	time.Sleep(50 * time.Millisecond)
	assert.EqualValues(t, 3, calls.Load())
	leave()
	require.NoError(t, ln.Close())
	<-ended
}

// TestLayerwisePrefillDiesOfMissingKeys that it reads without asking.
func TestLayerwisePrefillDiesOfMissingKeys(t *testing.T) {
	good := simtest.Obj{"do_remote_decode": true, "remote_block_ids": [][]int{{1}}, "remote_block_size": []int{32},
		"remote_host": "127.0.0.1", "remote_port": 1, "remote_cached_tokens": 0}
	for name, change := range map[string]func(simtest.Obj){
		"no remote_cached_tokens": simtest.Without("remote_cached_tokens"),
		"no remote_block_ids":     simtest.Without("remote_block_ids"),
		"no remote_block_size":    simtest.Without("remote_block_size"), "no group": simtest.Set("remote_block_ids",
			[]any{}),
	} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, layered, simtest.OwnPorts(t))
			params := simtest.With(good, nil)
			change(params)
			raw, _ := json.Marshal(params)
			s.Kills(s.P, layerPrefill(s, simtest.Completion("x"), string(raw), "a"))
		})
	}
}

func TestLayerwisePlainRequestsAreServedAlone(t *testing.T) {
	s := simtest.New(t, layered, simtest.OwnPorts(t, "kv_port"))
	assert.Equal(t, s.Alone(simtest.Completion("x")), s.Ask(s.D, simtest.Completion("x")).Text())
	require.NoError(t, s.D.Restart(), "on the same ports")
	s.Alive(s.D)
}
