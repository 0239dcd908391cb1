// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// TestScriptedFaults strike as often as they are told, then the engine serves.
func TestScriptedFaults(t *testing.T) {
	type check func(t *testing.T, a simtest.Response)
	status := func(code int) check {
		return func(t *testing.T, a simtest.Response) { assert.Equal(t, code, a.Status) }
	}
	isReset := func(t *testing.T, a simtest.Response) { assert.ErrorIs(t, a.Err, syscall.ECONNRESET) }
	rows := map[string]struct {
		fault  enginesim.Fault
		stream bool
		check  check
	}{
		"status with header and body": {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 429,
			Header: http.Header{"Retry-After": {"7"}}, Body: `{"busy":true}`}, false,
			func(t *testing.T, a simtest.Response) {
				assert.Equal(t, 429, a.Status)
				assert.Equal(t, "7", a.Header.Get("Retry-After"))
				assert.Equal(t, `{"busy":true}`, a.Body)
			}},
		"status alone": {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 503}, false,
			func(t *testing.T, a simtest.Response) {
				assert.Equal(t, 503, a.Status)
				assert.EqualValues(t, 503, a.Get("error.code").Int())
			}},
		"reset before headers": {enginesim.Fault{Kind: enginesim.FaultReset}, false, isReset},
		"reset in the body":    {enginesim.Fault{Kind: enginesim.FaultResetStream}, false, isReset},
		"reset after headers":  {enginesim.Fault{Kind: enginesim.FaultResetStream}, true, isReset},
		"reset after 3 events": {enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3}, true,
			func(t *testing.T, a simtest.Response) {
				assert.Equal(t, 200, a.Status)
				assert.Error(t, a.Err)
				assert.Len(t, a.Events(), 3)
			}},
		"garbage": {enginesim.Fault{Kind: enginesim.FaultGarbage}, false,
			func(t *testing.T, a simtest.Response) {
				assert.Equal(t, 200, a.Status)
				assert.NotContains(t, a.Body, "{")
			}},
		"redirect": {enginesim.Fault{Kind: enginesim.FaultRedirect, Location: "http://elsewhere.invalid/"}, false,
			func(t *testing.T, a simtest.Response) {
				assert.Equal(t, 307, a.Status)
				assert.Equal(t, "http://elsewhere.invalid/", a.Header.Get("Location"))
			}},
		"oversize": {enginesim.Fault{Kind: enginesim.FaultOversize, Size: 3 << 20}, false,
			func(t *testing.T, a simtest.Response) {
				assert.Len(t, a.Body, 3<<20)
				assert.True(t, a.Get("id").Exists())
			}},
		// Nothing is loaded here.
		"load failure": {enginesim.Fault{Kind: enginesim.FaultLoadFailure}, false, status(200)},
		"delay": {enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 20 * time.Millisecond}, false,
			status(200)},
		"path that does not match": {enginesim.Fault{Kind: enginesim.FaultReset, Path: simtest.Chat}, false,
			status(200)},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.With(simtest.Completion("x"), simtest.Obj{"stream": row.stream})
			row.fault.Count = 2
			s.O.Inject(row.fault)
			for range 2 {
				row.check(t, s.Ask(s.O, body))
			}
			s.Alive(s.O)
			if chat := simtest.Request(simtest.Chat, "x", 4); strings.HasPrefix(name, "path") {
				assert.Error(t, s.Ask(s.O, chat).Err)
				s.O.ClearFaults()
				assert.NoError(t, s.Ask(s.O, chat).Err)
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
			t.Parallel()
			s := simtest.New(t)
			s.O.Inject(row.fault)
			ctx, stop := context.WithTimeout(t.Context(), 3*time.Second) // for a busy machine, too
			defer stop()
			a := s.Post(ctx, s.O, simtest.Completions, simtest.With(simtest.Completion("x"),
				simtest.Obj{"stream": row.stream}))
			assert.ErrorIs(t, a.Err, context.DeadlineExceeded)
			assert.Len(t, a.Events(), row.events)
			require.NoError(t, s.O.WaitIdle(t.Context()))
			assert.Zero(t, s.O.Stats().UsedBlocks)
			s.Alive(s.O)
		})
	}
}

// TestFaultsStrikeOneLeg: a fault for decode leaves prefill alone.
func TestFaultsStrikeOneLeg(t *testing.T) {
	s := simtest.New(t)
	s.D.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegDecode})
	s.P.Inject(enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Leg: enginesim.LegPrefill,
		Mutate: func(h map[string]any) { delete(h, "remote_host") }})
	body := simtest.Completion("x")
	assert.Equal(t, 200, s.Ask(s.D, body).Status, "no leg of a pair")
	h := s.Prefill(body)
	assert.NotContains(t, h, "remote_host")
	assert.Len(t, h, 13)
	h = s.Prefill(body)
	assert.Len(t, h, 14)
	assert.Equal(t, 500, s.Decode(body, h).Status)
	assert.Equal(t, 200, s.Decode(body, h).Status)
}

// TestScriptedLoadFailure is a 500 before any token, or an error event.
func TestScriptedLoadFailure(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	s.D.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Count: 2})
	a := s.Decode(body, s.Prefill(body))
	assert.Equal(t, 500, a.Status)
	assert.Equal(t, 8, s.P.Stats().PinnedBlocks, "P's blocks stay until the lease ends, as in recording 57")
	assert.Equal(t, simtest.InternalError, a.Get("error.message").String())
	a = s.Decode(simtest.Streamed(body), s.Prefill(body))
	assert.Equal(t, 200, a.Status)
	events := a.Events()
	require.Len(t, events, 2)
	assert.Contains(t, events[0], simtest.InternalError)
	assert.Equal(t, "[DONE]", events[1])
}

// TestHungTransfer is one of a pair: D waits for its KV until the client leaves, and serves all else.
func TestHungTransfer(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	s.D.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: "another",
		Count: -1})
	s.Right(body, s.Decode(body, s.Prefill(body)))
	s.D.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: s.P.EngineID(),
		Count: -1})
	body = simtest.Completion("y")
	handoff := s.Prefill(body)
	leave := s.Waits(simtest.Leg(body, handoff))
	assert.Positive(t, s.D.Stats().UsedBlocks, "its blocks are there")
	s.Alive(s.D)
	assert.Equal(t, 200, s.Ask(s.D, simtest.Completion("z")).Status)
	leave()
	require.NoError(t, s.D.WaitIdle(t.Context()))
	assert.Zero(t, s.D.Stats().UsedBlocks)
	assert.Equal(t, 8, s.P.Stats().PinnedBlocks, "P keeps its own until the lease ends")
	s.D.ClearFaults()
	s.Right(body, s.Decode(body, s.Prefill(body)))
}

// TestRefusedPortOpensAgain with the engine's memory untouched.
func TestRefusedPortOpensAgain(t *testing.T) {
	s := simtest.New(t, simtest.OwnPorts(t))
	body := simtest.Completion("x")
	h := s.Prefill(body)
	s.D.Inject(enginesim.Fault{Kind: enginesim.FaultRefuse})
	for range 2 {
		assert.ErrorIs(t, s.Decode(body, h).Err, syscall.ECONNREFUSED)
	}
	s.D.ClearFaults()
	s.Right(body, s.Decode(body, h))
	s.Clean()
}

// TestKilledWhileStreaming ends in the middle of the body, without [DONE] (docs/protocols/nixl.md, recording 55).
func TestKilledWhileStreaming(t *testing.T) {
	for _, path := range []string{simtest.Completions, simtest.Chat, "/v1/responses", "/v1/messages",
		"/inference/v1/generate"} {
		t.Run(path, func(t *testing.T) {
			s := simtest.New(t, simtest.OwnPorts(t))
			s.O.Inject(enginesim.Fault{Kind: enginesim.FaultKill, AfterChunks: 5})
			a := s.Post(t.Context(), s.O, path, simtest.Streamed(simtest.Request(path, "x", 24)))
			assert.Equal(t, 200, a.Status)
			assert.Error(t, a.Err)
			assert.Len(t, a.Events(), 5)
			assert.NotContains(t, a.Body, "[DONE]")
			s.Dies(s.O)
		})
	}
}

// TestScriptedTerminationAndDeath end a stream each in its own way.
func TestScriptedTerminationAndDeath(t *testing.T) {
	for _, stream := range []bool{true, false} {
		ask := func(s *simtest.Scene, kind enginesim.FaultKind) simtest.Response {
			s.O.Inject(enginesim.Fault{Kind: kind, AfterChunks: 5})
			a := s.Ask(s.O, simtest.With(simtest.Completion("x"), simtest.Obj{"stream": stream, "max_tokens": 1500}))
			require.NoError(t, a.Err)
			if stream {
				assert.Equal(t, 200, a.Status)
				assert.Equal(t, "[DONE]", a.Events()[len(a.Events())-1])
				assert.Len(t, a.Events(), 7)
			}
			s.Dies(s.O)
			return a
		}
		a := ask(simtest.New(t, simtest.OwnPorts(t)), enginesim.FaultTerminate)
		assert.Contains(t, a.Body, `"finish_reason":"abort"`)
		assert.Equal(t, 200, a.Status)
		a = ask(simtest.New(t, simtest.OwnPorts(t)), enginesim.FaultDeath)
		assert.Contains(t, a.Body, simtest.EngineError)
		if !stream {
			assert.Equal(t, 500, a.Status)
		}
	}
}

// TestKilledInPlaceOfAResponse breaks the connection and closes the port.
func TestKilledInPlaceOfAResponse(t *testing.T) {
	s := simtest.New(t, simtest.OwnPorts(t))
	s.P.Inject(enginesim.Fault{Kind: enginesim.FaultKill})
	assert.Error(t, s.Ask(s.P, simtest.Completion("x")).Err)
	s.Dies(s.P)
	require.NoError(t, s.P.Restart())
	s.HTTP.CloseIdleConnections() // those of the life before
	s.Alive(s.P)
}

// TestTerminatedWhileStreaming ends with finish_reason abort and [DONE] within the 200 (docs/protocols/nixl.md,
// recording 55b).
func TestTerminatedWhileStreaming(t *testing.T) {
	s := simtest.New(t, func(p, _ *enginesim.Config) { p.ITL = 10 * time.Millisecond }, simtest.OwnPorts(t))
	got := s.AskLater(s.P, simtest.With(simtest.Completion("x"), simtest.Obj{"stream": true, "max_tokens": 1500}))
	simtest.WaitFor(t, "tokens", func() bool { return s.P.Stats().GenerationTokens > 3 })
	s.P.Terminate()
	a := <-got
	require.NoError(t, a.Err)
	events := a.Events()
	assert.Equal(t, "[DONE]", events[len(events)-1])
	want := readFile(t, "testdata/55b-last-event.json")
	compare(t, "last event", want, events[len(events)-2])
	s.Dies(s.P)
	assert.Zero(t, s.P.Stats().UsedBlocks)
}

// TestTerminateAnswersWhatRuns, whatever hangs; it thaws a frozen engine first, which held the response up.
func TestTerminateAnswersWhatRuns(t *testing.T) {
	for name, itl := range map[string]time.Duration{"between two tokens": time.Hour, "frozen": 10 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			s := simtest.New(t, func(p, _ *enginesim.Config) { p.ITL = itl })
			got := s.AskLater(s.P, simtest.With(simtest.Completion("x"), simtest.Obj{"max_tokens": 1500}))
			simtest.WaitFor(t, "tokens", func() bool { return s.P.Stats().GenerationTokens > 0 })
			if name == "frozen" {
				s.P.Freeze()
				time.Sleep(50 * time.Millisecond) // it waits before the next token
			}
			s.P.Terminate()
			a := <-got
			assert.Equal(t, 200, a.Status)
			assert.Equal(t, "abort", a.Get("choices.0.finish_reason").String())
			assert.EqualValues(t, 1, s.P.Stats().Aborted)
		})
	}
}

// TestFrozenEngine keeps connections, answers nothing, and goes on when thawed.
func TestFrozenEngine(t *testing.T) {
	s := simtest.New(t)
	body := simtest.Completion("x")
	s.O.Freeze()
	ctx, stop := context.WithTimeout(t.Context(), 80*time.Millisecond)
	defer stop()
	assert.ErrorIs(t, s.Post(ctx, s.O, simtest.Completions, body).Err, context.DeadlineExceeded)
	got := s.AskLater(s.O, body)
	select {
	case <-got:
		assert.Fail(t, "a frozen engine answered")
	case <-time.After(50 * time.Millisecond):
	}
	s.O.Thaw()
	assert.Equal(t, 200, (<-got).Status)
	s.O.Freeze() // Close must not mind
}

// TestLeaseOfAFrozenEngine ends when it thaws, not before.
func TestLeaseOfAFrozenEngine(t *testing.T) {
	s := simtest.New(t, func(p, _ *enginesim.Config) { p.Lease = 1500 * time.Millisecond })
	s.Prefill(simtest.Completion("x"))
	s.P.Freeze()
	time.Sleep(1600 * time.Millisecond)
	assert.Equal(t, 8, s.P.Stats().PinnedBlocks)
	s.P.Thaw()
	simtest.WaitFor(t, "expiry", func() bool { return s.P.Stats().Expired == 1 })
}

// A port that another program has taken while the engine was dead is waited for.
func TestRestartWaitsForThePort(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	e, err := enginesim.Start(enginesim.Config{Listen: "127.0.0.1:" + port})
	require.NoError(t, err)
	defer e.Close()
	for name, again := range map[string]func() error{
		"restart": e.Restart, "a port opened again": func() error { e.ClearFaults(); return nil },
	} {
		if name == "restart" {
			e.Kill()
		} else {
			e.Inject(enginesim.Fault{Kind: enginesim.FaultRefuse})
		}
		other, err := net.Listen("tcp", strings.TrimPrefix(e.URL(), "http://"))
		require.NoError(t, err, name)
		time.AfterFunc(50*time.Millisecond, func() { _ = other.Close() })
		require.NoError(t, again(), name)
		resp, err := http.Get(e.URL() + "/health")
		require.NoError(t, err, name)
		require.NoError(t, resp.Body.Close())
	}
}

// TestRestartForgets blocks, caches and counters, and keeps address, faults and requests.
func TestRestartForgets(t *testing.T) {
	s := simtest.New(t, simtest.OwnPorts(t))
	body := simtest.Completion("x")
	s.Prefill(body)
	s.P.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 418})
	s.P.Kill()
	assert.True(t, s.P.Dead())
	require.NoError(t, s.P.Restart())
	s.HTTP.CloseIdleConnections() // those of the life before
	assert.False(t, s.P.Dead())
	assert.Equal(t, enginesim.Stats{}, s.P.Stats())
	assert.NoError(t, s.P.CheckKV())
	assert.Equal(t, 418, s.Ask(s.P, body).Status)
	assert.Len(t, s.P.Requests(), 2)
	a := s.Ask(s.P, body)
	assert.Zero(t, a.Get("usage.prompt_tokens_details.cached_tokens").Int())
}

func readFile(t *testing.T, name string) string {
	data, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(data)
}

// A test's message names the kind, not its number.
func TestEachKindOfFaultHasAName(t *testing.T) {
	seen := map[string]bool{}
	for k := enginesim.FaultStatus; k <= enginesim.FaultCorruptKV; k++ {
		assert.Regexp(t, `^[A-Z][A-Za-z]+$`, k.String())
		seen[k.String()] = true
	}
	assert.Len(t, seen, int(enginesim.FaultCorruptKV))
	assert.Equal(t, "ResetStream", enginesim.FaultResetStream.String())
	assert.Equal(t, "FaultKind(99)", enginesim.FaultKind(99).String())
}

// TestAnEndingThatIsAFailure ends a response so in each API, whole and streamed, at each place.
func TestAnEndingThatIsAFailure(t *testing.T) {
	for path, says := range map[string][2]string{ // by default, and named
		"/v1/completions":        {`"finish_reason":"abort"`, `"finish_reason":"error"`},
		"/v1/chat/completions":   {`"finish_reason":"abort"`, `"finish_reason":"error"`},
		"/inference/v1/generate": {`"finish_reason":"abort"`, `"finish_reason":"error"`},
		"/v1/messages":           {`"stop_reason":null`, `"stop_reason":"error"`},
		"/v1/responses":          {`"status":"cancelled"`, `"status":"error"`},
	} {
		s := simtest.New(t)
		for _, stream := range []bool{true, false} {
			for _, after := range []int{0, 3, 24, 100} {
				for i, ending := range []string{"", "error"} {
					s.O.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, AfterChunks: after, Ending: ending})
					body := simtest.Request(path, "x", 24)
					if stream {
						body = simtest.Streamed(body)
					}
					a := s.Post(t.Context(), s.O, path, body)
					require.NoError(t, a.Err)
					assert.Equal(t, 200, a.Status)
					switch {
					case path == "/v1/messages" && !stream && ending == "": // as vLLM leaves it out
						assert.NotContains(t, a.Body, "stop_reason")
					default:
						assert.Contains(t, a.Body, says[i], "%s after %d", path, after)
					}
				}
			}
		}
	}
	s := simtest.New(t)
	s.P.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, Leg: enginesim.LegPrefill})
	assert.Empty(t, s.Prefill(simtest.Completion("x")), "there is no handoff")
}
