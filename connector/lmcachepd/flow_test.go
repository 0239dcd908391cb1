// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/lmcachepd"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// pair is a gateway in front of a sender and a receiver, and of one more engine that serves alone.
type pair struct {
	t       *testing.T
	c       *lmcachepd.Connector
	p, d, o *enginesim.Engine
	url     string
}

// pairOf starts a pair. extra are further settings of both engines.
func pairOf(t *testing.T, o lmcachepd.Options, extra map[string]string, change ...func(p, d *enginesim.Config)) *pair {
	t.Helper()
	c := start(t, o)
	host, port, err := net.SplitHostPort(c.Addr())
	require.NoError(t, err)
	settings := map[string]string{"pd_proxy_host": host, "pd_proxy_port": port, "hash_seed": "0", "chunk_size": "64"}
	if o.RetFirstToken {
		settings["skip_last_n_tokens"] = "1"
	}
	maps.Copy(settings, extra)
	p := enginesim.Config{Connector: lmcachepd.Name, KVRole: enginesim.RoleProducer, Extra: settings}
	d := enginesim.Config{Connector: lmcachepd.Name, KVRole: enginesim.RoleConsumer, Extra: settings}
	for _, f := range change {
		f(&p, &d)
	}
	x := &pair{t: t, c: c}
	for _, k := range []struct {
		e   **enginesim.Engine
		cfg enginesim.Config
	}{{&x.p, p}, {&x.d, d}, {&x.o, enginesim.Config{}}} {
		*k.e, err = enginesim.Start(k.cfg)
		require.NoError(t, err)
		t.Cleanup(func() { _ = (*k.e).Close() })
	}
	x.serve()
	return x
}

// serve puts a flow in front of the engines.
func (x *pair) serve() {
	t := x.t
	host, init, alloc := x.d.Receiver()
	prefill := play.Engine(t, x.p.URL(), discovery.RolePrefill, nil)
	decode := play.Engine(t, x.d.URL(), discovery.RoleDecode, map[string]string{"receiverHost": host,
		"receiverInitPorts": strconv.Itoa(init), "receiverAllocPorts": strconv.Itoa(alloc)})
	set, err := static.NewSet(prefill, decode)
	require.NoError(t, err)
	tr := transport.New(nil)
	flow, err := pdflow.New(keepOpen{x.c}, pick.New(set, pick.RoundRobin()), pdflow.WithTransport(tr),
		pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}))
	require.NoError(t, err)
	s := httptest.NewServer(flow)
	x.url = s.URL
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		assert.NoError(t, flow.Shutdown(ctx), "a request was left in flight")
		_ = tr.Close()
	})
}

// keepOpen does not close the connector: the test closes it, which started it to know its address.
type keepOpen struct{ *lmcachepd.Connector }

func (keepOpen) Close() error { return nil }

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

type reply struct {
	status int
	body   string
}

func post(t testing.TB, url, path string, body map[string]any) reply {
	t.Helper()
	raw, err := json.Marshal(body)
	require.NoError(t, err)
	resp, err := client.Post(url+path, "application/json", bytes.NewReader(raw))
	require.NoError(t, err)
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return reply{resp.StatusCode, string(out)}
}

// text is the text of a response, streamed or not.
func (r reply) text() string {
	var b strings.Builder
	add := func(s string) {
		for _, path := range []string{"text", "message.content", "delta.content"} {
			b.WriteString(gjson.Get(s, "choices.0."+path).String())
		}
	}
	if strings.HasPrefix(r.body, "{") {
		add(r.body)
	}
	for line := range strings.Lines(r.body) {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			add(data)
		}
	}
	return b.String()
}

// usage is the last usage in a response.
func (r reply) usage() string {
	u := gjson.Get(r.body, "usage")
	for line := range strings.Lines(r.body) {
		if data, ok := strings.CutPrefix(line, "data: "); ok && gjson.Get(data, "usage").IsObject() {
			u = gjson.Get(data, "usage")
		}
	}
	return u.Get("prompt_tokens").Raw + "+" + u.Get("completion_tokens").Raw + "=" + u.Get("total_tokens").Raw
}

// request makes a request with the same prompt for each API, streamed or not. n makes the prompts different, so that no
// cache helps.
func request(path string, n int, stream bool) map[string]any {
	prompt := strings.Repeat("prompt "+strconv.Itoa(n)+" ", 21)[:150]
	body := map[string]any{"max_tokens": 12, "temperature": 0}
	switch path {
	case "/v1/completions":
		body["prompt"] = prompt
	case "/v1/responses":
		body["input"] = prompt
		delete(body, "max_tokens")
		body["max_output_tokens"] = 12
	default:
		body["messages"] = []any{map[string]any{"role": "user", "content": prompt}}
	}
	if stream {
		body["stream"] = true
		body["stream_options"] = map[string]any{"include_usage": true}
	}
	return body
}

// The KV moves: the text is that of one engine alone, D computed only the last token, and the usage is the engine's.
func TestThroughTheFlow(t *testing.T) {
	for _, first := range []bool{false, true} {
		t.Run("retFirstTok="+strconv.FormatBool(first), func(t *testing.T) {
			x := pairOf(t, lmcachepd.Options{RetFirstToken: first}, nil)
			n := 0
			for _, path := range []string{"/v1/completions", "/v1/chat/completions"} {
				for _, stream := range []bool{false, true} {
					n++
					before := x.d.Stats()
					got, alone := post(t, x.url, path, request(path, n, stream)),
						post(t, x.o.URL(), path, request(path, n, stream))
					require.Equal(t, 200, got.status, got.body)
					assert.Equal(t, alone.text(), got.text(), "%s, stream %v", path, stream)
					assert.Equal(t, alone.usage(), got.usage(), "%s, stream %v", path, stream)
					after := x.d.Stats()
					assert.EqualValues(t, 1, after.LocalCompute-before.LocalCompute, "%s, stream %v", path, stream)
					assert.GreaterOrEqual(t, after.ExternalKVTransfer-before.ExternalKVTransfer, int64(149))
				}
			}
			assert.NoError(t, x.p.CheckKV())
			assert.NoError(t, x.d.CheckKV())
			assert.EqualValues(t, n, x.p.Stats().Transfers)
			assert.EqualValues(t, n, x.c.Notices().Matched)
		})
	}
}

// Prompts shorter than a chunk are pushed, too, since LMCache's PD mode sets save_unfull_chunk.
func TestShortPrompts(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{}, nil)
	body := map[string]any{"prompt": "Hello", "max_tokens": 4}
	got := post(t, x.url, "/v1/completions", body)
	require.Equal(t, 200, got.status, got.body)
	assert.Equal(t, post(t, x.o.URL(), "/v1/completions", body).text(), got.text())
	assert.EqualValues(t, 4, x.d.Stats().ExternalKVTransfer)
}

// A lookup that leaves out the last token finds the last chunk only if that token is P's own, so the setting belongs to
// retFirstTok.
func TestSkippingTheLastTokenWithoutPsTokenCostsTheLastChunk(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{}, map[string]string{"skip_last_n_tokens": "1"})
	require.Equal(t, 200, post(t, x.url, "/v1/completions", request("/v1/completions", 1, false)).status)
	assert.EqualValues(t, 128, x.d.Stats().ExternalKVTransfer, "two chunks of 64, not the third")
}

func TestWhereNothingIsLeftPsAnswerIsTheClients(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{RetFirstToken: true}, nil)
	for _, stream := range []bool{false, true} {
		body := request("/v1/chat/completions", 1, stream)
		body["max_tokens"] = 1
		got, alone := post(t, x.url, "/v1/chat/completions", body), post(t, x.o.URL(), "/v1/chat/completions", body)
		require.Equal(t, 200, got.status, got.body)
		assert.Equal(t, alone.text(), got.text())
		assert.Equal(t, alone.usage(), got.usage())
		assert.NotContains(t, got.body, `"token_ids":[`)
		assert.NotContains(t, got.body, "first_tok")
		assert.Equal(t, stream, strings.HasSuffix(got.body, "data: [DONE]\n\n"))
	}
	assert.Zero(t, x.d.Stats().Requests)
}

// If D is asked before its KV is there, it answers 200 with what its memory held before. So decode waits for the push.
func TestDecodeIsNotAskedBeforeTheNotice(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{}, map[string]string{"push_delay": "150ms"})
	body := request("/v1/completions", 1, false)
	begun := time.Now()
	got := post(t, x.url, "/v1/completions", body)
	require.Equal(t, 200, got.status)
	assert.GreaterOrEqual(t, time.Since(begun), 150*time.Millisecond)
	alone := post(t, x.o.URL(), "/v1/completions", body).text()
	assert.Equal(t, alone, got.text())

	// Without the wait the simulated engine answers wrongly, as the real one does.
	x = pairOf(t, lmcachepd.Options{}, map[string]string{"push_delay": "1h"})
	host, init, alloc := x.d.Receiver()
	for n := range 20 {
		body = request("/v1/completions", 2+n, false)
		body["max_tokens"] = 1
		body["kv_transfer_params"] = map[string]any{
			"disagg_spec": map[string]any{"req_id": "x", "receiver_host": host, "receiver_init_port": []int{init},
				"receiver_alloc_port": []int{alloc}},
		}
		require.Equal(t, 200, post(t, x.p.URL(), "/v1/completions", body).status)
		time.Sleep(time.Duration(n+1) * 50 * time.Millisecond) // until P has asked for room; else D computes the prompt
		delete(body, "kv_transfer_params")
		body["max_tokens"] = 12
		early := post(t, x.d.URL(), "/v1/completions", body)
		require.Equal(t, 200, early.status)
		if post(t, x.o.URL(), "/v1/completions", body).text() != early.text() {
			return
		}
	}
	t.Fatal("D's answers were all right")
}

func TestWithoutNotices504(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"pd_skip_proxy_notification":          {"pd_skip_proxy_notification": "true"},
		"a short prompt that is discarded":    {"discard_partial_chunks": "true", "chunk_size": "256"},
		"a push that failed for lack of room": {"pd_buffer_size": "16"},
	} {
		t.Run(rule, func(t *testing.T) {
			x := pairOf(t, lmcachepd.Options{NotifyTimeout: limit(100 * time.Millisecond)}, extra)
			got := post(t, x.url, "/v1/completions", request("/v1/completions", 1, false))
			assert.Equal(t, 504, got.status, got.body)
			assert.Equal(t, "timeout", gjson.Get(got.body, "error.code").String())
			assert.Zero(t, x.d.Stats().Requests, "D is not asked")
		})
	}
	t.Run("a receiver that is not there", func(t *testing.T) {
		x := pairOf(t, lmcachepd.Options{NotifyTimeout: limit(100 * time.Millisecond)}, receiverPorts(t))
		x.d.Kill()
		got := post(t, x.url, "/v1/completions", request("/v1/completions", 1, false))
		assert.Equal(t, 504, got.status, got.body)
	})
}

// receiverPorts are settings for ports of D that nobody else gets while D is down.
func receiverPorts(t *testing.T) map[string]string {
	t.Helper()
	extra := map[string]string{}
	for _, name := range []string{"pd_peer_init_port", "pd_peer_alloc_port"} {
		_, port, err := net.SplitHostPort(freePort(t))
		require.NoError(t, err)
		extra[name] = port
	}
	return extra
}

// After a restart D has the same ports, and P finds the new D there.
func TestReceiverRestarts(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{}, receiverPorts(t), func(_, d *enginesim.Config) { d.Listen = freePort(t) })
	for n := range 2 {
		body := request("/v1/completions", n, false)
		got := post(t, x.url, "/v1/completions", body)
		require.Equal(t, 200, got.status, got.body)
		assert.Equal(t, post(t, x.o.URL(), "/v1/completions", body).text(), got.text())
		assert.EqualValues(t, 149, x.d.Stats().ExternalKVTransfer)
		require.NoError(t, x.d.Restart())
	}
}

// Two gateways have different engines and different addresses. Notices for the other gateway's sessions are counted as
// unknown and do no harm.
func TestSeveralGatewaysSideBySide(t *testing.T) {
	a, b := pairOf(t, lmcachepd.Options{}, nil), pairOf(t, lmcachepd.Options{}, nil)
	stray := pusher(t, a.c.Addr())
	var wg sync.WaitGroup
	for n := range 8 {
		for _, x := range []*pair{a, b} {
			wg.Go(func() {
				body := request("/v1/completions", 100+n, n%2 == 0)
				got := post(t, x.url, "/v1/completions", body)
				assert.Equal(t, 200, got.status, got.body)
				assert.Equal(t, post(t, x.o.URL(), "/v1/completions", body).text(), got.text())
			})
		}
		stray(notice(t, strconv.Itoa(n)))
	}
	wg.Wait()
	assert.NoError(t, a.d.CheckKV())
	assert.NoError(t, b.d.CheckKV())
	eventually(t, a.c, lmcachepd.Notices{Matched: 8, Unknown: 8})
	assert.Equal(t, lmcachepd.Notices{Matched: 8}, b.c.Notices())
}

// Requests that need D to make the first token go to one engine. If no engine may serve alone, the flow's policy
// refuses them.
func TestWhatTheFirstTokenCannotCarryIsNotCarried(t *testing.T) {
	x := pairOf(t, lmcachepd.Options{RetFirstToken: true}, nil)
	body := request("/v1/chat/completions", 1, false)
	body["logprobs"] = true
	got := post(t, x.url, "/v1/chat/completions", body)
	require.Equal(t, 200, got.status, got.body)
	assert.Zero(t, x.p.Stats().Requests, "D serves it alone")
}

var _ connector.Expecter = keepOpen{}
