// SPDX-License-Identifier: Apache-2.0

package reuse_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/connector/sglang"
	"github.com/pdkit/pdkit/connector/trtllm"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// Engines other than vLLM have none of its counters.

// SGLang's decode engines wait for each prompt's KV: their responses prove reuse, also without a /metrics page, and
// with it P tells the bytes.
func TestSGLangIsProvenByItsResponses(t *testing.T) {
	for rule, extra := range map[string]map[string]string{"no /metrics page": nil,
		"with --enable-metrics": {"enable_metrics": "1"}} {
		t.Run(rule, func(t *testing.T) {
			p, d, err := enginesim.Pair(enginesim.Config{Connector: "sglang", Extra: extra},
				enginesim.Config{Connector: "sglang", Extra: extra})
			require.NoError(t, err)
			t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
			bootstrap, err := url.Parse(p.Bootstrap())
			require.NoError(t, err)
			pe, err := discovery.New(p.URL(), discovery.RolePrefill)
			require.NoError(t, err)
			pe.Attributes = map[string]string{"bootstrapPort": bootstrap.Port()}
			de, err := discovery.New(d.URL(), discovery.RoleDecode)
			require.NoError(t, err)
			c := conn(sglang.New(nil))
			x := pair{p, d, over(t, c, pe, de)}
			r := verified(t, x.target(c), reuse.Options{Probes: 2})
			require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
			require.Positive(t, r.PromptTokens)
			require.Equal(t, 1.0, r.Ratio(), "what a SyntheticProber's metric shows")
			require.Contains(t, r.String(), "cannot compute a prompt itself")
			if extra == nil {
				require.Zero(t, r.Bytes)
				return
			}
			require.InDelta(t, p.Stats().BytesTransferred, r.Bytes, 4)
		})
	}
}

func recording(n string) enginesim.Config {
	return enginesim.Config{Connector: "trtllm", Extra: map[string]string{"perf_metrics_max_requests": n}}
}

// TensorRT-LLM tells of each request how many bytes of KV came from another server.
func TestTensorRTLLMIsProvenByItsRecords(t *testing.T) {
	c := conn(trtllm.New(nil))
	x := start(t, c, recording("0"), recording("16"))
	r := verified(t, x.target(c), reuse.Options{Probes: 2})
	require.Equal(t, reuse.Reused, r.Verdict, "%s", r)
	require.Equal(t, r.PromptTokens, r.Reused)
	require.Equal(t, x.p.Stats().BytesTransferred, r.Bytes)
	require.False(t, r.Disturbed)
	require.Equal(t, 2, r.Compared)
}

func TestTensorRTLLMThatComputesThePromptItselfIsFoundOut(t *testing.T) {
	c := conn(plainhttp.New(nil))
	x := start(t, c, recording("16"), recording("16"))
	for name, described := range map[string]connector.KVConnector{"connector http relays nothing": c,
		"no KV that came from another server": conn(trtllm.New(nil))} {
		target := x.target(described)
		r := verified(t, target, reuse.Options{Probes: 1})
		require.Equal(t, reuse.NotReused, r.Verdict, "%s", r)
		require.Contains(t, r.String(), name)
	}
}

// Records that are switched off, or that another reader has taken, prove nothing either way.
func TestTensorRTLLMWithoutRecordsCannotBeJudged(t *testing.T) {
	c := conn(trtllm.New(nil))
	x := start(t, c, recording("16"), recording("0"))
	_, err := reuse.Verify(t.Context(), x.target(c), reuse.Options{Probes: 1, Patience: 50 * time.Millisecond})
	require.ErrorContains(t, err, "return_perf_metrics")
}

func TestOtherRecordsAreTold(t *testing.T) {
	c := conn(trtllm.New(nil))
	x := start(t, c, recording("16"), recording("16"))
	target := x.target(c)
	flow, alone := target.Ask, reuse.Gateway(x.d.URL(),
		&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, nil)
	target.Ask = func(ctx context.Context, body []byte) (int, string, []byte, error) {
		_, _, _, err := alone(ctx, []byte(`{"model":"tiny","prompt":"another prompt","max_tokens":1}`))
		require.NoError(t, err)
		return flow(ctx, body)
	}
	r := verified(t, target, reuse.Options{Probes: 1, SkipText: true})
	require.True(t, r.Disturbed)
	require.InDelta(t, r.PromptTokens/2, r.Reused, 1, "whose transfer it was nobody knows")
}

// SGLang's decode engine counts the prompts' tokens, and those that it computed: also behind a connector that does not
// know SGLang.
func TestSGLangsCountersTellWhatDecodeComputed(t *testing.T) {
	for rule, k := range map[string]struct {
		conn             connector.KVConnector
		status, computed int // of a prompt of 600 tokens
		verdict          reuse.Verdict
		says             string
	}{
		"KV arrived":               {conn(sglang.New(nil)), 200, 0, reuse.Reused, "600 of 600 prompt tokens, moved"},
		"decode computed":          {conn(sglang.New(nil)), 200, 600, reuse.NotReused, "without --disaggregation-mode"},
		"decode computed the rest": {conn(sglang.New(nil)), 200, 400, reuse.Partly, "200 of 600"},
		"connector http, refused":  {conn(plainhttp.New(nil)), 400, 0, reuse.Failed, "relays nothing, and SGLang"},
		"connector http, computed": {conn(plainhttp.New(nil)), 200, 600, reuse.NotReused, "relays nothing"},
	} {
		t.Run(rule, func(t *testing.T) {
			var served atomic.Int64
			engine := func(page func(n int64) string) string {
				s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path != "/metrics" {
						http.NotFound(w, r)
						return
					}
					_, _ = w.Write([]byte(page(served.Load())))
				}))
				t.Cleanup(s.Close)
				return s.URL
			}
			p := engine(func(n int64) string { return fmt.Sprintf("sglang:kv_transfer_total_mb_sum %d\n", n) })
			d := engine(func(n int64) string {
				return fmt.Sprintf("sglang:prompt_tokens_total{is_streaming=\"false\"} %d\n"+
					"sglang:realtime_tokens_total{mode=\"prefill_compute\"} %d\n"+
					"sglang:realtime_tokens_total{mode=\"decode\"} %d\n", 600*n, int64(k.computed)*n, 16*n)
			})
			asks := func(context.Context, []byte) (int, string, []byte, error) {
				if k.status == http.StatusOK {
					served.Add(1)
				}
				return k.status, "disaggregated",
					[]byte(`{"choices":[{"text":"a"}],"usage":{"prompt_tokens":600}}`), nil
			}
			r, err := reuse.Verify(t.Context(),
				reuse.Target{Connector: k.conn, Prefill: []string{p}, Decode: []string{d}, Ask: asks},
				reuse.Options{Probes: 1, SkipText: true})
			require.NoError(t, err)
			require.Equal(t, k.verdict, r.Verdict, "%s", r)
			require.Contains(t, r.String(), k.says)
			require.NotContains(t, r.String(), "cannot compute a prompt itself")
		})
	}
}

// An SGLang engine that runs without --disaggregation-mode decode gives the right text, too, so its response proves
// nothing. Only the mode that it reports tells the difference.
func TestADecodeEngineOfSGLangThatServesAloneIsFoundOut(t *testing.T) {
	c := conn(sglang.New(nil))
	for rule, k := range map[string]struct {
		pages   map[string]string
		verdict reuse.Verdict
	}{
		"decode":  {map[string]string{"/server_info": `{"disaggregation_mode":"decode"}`}, reuse.Reused},
		"without": {map[string]string{"/server_info": `{"disaggregation_mode":"null"}`}, reuse.NotReused},
		"without, by an old": {map[string]string{"/get_server_info": `{"disaggregation_mode":"null"}`},
			reuse.NotReused},
		"nothing said": {map[string]string{"/server_info": `[]`}, reuse.Reused},
	} {
		t.Run(rule, func(t *testing.T) {
			engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if k.pages[r.URL.Path] == "" {
					http.NotFound(w, r)
					return
				}
				_, _ = w.Write([]byte(k.pages[r.URL.Path]))
			}))
			defer engine.Close()
			target := answering(engine, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens":600}}`)
			target.Connector = c
			r := verified(t, target, reuse.Options{Probes: 1})
			require.Equal(t, k.verdict, r.Verdict, "%s", r)
		})
	}
}
