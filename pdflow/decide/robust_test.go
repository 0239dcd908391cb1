// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// setBack is a time whose wall clock was set back, which leaves its monotonic clock as it was: an operating system's
// clock that jumps, as a time server sets it.
func setBack(t time.Time, by time.Duration) time.Time {
	wall := (*uint64)(unsafe.Pointer(&t))
	*wall -= uint64(by/time.Second) << 30
	return t
}

// What engines have to do is told by a clock that does not jump.
func TestAClockThatIsSetBackMakesNoEngineBusy(t *testing.T) {
	back := time.Duration(0)
	now := func() time.Time { return setBack(time.Now(), back) }
	policy := &spy{Policy: decide.Never()}
	p := around(t, newSet(t, engines(1, "")...), policy, &decide.Options{Now: now, Engine: h100s, TokenBytes: 1000,
		Link: 100_000})
	in := &pdflow.PickInput{Request: completion(t, text(7996)), Attempt: 1}
	mustPick(t, p, in)
	policy.Policy = decide.Always()
	x := mustPick(t, p, in)
	x.PrefillDone(&pdflow.LegOutcome{})
	back = 3 * time.Hour
	mustPick(t, p, in)
	assert.LessOrEqual(t, policy.last().Decode[0].QueueTokens, 2000)
	assert.LessOrEqual(t, policy.last().Decode[0].Moving, 2000)
}

// One request that hung for minutes is not the speed of the next ones.
func TestOneRequestThatHungMakesNoPredictionDoubtful(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outer, err := decide.New(pick.New(newSet(t, engines(2, "")...), pick.TwoChoices(), pick.WithCandidates()),
			decide.Predicted(decide.PredictedOptions{}), nil)
		require.NoError(t, err)
		defer outer.Close()
		p := outer.Bind(nil, anyAlone)
		w := &world{overhead: 5 * time.Millisecond, perPrompt: 30 * time.Microsecond, perSent: time.Microsecond,
			step: 10 * time.Millisecond}
		r := rand.New(rand.NewPCG(2, 2))
		run := func(n int) {
			for range n {
				w.serve(t, p, 1000+r.IntN(2000))
			}
		}
		run(100)
		w.overhead = 10 * time.Minute
		w.serve(t, p, 1500)
		w.overhead = 5 * time.Millisecond
		for range 10 {
			run(10)
			assert.False(t, outer.State().Doubtful, "%v", outer.State())
		}
	})
}

// An engine that was slow for a while, as while it compiled, is tried again.
func TestAnEngineThatWasSlowIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		policy := &spy{Policy: decide.Never()}
		p := around(t, newSet(t, engines(2, "")...), policy, nil)
		slower := func() float64 {
			mustPick(t, p, &pdflow.PickInput{Request: completion(t, text(796))}).Done(&pdflow.Outcome{})
			a, b := policy.last().Decode[0].Speed.PerPrompt, policy.last().Decode[1].Speed.PerPrompt
			return max(a, b) / min(a, b)
		}
		w := &world{perPrompt: time.Millisecond, step: time.Millisecond, slow: "d0"}
		for range 40 {
			w.serve(t, p, 200)
		}
		assert.Greater(t, slower(), 5.0)
		time.Sleep(5 * time.Minute)
		assert.InDelta(t, 1, slower(), 1e-9, "as fast as the others")
		w.slow = ""
		for range 40 {
			w.serve(t, p, 200)
		}
		assert.InDelta(t, 1, slower(), 0.1, "what was learnt before counts no more")
	})
}

// Pictures in a prompt are no text: their bytes are not its tokens.
func TestPicturesInAPromptAreNotText(t *testing.T) {
	picture := strings.Repeat("iVBORw0KGgo+/A", 300_000)
	for api, body := range map[connector.API]string{
		connector.APIChat: `{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"what?"},` +
			`{"type":"image_url","image_url":{"url":"data:image/png;base64,` + picture + `"}}]}]}`,
		connector.APIResponses: `{"model":"m","input":[{"role":"user","content":[{"type":"input_image",` +
			`"image_url":"data:image/png;base64,` + picture + `"}]}]}`,
		connector.APIMessages: `{"model":"m","messages":[{"role":"user","content":[{"type":"image","source":{` +
			`"type":"base64","media_type":"image/png","data":"` + picture + `"}}]}]}`,
	} {
		r, err := connector.ParseRequest(api, []byte(body))
		require.NoError(t, err)
		policy := &spy{Policy: decide.Always()}
		mustPick(t, around(t, newSet(t, engines(1, "")...), policy, nil), &pdflow.PickInput{Request: r})
		assert.Less(t, policy.last().Prompt, 5000, api)
		assert.Greater(t, policy.last().Prompt, 200, api)
	}
	late := `{"model":"m","messages":[` + strings.Repeat(" ", 2000) + `{"role":"user","content":"hi"}]}`
	r, err := connector.ParseRequest(connector.APIChat, []byte(late))
	require.NoError(t, err)
	mustPick(t, around(t, newSet(t, engines(1, "")...), decide.Always(), nil), &pdflow.PickInput{Request: r})

	long := strconv.Quote(strings.Repeat("文章很长没有空格", 10_000))
	policy := &spy{Policy: decide.Always()}
	mustPick(t, around(t, newSet(t, engines(1, "")...), policy, nil), &pdflow.PickInput{Request: completion(t, long)})
	assert.Equal(t, len(long)/4+1, policy.last().Prompt)
}

// Policies are told the limit that the client gives the response, in whichever member its API has it.
func TestPoliciesKnowTheClientsLimit(t *testing.T) {
	for body, want := range map[string]int{
		`{"model":"m","messages":[],"max_completion_tokens":40}`:       40,
		`{"model":"m","messages":[],"max_tokens":16.0}`:                16,
		`{"model":"m","messages":[]}`:                                  0,
		`{"model":"m","messages":[],"max_tokens":9000000000000000000}`: 1 << 30,
	} {
		r, err := connector.ParseRequest(connector.APIChat, []byte(body))
		require.NoError(t, err)
		policy := &spy{Policy: decide.Always()}
		mustPick(t, around(t, newSet(t, engines(1, "")...), policy, nil), &pdflow.PickInput{Request: r})
		assert.Equal(t, want, policy.last().Limit, body)
	}
}

// A promise that no engine could keep, however idle, is no reason to refuse: to try again later would not help.
func TestWhatNoIdleEngineCouldKeepIsNoReasonToRefuse(t *testing.T) {
	refused := func(class decide.Class) (n int) {
		class.Refusable = true
		p := around(t, newSet(t, engines(1, "")...), decide.Predicted(decide.PredictedOptions{}), &decide.Options{
			Engine: h100s, Tokens: func(*pdflow.PickInput) (int, bool) { return 100_000, true }, // 3.1 s
			Class: func(*pdflow.PickInput) decide.Class { return class }})
		for range 10 {
			in := &pdflow.PickInput{Request: completion(t, `"hi"`), Attempt: 1}
			if _, err := p.Pick(t.Context(), in); err != nil {
				n++
			}
		}
		return n
	}
	assert.Zero(t, refused(decide.Class{TTFT: 1}))
	assert.Zero(t, refused(decide.Class{ITL: time.Millisecond}))
	assert.Zero(t, refused(decide.Class{TTFT: time.Second}))
	assert.Positive(t, refused(decide.Class{TTFT: 5 * time.Second}), "engines that are busy")
}
