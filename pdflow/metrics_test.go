// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/lmcache"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/pdflow"
)

// stream is a decode engine whose events come one by one, each after a pause.
func stream(pause time.Duration, events ...string) handler {
	return func(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i, e := range append(events, "[DONE]") {
			if i > 0 {
				select {
				case <-time.After(pause):
				case <-r.Context().Done():
					return
				}
			}
			_, _ = io.WriteString(w, "data: "+e+"\n\n")
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// one sends a request and waits for its outcome.
func (x *scripted) one(t *testing.T, body string) {
	t.Helper()
	n := len(x.seen.list())
	require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", body).status)
	require.Eventually(t, func() bool { return len(x.seen.list()) == n+1 }, 20*time.Second, time.Millisecond)
}

const prefilled = `{"choices":[],"usage":{"prompt_tokens":930}}`

// P's prompt tokens say nothing of what D took over. Where the protocol has no transfer, or D's usage does not tell,
// nothing is counted.
func TestTokensAreReusedOnlyWhereDecodeSaysSo(t *testing.T) {
	shared, err := lmcache.New(nil)
	require.NoError(t, err)
	plain, err := plainhttp.New(nil)
	require.NoError(t, err)
	computed := answer(`{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":930,"completion_tokens":3,` +
		`"prompt_tokens_details":{"cached_tokens":0}}}`)
	loaded := answer(`{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":930,"completion_tokens":3,` +
		`"prompt_tokens_details":{"cached_tokens":900}}}`)
	for name, c := range map[string]struct {
		conn   connector.KVConnector
		decode handler
		want   []float64
	}{
		"http transfers nothing":                {plain, computed, nil},
		"http, and D has the prompt in a cache": {plain, loaded, nil},
		"engines that share nothing":            {shared, computed, nil},
		"a store from which D loads":            {shared, loaded, []float64{900}},
		"a protocol whose D gives P's count":    {&fake{}, loaded, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := &book{}
			x := script(t, c.conn, answer(prefilled), c.decode, metered(b))
			x.one(t, completion("hi", ""))
			assert.Equal(t, c.want, b.of("pd.kv.tokens"))
			assert.Equal(t, []float64{930}, b.of("pd.tokens pd.token.type=input"))
			assert.Equal(t, []float64{3}, b.of("pd.tokens pd.token.type=output"))
			assert.Zero(t, b.count("pd.handoff.age"), "P's response says nowhere where the KV is")
			assert.Zero(t, x.seen.list()[0].HandoffAge)
			assert.Zero(t, b.count("pd.transfer.duration"))
		})
	}
}

// handsOver gives the fake protocol a handoff in P's response.
func handsOver(t *connector.Traits) { t.Handoff.Member = "kv_transfer_params" }

// Only a stream has a first chunk before its end, and it begins with content: the chunk of the role does not count.
func TestTimesOfTokensAreThoseOfStreams(t *testing.T) {
	const pause = 20 * time.Millisecond
	const handoff = `{"choices":[],"kv_transfer_params":{"a":1},"usage":{"prompt_tokens":9}}`
	b := &book{}
	x := script(t, &fake{more: handsOver}, answer(handoff),
		answer(`{"choices":[{"text":"hi"}],"usage":{"completion_tokens":3}}`), metered(b))
	x.one(t, completion("hi", ""))
	assert.Len(t, b.of("pd.handoff.age"), 1)
	for _, name := range []string{"pd.time_to_first_chunk", "pd.transfer.duration", "pd.time_per_output_token"} {
		assert.Zero(t, b.count(name), "%s of a response that is no stream", name)
	}

	events := []string{`{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}`,
		`{"choices":[{"delta":{"content":"a"}}]}`, `{"choices":[{"delta":{"content":"b"}}]}`,
		`{"choices":[{"delta":{"content":"c"},"finish_reason":"stop"}]}`,
		`{"choices":[],"usage":{"completion_tokens":3}}`, "[DONE]"}
	engines := roundTripper(func(r *http.Request) (*http.Response, error) {
		_, _ = io.Copy(io.Discard, r.Body)
		resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, ContentLength: -1,
			TransferEncoding: []string{"chunked"}, Request: r}
		if leg, _ := pdflow.LegFromContext(r.Context()); leg.Leg == pdflow.LegPrefill {
			resp.Body = io.NopCloser(strings.NewReader(handoff))
			return resp, nil
		}
		resp.Header.Set("Content-Type", "text/event-stream")
		resp.Body = io.NopCloser(&paced{events: events, pause: pause})
		return resp, nil
	})
	synctest.Test(t, func(t *testing.T) {
		flow, err := pdflow.New(&fake{more: handsOver}, pickOf(x), pdflow.WithTransport(engines),
			metered(b))
		require.NoError(t, err)
		resp, err := flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
			Body: []byte(completion("hi", `"stream":true`))})
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.NoError(t, flow.Shutdown(t.Context()))
	})
	first := b.of("pd.time_to_first_chunk pd.mode=disaggregated")
	require.Len(t, first, 1)
	assert.GreaterOrEqual(t, first[0], pause.Seconds(), "the role is no content")
	transfer := b.of("pd.transfer.duration")
	require.Len(t, transfer, 1)
	assert.GreaterOrEqual(t, transfer[0], pause.Seconds())
	assert.LessOrEqual(t, transfer[0], first[0])
	each := b.of("pd.time_per_output_token pd.mode=disaggregated")
	require.Len(t, each, 1)
	assert.InDelta(t, 2*pause.Seconds(), each[0], 1e-9, "four pauses over two tokens")
}

// paced is a stream of events, of which each is one read, with a pause before all but the first.
type paced struct {
	events []string
	pause  time.Duration
	next   int
}

func (p *paced) Read(b []byte) (int, error) {
	if p.next == len(p.events) {
		return 0, io.EOF
	}
	if p.next > 0 {
		time.Sleep(p.pause)
	}
	p.next++
	return copy(b, "data: "+p.events[p.next-1]+"\n\n"), nil
}

func TestAttemptsAreCountedByTheirOutcome(t *testing.T) {
	b := &book{}
	fails := true
	x := script(t, &fake{}, func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		h := answer(ok)
		if fails {
			h = status(500)
		}
		fails = false
		h(x, w, r, body)
	}, answer(ok), metered(b), pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: 1}))
	require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", completion("hi", "")).status)
	require.Eventually(t, func() bool { return len(x.seen.list()) == 2 }, 20*time.Second, time.Millisecond)
	assert.Len(t, b.of("pd.attempts error.type=prefill_failed pd.mode=disaggregated"), 1)
	assert.Len(t, b.of("pd.attempts pd.mode=disaggregated"), 1)
	assert.Len(t, b.of("pd.retries error.type=prefill_failed pd.leg=prefill pd.reason=failed"), 1)
}

// Who counts how requests are served learns why one engine served what two could, or why two did.
func TestAPickSaysWhyOneEngineServesOrTwo(t *testing.T) {
	b := &book{}
	x := script(t, &fake{}, answer(ok), answer(ok), metered(b))
	for _, pick := range []pdflow.Pick{{Decode: x.pair.Decode, Reason: "no_header"},
		{Prefill: x.pair.Prefill, Decode: x.pair.Decode, Reason: "interference"}} {
		resp, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
			Body: []byte(`{"prompt":"hi"}`), Pick: &pick})
		require.NoError(t, err)
		require.Len(t, x.flow.Sessions(), 1)
		assert.Equal(t, pick.Reason, x.flow.Sessions()[0].Reason)
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, errors.Join(err, resp.Body.Close()))
	}
	for _, name := range []string{"pd.attempts", "pd.request.duration"} {
		assert.Len(t, b.of(name+" pd.mode=aggregated pd.reason=no_header"), 1)
		assert.Len(t, b.of(name+" pd.mode=disaggregated pd.reason=interference"), 1)
	}
	assert.Equal(t, "no_header", x.seen.list()[0].Reason)
	assert.Equal(t, "interference", x.seen.list()[1].Reason)
}
