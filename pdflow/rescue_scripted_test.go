// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// Streams that may be rescued, of engines that write what a test says.

// token is an event of a completion with one token; the prompt's ids are in it if they are given.
func token(id int, finish, prompt string) string {
	return fmt.Sprintf(`data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,`+
		`"text":"t%d ","logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":%s,"token_ids":[%d]}]}`+
		"\n\n", id, finish, prompt, id)
}

const (
	wasLost  = `data: {"error":{"message":"KV load failed: boom","type":"InternalServerError","code":500}}` + "\n\n"
	theEnd   = "data: [DONE]\n\n"
	theUsage = `data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[],` +
		`"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}` + "\n\n"
)

// writes is an engine that writes events, each by itself, and breaks the connection if the last one is "".
func writes(events ...string) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range events {
			if e == "" {
				time.Sleep(10 * time.Millisecond) // what was written is read before
				panic(http.ErrAbortHandler)
			}
			_, _ = io.WriteString(w, e)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

// goesOn makes the token that follows two.
var goesOn = writes(token(12, `"length"`, "[1,2,3,10,11]"), theEnd)

// avoids is inTurn, and keeps how many engines each pick had to avoid.
type avoids struct {
	inTurn
	mu  sync.Mutex
	got []int
}

func (a *avoids) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.got = append(a.got, len(in.Avoid))
	return a.inTurn.Pick(ctx, in)
}

// scripts is script with a second decode engine, and with rescue unless an option says otherwise.
func scripts(t *testing.T, c connector.KVConnector, p, d, other handler, opts ...pdflow.Option) (x *scripted,
	picker *avoids, count *book) {
	t.Helper()
	x, count = script(t, c, p, d), &book{}
	second := script(t, c, p, other)
	picker = &avoids{inTurn: inTurn{x.pair.Prefill, []discovery.Endpoint{x.pair.Decode, second.pair.Decode}}}
	var err error
	x.flow, err = pdflow.New(c, pick.Func(picker.Pick), append([]pdflow.Option{pdflow.WithRescue(1), metered(count),
		pdflow.WithRetry(config.Retry{MaxAttempts: 1}),
		pdflow.WithObserver(pdflow.Observer{SessionEnd: x.seen.SessionEnd})}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.flow.Shutdown(context.Background())) })
	x.url = serve(t, x.flow)
	return x, picker, count
}

func (x *scripted) stream(t *testing.T, more string) reply {
	t.Helper()
	return post(t, x.url, "/v1/completions", completion("a", `"stream":true`+more))
}

// An engine's error is told, and blamed on both engines, whether or not its stream may be rescued.
func TestErrorsOfAStreamThatMayBeRescuedAreTold(t *testing.T) {
	plain := `data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":null}]}` + "\n\n"
	for _, rescues := range []int{0, 1} {
		x, picker, _ := scripts(t, &fake{}, answer(ok), writes(wasLost, theEnd), writes(wasLost, theEnd),
			pdflow.WithRescue(rescues),
			pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}))
		got := x.stream(t, "")
		assert.Equal(t, http.StatusInternalServerError, got.status)
		assert.Contains(t, got.body, "boom", "before the first token")
		assert.Equal(t, []int{0, 2}, picker.got, "prefill's KV may be what could not be loaded")

		x, _, _ = scripts(t, &fake{}, answer(ok), writes(plain, wasLost, theEnd), goesOn, pdflow.WithRescue(rescues))
		got = x.stream(t, "")
		assert.Contains(t, got.body, "boom", "without token ids")
		assert.Error(t, got.err)
	}
	x, _, count := scripts(t, &fake{}, answer(ok), writes(token(10, "null", "[1,2,3]"), token(11, "null", "null"), ""),
		writes(token(12, "null", "[1,2,3,10,11]"), wasLost, theEnd))
	got := x.stream(t, "")
	assert.Contains(t, got.body, `"text":"t12 "`)
	assert.Contains(t, got.body, "boom", "of the second engine")
	assert.Error(t, got.err)
	assert.Equal(t, []string{"rescued stream_broken", "refused too_often"}, count.rescues())
}

// An engine may tell counts that nobody asked for (vLLM's --enable-force-include-usage).
func TestARescuableStreamKeepsCountsThatNobodyAskedFor(t *testing.T) {
	x, _, _ := scripts(t, &fake{}, answer(ok), writes(token(10, "null", "[1,2,3]"), token(11, `"stop"`, "null"),
		theUsage, theEnd), goesOn)
	got := x.stream(t, "")
	require.NoError(t, got.err)
	assert.Contains(t, got.body, `"completion_tokens":2`)
}

func TestTheCountsAreKnownWhereOnlyTheEndWasLost(t *testing.T) {
	x, _, count := scripts(t, &fake{}, answer(ok), writes(token(10, "null", "[1,2,3]"), token(11, `"length"`, "null"),
		theUsage, ""), goesOn)
	got := x.stream(t, `,"stream_options":{"include_usage":true}`)
	require.NoError(t, got.err)
	require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 20*time.Second, time.Millisecond)
	assert.EqualValues(t, 2, last(x).Usage.Output)
	assert.Equal(t, []string{"rescued stream_broken"}, count.rescues())
}

// The second engine asks for a prefill although no order lets it.
func TestAnEngineThatGoesOnMayNotAskForAPrefill(t *testing.T) {
	x, _, _ := scripts(t, &fake{}, answer(ok), writes(token(10, "null", "[1,2,3]"), token(11, "null", "null"), ""),
		writes(token(99, `"cache_threshold"`, "[1,2,3,10,11]"), theEnd))
	got := x.stream(t, "")
	assert.NotContains(t, got.body, "t99")
	assert.Error(t, got.err)
}

// The second engine is sent a completion; the client's request is a chat.
func TestARescuedChatIsMeasuredAsAChat(t *testing.T) {
	o := &book{}
	x, _ := rescuing(t, metered(o), pdflow.WithTelemetry(pdflow.Telemetry{GenAI: "vllm"}))
	require.NoError(t, x.struck(rescuableChat(""), 3, 5).err)
	require.NoError(t, x.flow.Shutdown(t.Context()))
	operations := o.labels("gen_ai.server.*", "gen_ai.operation.name")
	require.NotEmpty(t, operations)
	assert.NotContains(t, operations, "text_completion")
}

// The race detector sees it if the first prefill reads what the rescue replaces.
func TestAPrefillThatRunsOnKnowsItsOwnRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		prefills, decodes := 0, 0
		var told book
		f := newFakeFleet(t, &fake{order: connector.Together,
			more: func(t *connector.Traits) { t.Ending.PrefillFinishes = true }}, "p0 p1 d0 d1",
			config.Retry{MaxAttempts: 1}, func(host string, _ int) response {
				switch {
				case host[0] == 'd':
					if decodes++; decodes > 1 {
						return streaming(0, io.EOF, token(12, `"length"`, "[1,2,3,10,11]"), theEnd)
					}
					return streaming(10*time.Millisecond, errors.New("broke"), token(10, "null", "[1,2,3]"),
						token(11, "null", "null"))
				case prefills == 0:
					prefills++
					return after(200*time.Millisecond, replies(500))
				}
				return replies(200)
			}, pdflow.WithRescue(1), metered(&told))
		require.NoError(t, f.do(completion("a", `"stream":true`)))
		assert.Equal(t, []string{"rescued stream_broken"}, told.rescues())
		require.NoError(t, f.flow.Shutdown(t.Context()))
		assert.Equal(t, []string{"prefill_failed"}, told.labels("pd.prefills.ran_on", "error.type"))
	})
}

// A rescue that asks P for its context's length is ended as any other.
func TestARescueThatAsksForTheContextEndsWithItsBody(t *testing.T) {
	asked := make(chan struct{})
	p := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		if r.URL.Path != "/v1/models" {
			answer(ok)(x, w, r, body)
			return
		}
		close(asked)
		<-r.Context().Done()
	}
	role := `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":` +
		`{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":[1,2,3]}` + "\n\n"
	content := `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,` +
		`"delta":{"content":"a"},"logprobs":null,"finish_reason":null,"token_ids":[10]}]}` + "\n\n"
	x, _, count := scripts(t, &fake{}, p, writes(role, content, content, ""), goesOn)
	resp, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APIChat, Body: []byte(
		`{"model":"m","messages":[{"role":"user","content":"a"}],"temperature":0,"stream":true}`)})
	require.NoError(t, err)
	read := make(chan error, 1)
	go func() { _, err := io.ReadAll(resp.Body); read <- err }()
	<-asked
	require.NoError(t, resp.Body.Close())
	require.Error(t, <-read)
	assert.NotContains(t, strings.Join(count.rescues(), " "), "prefill_failed", "the 2 s that P has were waited for")
}

// pairs picks prefill and decode engines that need not be avoided, and counts picks and calls of Done.
type pairs struct {
	inTurn
	spare       discovery.Endpoint // of prefill
	picks, done atomic.Int32
}

func (p *pairs) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	if in.Attempt == 1 && p.picks.Load() > 0 { // only the rescue is hedged, however slow the first prefill is
		return pdflow.Pick{}, pdflow.CodeNoEndpoint
	}
	p.picks.Add(1)
	got, err := p.inTurn.Pick(ctx, in)
	if in.Avoids(got.Prefill.ID) {
		got.Prefill = p.spare
	}
	got.Done = func(*pdflow.Outcome) { p.done.Add(1) }
	return got, err
}

// An observer panics as the second prefill of a rescue begins beside the first, which has ended its pick, too, then.
func TestAPanicInARescuesHedgeEndsBothPrefills(t *testing.T) {
	var prefills, sessions atomic.Int32
	p := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		if prefills.Add(1) > 1 {
			<-r.Context().Done()
			return
		}
		answer(ok)(x, w, r, body)
	}
	c := &fake{more: func(t *connector.Traits) { t.Handoff.ContentStore = true }}
	x, _, _ := scripts(t, c, p, writes(token(10, "null", "[1,2,3]"), token(11, "null", "null"), ""), goesOn)
	picker := &pairs{inTurn: inTurn{x.pair.Prefill, []discovery.Endpoint{x.pair.Decode}},
		spare: script(t, c, p, goesOn).pair.Prefill}
	flow, err := pdflow.New(c, pick.Func(picker.Pick), pdflow.WithRescue(1),
		pdflow.WithRetry(config.Retry{MaxAttempts: 1, Hedge: 100 * time.Millisecond}),
		pdflow.WithObserver(pdflow.Observer{SessionStart: func(context.Context, *connector.Session) {
			if sessions.Add(1) < 3 {
				return
			}
			for prefills.Load() < 2 { // until the rescue's first has been sent
				time.Sleep(time.Millisecond)
			}
			panic("boom")
		}}))
	require.NoError(t, err)
	got := post(t, serve(t, flow), "/v1/completions", completion("a", `"stream":true`))
	require.Error(t, got.err)
	require.NoError(t, flow.Shutdown(t.Context()))
	assert.EqualValues(t, 3, picker.picks.Load())
	assert.EqualValues(t, 3, picker.done.Load())
}

// A rescue leaves nothing behind in a context that outlives the request: each child of such a one has a goroutine, for
// which TestMain looks.
func TestARescueLetsGoOfTheCallersContext(t *testing.T) {
	x, _, count := scripts(t, &fake{}, answer(ok), writes(token(10, "null", "[1,2,3]"), token(11, "null", "null"), ""),
		goesOn)
	ctx := &counted{Context: context.Background(), done: make(chan struct{})}
	resp, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
		Body: []byte(completion("a", `"stream":true`))})
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, x.flow.Shutdown(t.Context()))
	assert.Equal(t, []string{"rescued stream_broken"}, count.rescues())
}

// Decode cannot be reached: prefill, which waits for it, is not sent, and leaves no KV for nobody.
func TestAStepThatFailsLetsNoOtherLegGo(t *testing.T) {
	t.Parallel()
	refused := roundTripper(func(*http.Request) (*http.Response, error) {
		time.Sleep(20 * time.Millisecond) // prefill waits by then
		return nil, &transport.Error{Sent: transport.SentNothing, Kind: transport.KindRefused,
			Err: errors.New("refused")}
	})
	for range 20 { // prefill took part in a race with its own end
		x := script(t, &fake{order: connector.Together}, answer(ok), answer(ok))
		s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
		var sent sync.WaitGroup
		for range 2 {
			step, _, err := s.Next(t.Context())
			require.NoError(t, err)
			sent.Go(func() {
				if step.Leg == pdflow.LegPrefill {
					step.Send(client.Transport)
				} else {
					step.Send(refused)
				}
			})
		}
		sent.Wait()
		s.End(nil)
		require.Empty(t, x.all())
	}
}

// The host has made decode's response itself, without taking the step: prefill waits for nobody.
func TestDoneOfAStepThatNobodyTookLetsTheOtherLegGo(t *testing.T) {
	x := script(t, &fake{order: connector.Together}, answer(ok), answer(ok))
	s := begin(t, x.flow, `{"prompt":"hi"}`, nil)
	p, _, err := s.Next(t.Context())
	require.NoError(t, err)
	require.Equal(t, pdflow.LegPrefill, p.Leg)
	sent := make(chan struct{})
	go func() { p.Send(client.Transport); close(sent) }()
	d, _, err := s.Next(t.Context())
	require.NoError(t, err)
	d.Done(&http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader([]byte(fromD)))}, nil)
	within(t, "Send", func() { <-sent })
	_, resp, err := s.Next(t.Context())
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, fromD, string(body))
}

// The prompt of the rest of a stream has tokens of the output, too. What prefill had cached of it counts only as far as
// it is the client's prompt.
func TestTheCachedTokensOfARescuedStream(t *testing.T) {
	const usage = `"usage":{"prompt_tokens":5,"total_tokens":6,"completion_tokens":1,"prompt_tokens_details":{` +
		`"cached_tokens":%d}}`
	for had, want := range map[int]int{0: 0, 2: 2, 5: 3} {
		x, _, _ := scripts(t, &fake{more: tellsReused}, answer(`{"choices":[],`+fmt.Sprintf(usage, had)+`}`),
			writes(token(10, "null", "[1,2,3]"), token(11, "null", "null"), ""),
			writes(token(12, `"length"`, "[1,2,3,10,11]"), `data: {"id":"c","object":"text_completion","created":1,`+
				`"model":"m","choices":[],`+fmt.Sprintf(usage, 5)+`}`+"\n\n", theEnd))
		got := x.stream(t, `,"stream_options":{"include_usage":true}`)
		require.NoError(t, got.err)
		assert.Contains(t, got.body, `"prompt_tokens":3,`)
		assert.Contains(t, got.body, fmt.Sprintf(`"cached_tokens":%d}`, want), had)
	}
}
