// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// transferLimit is Timeouts.Transfer of these tests.
const transferLimit = 3 * time.Second

// heads answers with the head of a stream, and no event of it.
func heads(r *http.Request) (*http.Response, error) {
	out, in := io.Pipe()
	context.AfterFunc(r.Context(), func() { _ = in.CloseWithError(r.Context().Err()) })
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
		ContentLength: -1, Body: out}, nil
}

// A transfer that never ends is found transferLimit after prefill's response, not after Timeouts.Decode. It is the
// pair's fault, and nothing has reached the client: so another pair is tried, with a new prefill, and never the same.
func TestATransferThatNeverEndsIsTriedAtAnotherPair(t *testing.T) {
	serial := &fake{order: connector.PrefillThenDecode}
	two := config.Retry{MaxAttempts: 2}
	for name, c := range map[string]struct {
		conn    connector.KVConnector
		engines string
		retry   config.Retry
		answers map[string]response
		body    string
		want    string // legs, then code, then the reason of each failed attempt
		took    time.Duration
	}{
		"another pair is there": {serial, "p0 p1 d0 d1", two, map[string]response{"d0": hangs}, "",
			"p0,d0,p1,d1; timeout", transferLimit},
		"D has sent its head": {serial, "p0 p1 d0 d1", two, map[string]response{"d0": heads}, "",
			"p0,d0,p1,d1; timeout", transferLimit},
		"another D": {serial, "p0 d0 d1", two, map[string]response{"d0": hangs}, "",
			"p0,d0,p0,d1; timeout", transferLimit},
		"another P": {serial, "p0 p1 d0", two, map[string]response{"d0": hangs}, "",
			"p0,d0,p1,d0 timeout; timeout, attempts", 2 * transferLimit},
		"no other pair": {serial, "p0 d0", two, map[string]response{"d0": hangs}, "",
			"p0,d0 timeout; no_pair", transferLimit},
		"final by policy": {serial, "p0 p1 d0 d1", config.Retry{MaxAttempts: 2, TimeoutFinal: true},
			map[string]response{"d0": hangs}, "",
			"p0,d0 timeout; timeout", transferLimit},
		"counted from P's last byte": {serial, "p0 p1 d0 d1", two,
			map[string]response{"p0": after(5*time.Second, replies(200)), "d0": hangs}, "",
			"p0,d0,p1,d1; timeout", 5*time.Second + transferLimit},
		"both legs together, P has answered": {&fake{order: connector.Together}, "p0 p1 d0 d1", two,
			map[string]response{"p0": after(5*time.Second, replies(200)), "d0": hangs}, "",
			"d0,d1,p0,p1; timeout", 5*time.Second + transferLimit},
		"D sends its first event in time": {serial, "p0 p1 d0 d1", two,
			map[string]response{"d0": after(transferLimit-time.Millisecond, replies(200))}, "",
			"p0,d0; ", transferLimit - time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeFleet(t, c.conn, c.engines, c.retry, func(host string, _ int) response {
					if answer := c.answers[host]; answer != nil {
						return answer
					}
					return replies(200)
				}, pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit, Decode: time.Hour}))
				began := time.Now()
				err := f.do(`{"prompt":"hi","stream":true}`)
				require.InDelta(t, c.took, time.Since(began), float64(100*time.Millisecond), "with a pause of 50 ms")
				legs := strings.Fields(f.hosts())
				if c.conn.Traits().Order == connector.Together {
					slices.Sort(legs)
				}
				got := strings.Join(legs, ",")
				if err != nil {
					got += " " + string(codeOf(err))
				}
				var reasons []string
				for _, o := range f.seen.list() {
					if e := o.Err; e != nil {
						reasons = append(reasons, o.Retry)
						require.Equal(t, "transfer", e.Phase)
						require.Equal(t, pdflow.LegDecode, e.Leg)
						require.False(t, o.Orphan, "P has given what D waits for")
						require.True(t, e.EngineFault())
					}
				}
				require.Equal(t, c.want, got+"; "+strings.Join(reasons, ", "))
			})
		})
	}
}

// A response that is no stream has its first byte when its last token is made. So a synthetic probe of the pair tells,
// when the time is over, whether D may be at work: then it has the rest of Timeouts.Decode.
func TestAPairIsProbedWhereALongResponseIsNoStream(t *testing.T) {
	for name, c := range map[string]struct {
		hangs bool     // the pair, whatever it is asked
		long  response // d0's to the client
		want  string   // legs, then code and phase
		took  time.Duration
	}{
		"the pair is well": {false, after(time.Minute, replies(200)), "p0 d0 p0 d0", time.Minute},
		"the pair hangs":   {true, hangs, "p0 d0 p0 d0 p1 d1", 2 * transferLimit},
		"the pair is well, and the response never comes": {false, hangs,
			"p0 d0 p0 d0; timeout send", 2 * time.Minute},
		"it is in time": {true, after(transferLimit/2, replies(200)), "p0 d0", transferLimit / 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFakeFleet(t, &fake{}, "p0 p1 d0 d1", config.Retry{MaxAttempts: 2},
					func(host string, nth int) response {
						switch {
						case host == "d0" && nth == 1:
							return c.long
						case host == "d0" && c.hangs:
							return hangs
						}
						return replies(200)
					}, pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit, Decode: 2 * time.Minute}))
				began := time.Now()
				err := f.do(`{"prompt":"hi"}`)
				require.InDelta(t, c.took, time.Since(began), float64(100*time.Millisecond), "with a pause of 50 ms")
				got := f.hosts()
				if err != nil {
					got += "; " + string(codeOf(err))
					if e, ok := errors.AsType[*pdflow.Error](err); ok {
						got += " " + e.Phase
					}
				}
				require.Equal(t, c.want, got)
			})
		})
	}
}

// With fallback: decode, a decode engine serves alone what no pair could transfer.
func TestATransferThatNeverEndsFallsBackToDecodeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0 d1", config.Retry{MaxAttempts: 1}, func(host string, _ int) response {
			if host == "d0" {
				return hangs
			}
			return replies(200)
		}, pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit}), pdflow.WithFallback(config.FallbackDecode))
		require.NoError(t, f.do(`{"prompt":"hi","stream":true}`))
		require.Equal(t, "p0 d0 d1", f.hosts())
	})
}

// A client that leaves while its pair is probed says nothing of the pair to others who wait for the same probe.
func TestAClientThatLeavesItsProbeSaysNothingOfThePair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 1}, func(host string, _ int) response {
			if host == "d0" {
				return hangs
			}
			return replies(200)
		}, pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit, Decode: time.Hour}))
		began := time.Now()
		ask := func(ctx context.Context) <-chan error {
			ended := make(chan error, 1)
			go func() {
				_, err := f.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
					Body: []byte(`{"prompt":"hi"}`)})
				ended <- err
			}()
			return ended
		}
		ctx, leave := context.WithCancel(t.Context())
		first := ask(ctx)
		time.Sleep(time.Millisecond) // the first one's watch begins the probe
		second := ask(t.Context())
		time.Sleep(transferLimit + time.Second)
		leave()
		require.ErrorIs(t, <-first, pdflow.CodeClientGone)
		require.ErrorIs(t, <-second, pdflow.CodeTimeout)
		require.InDelta(t, 2*transferLimit+time.Second, time.Since(began), float64(100*time.Millisecond),
			"a probe of its own, not Timeouts.Decode")
	})
}

// Engines may want a key (vLLM's --api-key): a probe has that of the client for whom it is sent.
func TestAProbeOfAPairHasItsClientsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ids []string
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 1}, func(host string, nth int) response {
			return func(r *http.Request) (*http.Response, error) {
				ids = append(ids, r.Header.Get("X-Request-Id"))
				switch {
				case r.Header.Get("Authorization") != "Bearer key":
					return replies(http.StatusUnauthorized)(r)
				case host == "d0":
					return hangs(r)
				}
				return replies(200)(r)
			}
		}, pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit, Decode: time.Hour}))
		began := time.Now()
		_, err := f.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`),
			Header: http.Header{"Authorization": {"Bearer key"}, "X-Request-Id": {"mine"}}})
		require.ErrorIs(t, err, pdflow.CodeTimeout)
		require.InDelta(t, 2*transferLimit, time.Since(began), float64(100*time.Millisecond), "the probe hung, too")
		require.Equal(t, []string{"mine", "mine"}, ids[:2])
		require.NotContains(t, ids[2:], "mine", "a probe is a request of its own")
	})
}

// A stream that is rescued knows at which pair its request ran out of time before, and does not go there again.
func TestARescueKeepsAwayFromThePairThatHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pairs, picks, count := [][2]string{{"p0", "d0"}, {"p0", "d1"}, {"p0", "d0"}}, 0, &book{}
		f := newFakeFleetOf(t, func(context.Context, pdflow.Picker, *pdflow.PickInput) (pdflow.Pick, error) {
			pair := pairs[picks]
			picks++
			return pdflow.Pick{Prefill: named(t, pair[0]), Decode: named(t, pair[1])}, nil
		}, &fake{}, "p0 d0 d1", config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond},
			func(host string, _ int) response {
				switch host {
				case "d0":
					return hangs
				case "d1":
					return streaming(time.Second, io.ErrUnexpectedEOF, token(10, "null", "[1,2,3]"),
						token(11, "null", "null"))
				}
				return replies(200)
			}, pdflow.WithRescue(1), metered(count),
			pdflow.WithTimeouts(config.Timeouts{Transfer: transferLimit, Decode: time.Hour}))
		began := time.Now()
		require.Error(t, f.do(completion("a", `"stream":true`)))
		require.Equal(t, "p0 d0 p0 d1", f.hosts())
		require.InDelta(t, transferLimit+time.Second, time.Since(began), float64(100*time.Millisecond))
		require.Equal(t, []string{"failed timeout"}, count.rescues())
	})
}

// What a connector cannot carry with a pair is served by one engine, and the pair's attempt is not the last one.
func TestAPairThatCannotCarryARequestIsNotItsLastAttempt(t *testing.T) {
	cannot := &fake{decode: func(*connector.Session, *connector.PrefillResult, *connector.Leg) error {
		return &connector.UnsupportedError{Member: "tools"}
	}}
	for unsupported, want := range map[config.Unsupported][]bool{config.UnsupportedAggregate: {false, true},
		config.UnsupportedRefuse: {true}} {
		f := newFakeFleet(t, cannot, "p0 d0", config.Retry{MaxAttempts: 1}, func(string, int) response {
			return replies(200)
		}, pdflow.WithUnsupported(unsupported))
		err := f.do(`{"prompt":"hi"}`)
		require.Equal(t, unsupported == config.UnsupportedRefuse, err != nil, err)
		var final []bool
		for _, o := range f.seen.list() {
			final = append(final, o.Final)
		}
		require.Equal(t, want, final)
	}
}
