// SPDX-License-Identifier: Apache-2.0

package reuse_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/reuse"
)

// hostile is an engine whose /metrics page and token counts are what a test says.
func hostile(t *testing.T, value, count string) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		for _, name := range []string{"prompt_tokens_total",
			`prompt_tokens_by_source_total{source="external_kv_transfer"}`, "nixl_bytes_transferred_sum"} {
			fmt.Fprintf(w, "vllm:%s %s\nvllm:%s %s\n", name, value, name, value)
		}
	})
	mux.HandleFunc("/tokenize", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, `{"count":%s}`, count) })
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

// answering is an engine that is both P and D, and responses that are all the same.
func answering(engine *httptest.Server, response string) reuse.Target {
	return reuse.Target{Prefill: []string{engine.URL}, Decode: []string{engine.URL},
		Client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		Ask: func(context.Context, []byte) (int, string, []byte, error) {
			return http.StatusOK, "disaggregated", []byte(response), nil
		}}
}

// Verify returns, and its ratio is between 0 and 1, whatever numbers engines report: it runs beside live traffic, with
// engines that may be broken.
func TestNumbersThatNoEngineCountsToAreSurvived(t *testing.T) {
	for _, value := range []string{"NaN", "+Inf", "-Inf", "-5", "1e300", "9223372036854775807", "0"} {
		for _, tokens := range []string{"-5", "-9223372036854775808", "0", "9223372036854775807", "7"} {
			engine := hostile(t, value, "1")
			target := answering(engine, `{"choices":[{"text":"a"}],"usage":{"prompt_tokens":`+tokens+`}}`)
			target.Decode = append(target.Decode, engine.URL)
			r := verified(t, target,
				reuse.Options{Probes: 2, SkipText: true, Patience: time.Millisecond})
			assert.GreaterOrEqual(t, r.Ratio(), 0.0, "%s %s", value, tokens)
			assert.LessOrEqual(t, r.Ratio(), 1.0, "%s %s", value, tokens)
			assert.GreaterOrEqual(t, r.Bytes, int64(0), "%s %s", value, tokens)
		}
	}
}

// The same holds for counters that jump from any number to any other.
func TestCountersThatJumpAreSurvived(t *testing.T) {
	values := []string{"NaN", "-1e300", "+Inf", "3", "9e18", "-Inf", "1e18"}
	n := 0
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		fmt.Fprintf(w, "vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"} %s\n"+
			"vllm:prompt_tokens_total %s\n", values[n%len(values)], values[(n*3)%len(values)])
	}))
	defer engine.Close()
	for range values {
		r := verified(t, answering(engine, `{"choices":[],"usage":{"prompt_tokens":9223372036854775807}}`),
			reuse.Options{Probes: 3, SkipText: true, Patience: time.Millisecond})
		assert.GreaterOrEqual(t, r.Ratio(), 0.0)
		assert.LessOrEqual(t, r.Ratio(), 1.0)
	}
}

// An engine that counts a long text as one token gets a prompt of a size that fits what was asked for.
func TestATokenizerThatCountsWronglyMakesNoEndlessPrompt(t *testing.T) {
	engine := hostile(t, "0", "1")
	longest := 0
	target := answering(engine, "")
	target.Ask = func(_ context.Context, body []byte) (int, string, []byte, error) {
		longest = max(longest, len(body))
		return http.StatusOK, "", []byte(`{"choices":[],"usage":{"prompt_tokens":1}}`), nil
	}
	verified(t, target, reuse.Options{Probes: 1, Tokens: 4000, SkipText: true, Patience: time.Millisecond})
	assert.Less(t, longest, 20*4000)
}

// Verify does not follow engines' redirects: an engine must not choose which hosts the gateway asks.
func TestRedirectsOfEnginesAreNotFollowed(t *testing.T) {
	followed := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed = true }))
	defer elsewhere.Close()
	engine := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusFound))
	defer engine.Close()
	target := answering(engine, `{}`)
	target.Client = nil // Verify's own
	_, err := reuse.Verify(t.Context(), target, reuse.Options{Probes: 1, SkipText: true, Patience: time.Millisecond})
	require.Error(t, err)
	assert.False(t, followed)
}
