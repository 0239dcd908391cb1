// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// tooLong is a request that both engines refuse: its prompt is longer than their context.
var tooLong = fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, strings.Repeat("too long ", 20000))

// refused sends a request to which an engine responds 400.
func (x *rig) refused(body string) {
	_, err := x.do(connector.APICompletions, body)
	var e *pdflow.Error
	if assert.ErrorAs(x.t, err, &e) {
		assert.Equal(x.t, 400, e.HTTPStatus())
	}
}

// rightSoon is right, and fails if something holds P's tasks.
func (x *rig) rightSoon() {
	x.t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); x.right(1) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		x.t.Fatal("earlier requests hold P's tasks")
	}
}

// holdsNothing waits until P holds no blocks for anybody, and checks both engines' KV.
func (x *rig) holdsNothing() {
	x.t.Helper()
	require.Eventually(x.t, func() bool { return x.p.Stats().PinnedBlocks == 0 }, 30*time.Second, time.Millisecond)
	assert.NoError(x.t, x.p.CheckKV())
	assert.NoError(x.t, x.d.CheckKV())
}

// slowPrefill makes each prompt of completion take P about two seconds.
func slowPrefill(p, _ *enginesim.Config) { p.PrefillRate = 100 }

// longer is a request whose prompt takes P many times longer to compute than that of completion.
func longer(n, times int) []byte {
	return fmt.Appendf(nil, `{"model":"tiny","prompt":%q,"max_tokens":12,"temperature":0}`,
		strings.Repeat(fmt.Sprintf("%d prompts. ", n), 20*times))
}

// leave sends requests whose clients leave while P computes, and returns when the flow has answered all of them. P
// takes five seconds for each, so that all of them begin before the first one ends.
func (x *rig) leave(clients int) {
	x.t.Helper()
	ctx, leave := context.WithCancel(x.t.Context())
	before := x.d.Stats().Requests
	var wg sync.WaitGroup
	for n := range clients {
		wg.Go(func() {
			_, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: longer(100+n, 2)})
			assert.ErrorIs(x.t, err, pdflow.CodeClientGone)
		})
	}
	require.Eventually(x.t, func() bool {
		return x.d.Stats().Requests == before+int64(clients) && x.p.Stats().Running == clients
	}, 20*time.Second, time.Millisecond)
	time.Sleep(20 * time.Millisecond) // D asks P for its blocks
	leave()
	wg.Wait()
	assert.Equal(x.t, clients, x.p.Stats().Running, "the flow waited for P")
}

// Clients that leave while P computes stop no pair: D is cancelled at once, and P's leg runs to its end, by which P's
// tasks are freed that wait for D's sake. When they were cancelled, too, five such clients held P's four tasks (two of
// num_workers 2 for each request) until P's time limit of 480 s, and every later request of the pair hung.
func TestClientsThatLeaveDoNotStopThePrefillEngine(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"}, slowPrefill)
	x.leave(5)
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	require.NoError(t, x.d.WaitIdle(ctx))
	assert.Equal(t, 5, x.p.Stats().Running, "P's legs run on")
	for _, o := range x.ended() {
		assert.True(t, o.PrefillRuns)
		assert.False(t, o.Orphan)
		assert.Equal(t, x.prefill.ID, o.Prefill.Endpoint)
	}
	x.rightSoon()
	require.NoError(t, x.p.WaitIdle(ctx))
	assert.EqualValues(t, 6, x.p.Stats().Finished)
	x.holdsNothing()
}

// A body that one of the engines refuses may hold a task of P, too. So what both would refuse is refused before P is
// asked.
func TestBodiesThatBothEnginesRefuseAreNotSent(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	for _, bad := range []struct {
		api  connector.API
		body string
	}{
		{connector.APICompletions, `{"prompt":""}`}, {connector.APICompletions, `{"prompt":[]}`},
		{connector.APICompletions, `{"prompt":[""]}`}, {connector.APICompletions, `{"prompt":[[]]}`},
		{connector.APICompletions, `{"prompt":null}`}, {connector.APICompletions, `{"max_tokens":4}`},
		{connector.APIChat, `{"max_tokens":4}`}, {connector.APIChat, `{"messages":[]}`},
		{connector.APIResponses, `{"model":"tiny"}`}, {connector.APIResponses, `{"input":null}`},
		{connector.APIMessages, `{"max_tokens":4}`}, {connector.APIMessages, `{"messages":[],"max_tokens":4}`},
		{connector.APIGenerate, `{"token_ids":[]}`}, {connector.APIGenerate, `{"sampling_params":{}}`},
	} {
		_, err := x.do(bad.api, bad.body)
		assert.ErrorIs(t, err, pdflow.CodeInvalid, "%v %s", bad.api, bad.body)
	}
	assert.Zero(t, x.p.Stats().Requests+x.d.Stats().Requests)
	assert.Empty(t, x.ended())
	x.right(1)
}

// What both engines refuse, here a prompt that is too long, holds a task of P: D's refusal asks P to let go of a prompt
// that P never gets. So the flow gives P another one.
func TestRequestsThatBothEnginesRefuseHoldNothing(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	for range 10 {
		x.refused(tooLong)
	}
	for _, o := range x.ended() {
		assert.False(t, o.Orphan)
	}
	x.rightSoon()
	x.holdsNothing()
}

// The same where P is busy and refuses long after D, when the client has its response: P's leg has run on until then.
func TestRequestsThatPRefusesLateHoldNothing(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegPrefill, Delay: time.Second, Count: 10})
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() { x.refused(tooLong) })
	}
	wg.Wait()
	ranOn := 0
	for _, o := range x.ended() {
		assert.False(t, o.Orphan)
		if o.PrefillRuns {
			ranOn++
		}
	}
	assert.NotZero(t, ranOn) // all of them, unless D is as slow as P
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	require.NoError(t, x.flow.Shutdown(ctx)) // waits for what P is given to let go
	x.holdsNothing()
	assert.EqualValues(t, 10, x.p.Stats().Finished)
}

// What P is given to let go is sent when the host may have other use for the body, and reads nothing of it (-race).
func TestALateRefusalReadsNothingOfTheBody(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegPrefill, Delay: time.Second, Count: 1})
	body := []byte(tooLong)
	_, err := x.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: body})
	require.Error(t, err)
	for begun := time.Now(); time.Since(begun) < 2*time.Second; { // without a lock that would order it
		for i := range body {
			body[i] = 'x'
		}
		time.Sleep(time.Millisecond)
	}
	require.Eventually(t, func() bool { return x.p.Stats().Finished == 1 }, 20*time.Second, time.Millisecond)
}

// A shutdown that cuts legs cuts what P is given to let go, too.
func TestAShutdownWaitsForNoSilentEngine(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Leg: enginesim.LegPrefill, Delay: time.Second, Count: 1})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultStall, Count: -1})
	_, err := x.do(connector.APICompletions, tooLong)
	require.Error(t, err)
	time.Sleep(1500 * time.Millisecond) // P refuses, and gets what it does not answer
	ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer stop()
	begun := time.Now()
	_ = x.flow.Shutdown(ctx)
	assert.Less(t, time.Since(begun), 3*time.Second)
}

// Of a body that D cannot parse P hears nothing, so it gets no other prompt, whose blocks nobody would read.
func TestBodiesThatNoEngineParsesHoldNothing(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "2"})
	for range 10 {
		x.refused(`{"model":"tiny","prompt":"hi","max_tokens":4,"temperature":"warm"}`)
	}
	for _, o := range x.ended() {
		assert.False(t, o.Orphan)
	}
	x.right(1)
	x.holdsNothing()
	assert.EqualValues(t, 1, x.p.Stats().Requests)
}

// A request that both refuse counts as an orphan if P does not take the other prompt.
func TestARequestThatBothEnginesRefuseCounts(t *testing.T) {
	x := newRig(t, nil)
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Count: -1})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Count: -1})
	for n := range 20 {
		_, err := x.do(connector.APICompletions, completion(1))
		require.Error(t, err)
		require.Len(t, x.ended(), n+1)
		if o := x.ended()[n]; !o.PrefillRuns { // else P has refused too late for the outcome
			assert.True(t, o.Orphan)
			return
		}
	}
	t.Fatal("P always refuses late")
}

// With dispatch serial D asks P for what P has, so nothing of P waits for a prefill that does not come: neither when
// clients leave, in which case P's leg is cancelled, nor when P refuses a body.
func TestSerialDispatchHoldsNothing(t *testing.T) {
	x := newRig(t, map[string]string{"num_workers": "1", "dispatch": "serial"},
		func(p, _ *enginesim.Config) { p.PrefillRate = 400 })
	ctx, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for n := range 5 {
		wg.Go(func() {
			_, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: longer(100+n, 30)})
			assert.ErrorIs(t, err, pdflow.CodeClientGone)
		})
	}
	// P would take 20 s for each
	require.Eventually(t, func() bool { return x.p.Stats().Running == 5 }, 15*time.Second, time.Millisecond)
	leave()
	wg.Wait()
	for range 10 {
		_, err := x.do(connector.APICompletions, tooLong)
		require.ErrorIs(t, err, pdflow.CodePrefillRejected)
	}
	require.Eventually(t, func() bool { return x.p.Stats().Running == 0 }, 5*time.Second, time.Millisecond,
		"P was not cancelled")
	assert.Zero(t, x.d.Stats().Requests)
	assert.Zero(t, x.p.Stats().PinnedBlocks)
	for n := range 3 {
		x.right(n)
	}
	for _, o := range x.ended() {
		assert.False(t, o.Orphan || o.PrefillRuns)
	}
	x.holdsNothing()
}
