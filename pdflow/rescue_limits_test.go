// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// What is told of rescues, and where streams are not rescued: there they end as without it.

const greedy = `"max_tokens":12,"temperature":0,"stream":true`

func rescuable(more string) rescueCase {
	return rescueCase{"", "/v1/completions", fmt.Sprintf(`{"model":"tiny","prompt":%q,%s%s}`, longPrompt, greedy, more)}
}

func rescuableChat(more string) rescueCase {
	return rescueCase{"", "/v1/chat/completions", fmt.Sprintf(
		`{"model":"tiny","messages":[{"role":"user","content":%q}],%s%s}`, longPrompt, greedy, more)}
}

func TestOutcomesAndCounterTellARescue(t *testing.T) {
	count := &book{}
	x, _ := rescuing(t, metered(count))
	got := x.struck(rescuableChat(""), enginesim.FaultKill, 5)
	require.NoError(t, got.err)
	require.Eventually(t, func() bool { return len(x.seen.list()) == 2 }, 20*time.Second, time.Millisecond)
	first, second := x.seen.list()[0], x.seen.list()[1]
	assert.Equal(t, pdflow.CodeStreamBroken, first.Err.Code)
	assert.False(t, first.Final)
	assert.Zero(t, first.Resumed)
	assert.Nil(t, second.Err)
	assert.True(t, second.Final)
	assert.Equal(t, 4, second.Resumed, "the client had the role and four tokens")
	assert.NotEqual(t, first.Session.Decode.ID, second.Session.Decode.ID)
	assert.Equal(t, 2, second.Session.Attempt)
	assert.Equal(t, []string{"rescued stream_broken"}, count.rescues())
}

func TestWhatIsNotRescuedIsCutAsWithoutRescue(t *testing.T) {
	for more, reason := range map[string]string{
		`,"temperature":0.7`: "temperature", `,"n":2,"temperature":0`: "", `,"logprobs":1`: "logprobs",
		`,"presence_penalty":1.5`: "presence_penalty", `,"guided_regex":"a"`: "member", `,"echo":true`: "echo",
		`,"response_format":{"type":"json_object"}`: "response_format", `,"suffix":"x"`: "member",
		`,"tools":[{"type":"function"}]`: "tools",
	} {
		count := &book{}
		x, _ := rescuing(t, metered(count))
		c := rescuable(more)
		if strings.Contains(more, `"temperature"`) {
			c.body = strings.Replace(c.body, `"temperature":0,`, "", 1)
		}
		got := x.struck(c, enginesim.FaultResetStream, 3)
		if reason == "" { // one engine would serve it, or the engine refuses it
			require.NotContains(t, string(x.d.Requests()[0].Body), "return_token_ids", more)
			continue
		}
		require.ErrorIs(t, got.err, io.ErrUnexpectedEOF, more)
		require.Equal(t, 3, strings.Count(got.body, "\n\n"), more)
		require.Equal(t, []string{"refused " + reason}, count.rescues(), more)
		require.NotContains(t, string(x.d.Requests()[0].Body), "return_token_ids", more)
		require.Len(t, x.p.Requests(), 1, more)
	}
}

func TestAnImageIsNotRescued(t *testing.T) {
	count := &book{}
	x, _ := rescuing(t, metered(count))
	got := x.struck(rescueCase{"", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":[` +
		`{"type":"text","text":"` + longPrompt + `"},` +
		`{"type":"image_url","image_url":{"url":"data:image/png;base64,"}}]}],` + greedy + `}`},
		enginesim.FaultResetStream, 3)
	require.Error(t, got.err)
	require.Equal(t, []string{"refused media"}, count.rescues())
}

func TestWithoutTheOptionNothingIsAskedFor(t *testing.T) {
	x := start(t, setup{})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	got := post(t, x.url, "/v1/completions", rescuable("").body)
	require.ErrorIs(t, got.err, io.ErrUnexpectedEOF)
	require.NotContains(t, string(x.d.Requests()[0].Body), "return_token_ids")
	require.Len(t, x.p.Requests(), 1)
}

func TestAStreamIsRescuedNoOftenerThanAllowed(t *testing.T) {
	for allowed, want := range map[int]error{1: io.ErrUnexpectedEOF, 2: nil} {
		count := &book{}
		x, other := rescuing(t, pdflow.WithRescue(allowed), metered(count))
		undisturbed := sameOf(post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body)
		other.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 4})
		got := x.struck(rescuable(""), enginesim.FaultResetStream, 3)
		if want != nil {
			require.ErrorIs(t, got.err, want)
			require.Equal(t, 7, strings.Count(got.body, "\n\n"), "what both engines sent reaches the client")
			require.Equal(t, []string{"rescued stream_broken", "refused too_often"}, count.rescues())
			continue
		}
		require.NoError(t, got.err)
		require.Equal(t, []string{"rescued stream_broken", "rescued stream_broken"}, count.rescues())
		require.Equal(t, undisturbed, sameOf(got.body))
	}
}

func TestAStreamIsCutWhereNoEngineIsLeft(t *testing.T) {
	x, other := rescuing(t, pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}))
	require.NoError(t, other.Close())
	undisturbed := sameOf(post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body)
	got := x.struck(rescuable(""), enginesim.FaultResetStream, 3)
	require.ErrorIs(t, got.err, io.ErrUnexpectedEOF)
	require.True(t, strings.HasPrefix(undisturbed, sameOf(got.body)))
	require.Equal(t, 3, strings.Count(got.body, "\n\n"), "whole events, and nothing after the cut")
	require.NoError(t, x.flow.Shutdown(t.Context()))
	require.Len(t, x.seen.list(), 4, "each attempt ends once: the undisturbed one, the broken one, and two rescues")
	for _, o := range x.seen.list()[1:] {
		require.NotNil(t, o.Err)
		require.Zero(t, o.Resumed)
	}
}

func TestASilentDecodeEngineIsADeadOne(t *testing.T) {
	t.Parallel()
	for idle := time.Second; ; idle *= 4 {
		x, _ := rescuing(t, pdflow.WithTimeouts(config.Timeouts{Idle: idle, Silence: idle}))
		want := sameOf(post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body)
		got := x.struck(rescuable(""), enginesim.FaultStallStream, 3)
		if got.err != nil && idle < 10*time.Second {
			continue // the other engine was silent for as long
		}
		require.NoError(t, got.err)
		require.Equal(t, want, sameOf(got.body))
		return
	}
}

func TestAChatWithoutALimitGoesOnToTheEndOfTheContext(t *testing.T) {
	small := enginesim.Config{MaxModelLen: 420, DefaultMaxTokens: 1000}
	decode := small
	decode.KVRole = enginesim.RoleConsumer
	x, _ := rescuingWith(t, small, decode)
	c := rescuableChat("")
	c.body = strings.Replace(c.body, `"max_tokens":12,`, "", 1)
	want := post(t, x.url, c.path, c.body, "X-Request-Id", "same")
	require.Greater(t, strings.Count(want.body, "\n\n"), 20)
	got := x.struck(c, enginesim.FaultResetStream, 6)
	require.NoError(t, got.err)
	require.Equal(t, sameOf(want.body), sameOf(got.body))
}

func TestUsageThatOnlyTheFlowWantsSurvivesARescue(t *testing.T) {
	for _, c := range []rescueCase{rescuable(""), rescuableChat("")} {
		x, _ := rescuing(t, usage)
		want := post(t, x.url, c.path, c.body, "X-Request-Id", "same")
		require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 20*time.Second, time.Millisecond)
		got := x.struck(c, enginesim.FaultResetStream, 6)
		require.NoError(t, got.err)
		require.Equal(t, sameOf(want.body), sameOf(got.body))
		require.NotContains(t, got.body, `"usage"`)
		require.Eventually(t, func() bool { return len(x.seen.list()) == 3 }, 20*time.Second, time.Millisecond)
		undisturbed, rescued := x.seen.list()[0].Usage, x.seen.list()[2].Usage
		require.Positive(t, undisturbed.Output)
		require.Equal(t, undisturbed.Output, rescued.Output, c.path)
		require.Equal(t, undisturbed.Input, rescued.Input, c.path)
	}
}

// While another pair is tried, the client leaves, or the flow is shut down.
func TestARescueEndsWithItsClientAndWithItsFlow(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(cancel func(), x *pd){
		"client": func(cancel func(), _ *pd) { cancel() },
		"shutdown": func(_ func(), x *pd) {
			ctx, stop := context.WithCancel(x.t.Context())
			stop()
			_ = x.flow.Shutdown(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			x, other := rescuing(t)
			other.Inject(enginesim.Fault{Kind: enginesim.FaultStall, Leg: enginesim.LegDecode})
			x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
				Body: []byte(rescuable("").body)})
			require.NoError(t, err)
			read := make(chan error)
			go func() { _, err := io.ReadAll(resp.Body); read <- err }()
			require.Eventually(t, func() bool { return len(other.Requests()) == 1 }, 20*time.Second, time.Millisecond)
			end(cancel, x)
			require.Error(t, <-read)
			require.NoError(t, resp.Body.Close())
			require.NoError(t, x.flow.Shutdown(t.Context()))
			for _, o := range x.seen.list() {
				require.NotNil(t, o.Err)
			}
		})
	}
}

// The new pair has sent its first events when the flow is shut down without time left: the stream is cut.
func TestShutdownCutsAStreamThatWasRescued(t *testing.T) {
	x, other := rescuing(t)
	other.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, Leg: enginesim.LegDecode, AfterChunks: 2})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	resp, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
		Body: []byte(rescuable("").body)})
	require.NoError(t, err)
	var got []byte
	for buf := make([]byte, 512); strings.Count(string(got), "\n\n") < 4; { // three are the first engine's
		n, err := resp.Body.Read(buf)
		require.NoError(t, err, "%s", got)
		got = append(got, buf[:n]...)
	}
	read := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(resp.Body)
		assert.NoError(t, resp.Body.Close())
		read <- err
	}()
	none, stop := context.WithCancel(t.Context())
	stop()
	require.Error(t, x.flow.Shutdown(none))
	require.Error(t, <-read)
	require.NoError(t, x.flow.Shutdown(t.Context()))
	require.Len(t, x.seen.list(), 2)
	require.Equal(t, pdflow.CodeStreamBroken, x.seen.list()[0].Err.Code)
	require.Equal(t, pdflow.CodeDraining, x.seen.list()[1].Err.Code)
}

// A flow that is shut down while a new pair is asked waits for the stream's end, if it has the time.
func TestShutdownLetsARescueFinish(t *testing.T) {
	x, other := rescuing(t)
	want := sameOf(post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body)
	other.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegDecode, Delay: 300 * time.Millisecond})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	response := make(chan string)
	go func() { response <- post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body }()
	require.Eventually(t, func() bool { return len(other.Requests()) == 1 }, 20*time.Second, time.Millisecond)
	shut := make(chan error, 1)
	go func() { shut <- x.flow.Shutdown(t.Context()) }()
	require.Equal(t, want, sameOf(<-response))
	require.NoError(t, <-shut)
}

func TestCloseEndsARescueThatWaits(t *testing.T) {
	x, other := rescuing(t)
	other.Inject(enginesim.Fault{Kind: enginesim.FaultStall, Leg: enginesim.LegDecode})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	resp, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
		Body: []byte(rescuable("").body)})
	require.NoError(t, err)
	read := make(chan error)
	go func() { _, err := io.ReadAll(resp.Body); read <- err }()
	require.Eventually(t, func() bool { return len(other.Requests()) == 1 }, 20*time.Second, time.Millisecond)
	require.NoError(t, resp.Body.Close())
	require.Error(t, <-read)
}

func TestARoundTripperRescuesAndChosenPairsAndStepsDoNot(t *testing.T) {
	x, _ := rescuing(t)
	want := sameOf(post(t, x.url, "/v1/completions", rescuable("").body, "X-Request-Id", "same").body)
	next := &http.Transport{DisableCompression: true}
	t.Cleanup(next.CloseIdleConnections)
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://model.example/v1/completions",
		strings.NewReader(rescuable("").body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Request-Id", "same")
	resp, err := (&http.Client{Transport: x.flow.RoundTripper(next)}).Do(r)
	require.NoError(t, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, want, sameOf(string(got)))

	// A pair that the caller has chosen gets one attempt.
	pair, err := inTurn{endpoint(t, x.p.URL(), discovery.RolePrefill), []discovery.Endpoint{
		endpoint(t, x.d.URL(), discovery.RoleDecode)}}.Pick(t.Context(), &pdflow.PickInput{})
	require.NoError(t, err)
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 3})
	chosen, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Pick: &pair,
		Body: []byte(rescuable("").body)})
	require.NoError(t, err)
	_, err = io.ReadAll(chosen.Body)
	require.ErrorIs(t, err, pdflow.CodeStreamBroken)
	require.NoError(t, chosen.Body.Close())

	steps, err := x.flow.Begin(t.Context(), &pdflow.Request{API: connector.APICompletions,
		Body: []byte(rescuable("").body)})
	require.NoError(t, err)
	defer steps.End(nil)
	for range 2 {
		step, _, err := steps.Next(t.Context())
		require.NoError(t, err)
		if step.Leg == pdflow.LegDecode {
			body, err := taken(step)
			require.NoError(t, err)
			require.NotContains(t, string(body), "return_token_ids")
			return
		}
		step.Send(next)
	}
	t.Fatal("no decode leg came")
}

// A decode engine that first says that it has too little of the prompt gets a prefill, also where it goes on for
// another one.
func TestARescueInTheOrderDecodeFirst(t *testing.T) {
	chunk := func(text, ids, reason, prompt string) string {
		return fmt.Sprintf(`data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,`+
			`"text":%q,"logprobs":null,"finish_reason":%s,"stop_reason":null,"prompt_token_ids":%s,"token_ids":%s}]}`+
			"\n\n", text, reason, prompt, ids)
	}
	const done = "data: [DONE]\n\n"
	cold := chunk("", "[]", `"cache_threshold"`, "null") + done
	var bodies []string
	replies := []string{cold, chunk("a", "[7]", "null", "[1,2,3]") + chunk("b", "[8]", "null", "null"), cold,
		chunk("c", "[9]", `"length"`, "[1,2,3,7,8]") + done}
	x := script(t, &coldFake{fake: fake{order: connector.DecodeFirst}}, answer(ok),
		func(x *scripted, w http.ResponseWriter, _ *http.Request, body string) {
			x.mu.Lock()
			bodies = append(bodies, body)
			n := len(bodies)
			x.mu.Unlock()
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, replies[n-1])
			if n == 2 {
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
		}, pdflow.WithRescue(1))
	got := post(t, x.url, "/v1/completions", `{"prompt":"abc",`+greedy+`}`)
	require.NoError(t, got.err)
	require.Equal(t, "DPDDPD", strings.ReplaceAll(x.all(), " ", ""))
	x.mu.Lock()
	defer x.mu.Unlock()
	require.Contains(t, bodies[2], `"prompt":[1,2,3,7,8]`)
	want := chunk("a", "null", "null", "null") + chunk("b", "null", "null", "null")
	require.Equal(t, want+chunk("c", "null", `"length"`, "null")+done, got.body)
}

// coldFake decodes first.
type coldFake struct{ fake }

func (coldFake) Cold(_ *connector.Session, _ int, first []byte) bool {
	return strings.Contains(string(first), "cache_threshold")
}
