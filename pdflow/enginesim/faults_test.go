// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// TestScriptedFaults strike as often as they are told, then the engine serves.
func TestScriptedFaults(t *testing.T) {
	type check func(t *testing.T, a answer)
	status := func(code int) check {
		return func(t *testing.T, a answer) { assert.Equal(t, code, a.status) }
	}
	isReset := func(t *testing.T, a answer) { assert.ErrorIs(t, a.err, syscall.ECONNRESET) }
	rows := map[string]struct {
		fault  enginesim.Fault
		stream bool
		check  check
	}{
		"status with header and body": {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 429, Header: http.Header{"Retry-After": {"7"}}, Body: `{"busy":true}`}, false,
			func(t *testing.T, a answer) {
				assert.Equal(t, 429, a.status)
				assert.Equal(t, "7", a.header.Get("Retry-After"))
				assert.Equal(t, `{"busy":true}`, a.body)
			}},
		"status alone": {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 503}, false,
			func(t *testing.T, a answer) {
				assert.Equal(t, 503, a.status)
				assert.EqualValues(t, 503, a.get("error.code").Int())
			}},
		"reset before headers": {enginesim.Fault{Kind: enginesim.FaultReset}, false, isReset},
		"reset in the body":    {enginesim.Fault{Kind: enginesim.FaultResetStream}, false, isReset},
		"reset after headers":  {enginesim.Fault{Kind: enginesim.FaultResetStream}, true, isReset},
		"reset after 3 events": {enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3}, true,
			func(t *testing.T, a answer) {
				assert.Equal(t, 200, a.status)
				assert.Error(t, a.err)
				assert.Len(t, a.events(), 3)
			}},
		"garbage": {enginesim.Fault{Kind: enginesim.FaultGarbage}, false,
			func(t *testing.T, a answer) {
				assert.Equal(t, 200, a.status)
				assert.NotContains(t, a.body, "{")
			}},
		"redirect": {enginesim.Fault{Kind: enginesim.FaultRedirect, Location: "http://elsewhere.invalid/"}, false,
			func(t *testing.T, a answer) {
				assert.Equal(t, 307, a.status)
				assert.Equal(t, "http://elsewhere.invalid/", a.header.Get("Location"))
			}},
		"oversize": {enginesim.Fault{Kind: enginesim.FaultOversize, Size: 3 << 20}, false,
			func(t *testing.T, a answer) {
				assert.Len(t, a.body, 3<<20)
				assert.True(t, a.get("id").Exists())
			}},
		"load failure":             {enginesim.Fault{Kind: enginesim.FaultLoadFailure}, false, status(200)}, // nothing is loaded here
		"delay":                    {enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 20 * time.Millisecond}, false, status(200)},
		"path that does not match": {enginesim.Fault{Kind: enginesim.FaultReset, Path: chat}, false, status(200)},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			body := with(completion("x"), obj{"stream": row.stream})
			row.fault.Count = 2
			s.o.Inject(row.fault)
			for range 2 {
				row.check(t, s.post(t.Context(), s.o, completions, body))
			}
			s.alive(s.o)
			if strings.HasPrefix(name, "path") {
				assert.Error(t, s.post(t.Context(), s.o, chat, obj{"messages": []obj{{"role": "user", "content": "x"}}}).err)
				s.o.ClearFaults()
				assert.NoError(t, s.post(t.Context(), s.o, chat, obj{"messages": []obj{{"role": "user", "content": "x"}}}).err)
			}
		})
	}
}

// TestScriptedStalls last until the client leaves, and hold no blocks after.
func TestScriptedStalls(t *testing.T) {
	rows := map[string]struct {
		fault  enginesim.Fault
		stream bool
		events int
	}{
		"before headers": {enginesim.Fault{Kind: enginesim.FaultStall}, false, 0},
		"in the body":    {enginesim.Fault{Kind: enginesim.FaultStallStream}, false, 0},
		"after headers":  {enginesim.Fault{Kind: enginesim.FaultStallStream}, true, 0},
		"after 4 events": {enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 4}, true, 4},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.o.Inject(row.fault)
			ctx, stop := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer stop()
			a := s.post(ctx, s.o, completions, with(completion("x"), obj{"stream": row.stream}))
			assert.ErrorIs(t, a.err, context.DeadlineExceeded)
			assert.Len(t, a.events(), row.events)
			require.NoError(t, s.o.WaitIdle(t.Context()))
			assert.Zero(t, s.o.Stats().UsedBlocks)
			s.alive(s.o)
		})
	}
}

// TestFaultsStrikeOneLeg: a fault for decode leaves prefill alone.
func TestFaultsStrikeOneLeg(t *testing.T) {
	s := newScene(t)
	s.d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegDecode})
	s.p.Inject(enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Leg: enginesim.LegPrefill, Mutate: func(h map[string]any) { delete(h, "remote_host") }})
	body := completion("x")
	assert.Equal(t, 200, s.post(t.Context(), s.d, completions, body).status, "no leg of a pair")
	h := s.prefill(completions, body)
	assert.NotContains(t, h, "remote_host")
	assert.Len(t, h, 13)
	h = s.prefill(completions, body)
	assert.Len(t, h, 14)
	assert.Equal(t, 500, s.decode(completions, body, h).status)
	assert.Equal(t, 200, s.decode(completions, body, h).status)
}

// TestScriptedLoadFailure is a 500 before any token, or an error event.
func TestScriptedLoadFailure(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	s.d.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Count: 2})
	a := s.decode(completions, body, s.prefill(completions, body))
	assert.Equal(t, 500, a.status)
	assert.Equal(t, 8, s.p.Stats().PinnedBlocks, "P's blocks stay until the lease ends (capture 57)")
	assert.Equal(t, internalError, a.get("error.message").String())
	a = s.decode(completions, with(body, obj{"stream": true}), s.prefill(completions, body))
	assert.Equal(t, 200, a.status)
	events := a.events()
	require.Len(t, events, 2)
	assert.Contains(t, events[0], internalError)
	assert.Equal(t, "[DONE]", events[1])
}

// TestRefusedPortOpensAgain with the engine's memory untouched.
func TestRefusedPortOpensAgain(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	h := s.prefill(completions, body)
	s.d.Inject(enginesim.Fault{Kind: enginesim.FaultRefuse})
	for range 2 {
		assert.ErrorIs(t, s.decode(completions, body, h).err, syscall.ECONNREFUSED)
	}
	s.d.ClearFaults()
	assert.Equal(t, s.alone(completions, body), s.decode(completions, body, h).text())
	assert.NoError(t, s.p.CheckKV())
}

// TestKilledWhileStreaming ends amid the body, without [DONE] (capture 55).
func TestKilledWhileStreaming(t *testing.T) {
	for _, path := range []string{completions, chat, "/v1/responses", "/v1/messages", "/inference/v1/generate"} {
		t.Run(path, func(t *testing.T) {
			s := newScene(t)
			s.o.Inject(enginesim.Fault{Kind: enginesim.FaultKill, AfterChunks: 5})
			a := s.post(t.Context(), s.o, path, with(request(path, "x", 24), obj{"stream": true}))
			assert.Equal(t, 200, a.status)
			assert.Error(t, a.err)
			assert.Len(t, a.events(), 5)
			assert.NotContains(t, a.body, "[DONE]")
			s.dies(s.o)
		})
	}
}

// TestScriptedTerminationAndDeath end a stream each in its own way.
func TestScriptedTerminationAndDeath(t *testing.T) {
	for _, stream := range []bool{true, false} {
		ask := func(s *scene, kind enginesim.FaultKind) answer {
			s.o.Inject(enginesim.Fault{Kind: kind, AfterChunks: 5})
			a := s.post(t.Context(), s.o, completions, with(completion("x"), obj{"stream": stream, "max_tokens": 1500}))
			require.NoError(t, a.err)
			if stream {
				assert.Equal(t, 200, a.status)
				assert.Equal(t, "[DONE]", a.events()[len(a.events())-1])
				assert.Len(t, a.events(), 7)
			}
			s.dies(s.o)
			return a
		}
		a := ask(newScene(t), enginesim.FaultTerminate)
		assert.Contains(t, a.body, `"finish_reason":"abort"`)
		assert.Equal(t, 200, a.status)
		a = ask(newScene(t), enginesim.FaultDeath)
		assert.Contains(t, a.body, engineError)
		if !stream {
			assert.Equal(t, 500, a.status)
		}
	}
}

// TestKilledInPlaceOfAnAnswer breaks the connection and closes the port.
func TestKilledInPlaceOfAnAnswer(t *testing.T) {
	s := newScene(t)
	s.p.Inject(enginesim.Fault{Kind: enginesim.FaultKill})
	assert.Error(t, s.post(t.Context(), s.p, completions, completion("x")).err)
	s.dies(s.p)
	require.NoError(t, s.p.Restart())
	s.http.CloseIdleConnections() // those of the life before
	s.alive(s.p)
}

// TestTerminatedWhileStreaming ends with finish_reason abort and [DONE] within
// the 200 (capture 55b).
func TestTerminatedWhileStreaming(t *testing.T) {
	s := newScene(t, func(p, _ *enginesim.Config) { p.ITL = time.Millisecond })
	got := make(chan answer)
	go func() {
		got <- s.post(t.Context(), s.p, completions, with(completion("x"), obj{"stream": true, "max_tokens": 1500}))
	}()
	waitFor(t, "tokens", func() bool { return s.p.Stats().GenerationTokens > 3 })
	s.p.Terminate()
	a := <-got
	require.NoError(t, a.err)
	events := a.events()
	assert.Equal(t, "[DONE]", events[len(events)-1])
	want := readFile(t, "testdata/55b-last-event.json")
	compare(t, "last event", want, events[len(events)-2])
	s.dies(s.p)
	assert.Zero(t, s.p.Stats().UsedBlocks)
}

// TestTerminateAnswersWhatRuns, streamed or not, and whatever hangs.
func TestTerminateAnswersWhatRuns(t *testing.T) {
	s := newScene(t, func(p, _ *enginesim.Config) { p.ITL = time.Hour })
	got := make(chan answer)
	go func() { got <- s.post(t.Context(), s.p, completions, completion("x")) }()
	waitFor(t, "tokens", func() bool { return s.p.Stats().GenerationTokens > 0 })
	s.p.Terminate()
	a := <-got
	assert.Equal(t, 200, a.status)
	assert.Equal(t, "abort", a.get("choices.0.finish_reason").String())
	assert.EqualValues(t, 1, s.p.Stats().Aborted)
}

// TestTerminateThawsFirst: what a frozen engine held up is answered too.
func TestTerminateThawsFirst(t *testing.T) {
	s := newScene(t, func(p, _ *enginesim.Config) { p.ITL = time.Millisecond })
	got := make(chan answer)
	go func() { got <- s.post(t.Context(), s.p, completions, with(completion("x"), obj{"max_tokens": 1500})) }()
	waitFor(t, "tokens", func() bool { return s.p.Stats().GenerationTokens > 0 })
	s.p.Freeze()
	time.Sleep(5 * time.Millisecond)
	s.p.Terminate()
	a := <-got
	assert.Equal(t, 200, a.status)
	assert.Equal(t, "abort", a.get("choices.0.finish_reason").String())
}

// TestFrozenEngine keeps connections, answers nothing, and goes on when thawed.
func TestFrozenEngine(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	s.o.Freeze()
	ctx, stop := context.WithTimeout(t.Context(), 80*time.Millisecond)
	defer stop()
	assert.ErrorIs(t, s.post(ctx, s.o, completions, body).err, context.DeadlineExceeded)
	got := make(chan answer)
	go func() { got <- s.post(t.Context(), s.o, completions, body) }()
	select {
	case <-got:
		assert.Fail(t, "a frozen engine answered")
	case <-time.After(50 * time.Millisecond):
	}
	s.o.Thaw()
	assert.Equal(t, 200, (<-got).status)
	s.o.Freeze() // Close must not mind
}

// TestLeaseOfAFrozenEngine ends when it thaws, not before.
func TestLeaseOfAFrozenEngine(t *testing.T) {
	s := newScene(t, func(p, _ *enginesim.Config) { p.Lease = 300 * time.Millisecond })
	s.prefill(completions, completion("x"))
	s.p.Freeze()
	time.Sleep(400 * time.Millisecond)
	assert.Equal(t, 8, s.p.Stats().PinnedBlocks)
	s.p.Thaw()
	waitFor(t, "expiry", func() bool { return s.p.Stats().Expired == 1 })
}

// TestRestartForgets blocks, caches and counters, and keeps address, faults and
// requests.
func TestRestartForgets(t *testing.T) {
	s := newScene(t)
	body := completion("x")
	s.prefill(completions, body)
	s.p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 418})
	s.p.Kill()
	assert.True(t, s.p.Dead())
	require.NoError(t, s.p.Restart())
	s.http.CloseIdleConnections() // those of the life before
	assert.False(t, s.p.Dead())
	assert.Equal(t, enginesim.Stats{}, s.p.Stats())
	assert.NoError(t, s.p.CheckKV())
	assert.Equal(t, 418, s.post(t.Context(), s.p, completions, body).status)
	assert.Len(t, s.p.Requests(), 2)
	a := s.post(t.Context(), s.p, completions, body)
	assert.Zero(t, a.get("usage.prompt_tokens_details.cached_tokens").Int())
}
