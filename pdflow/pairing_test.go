// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Protocols whose legs depend on each other: which leg waits for which, and what engines keep after a failure.

// lonely leaves orphans, like Mooncake, and its decode engines cannot serve alone, like SGLang's.
type lonely struct{ fake }

func (l *lonely) Traits() connector.Traits {
	t := l.fake.Traits()
	t.Ending.Orphans, t.Serving.PairOnly = true, true
	return t
}

func TestTogetherSendsNeitherLegWhenOneEngineIsOutOfReach(t *testing.T) {
	for name, leg := range map[string]pdflow.LegKind{"prefill": pdflow.LegPrefill, "decode": pdflow.LegDecode} {
		t.Run(name, func(t *testing.T) {
			x := script(t, &lonely{fake{order: connector.Together}}, answer(ok), answer(ok))
			pair := x.pair
			gone := endpoint(t, "http://127.0.0.1:1", discovery.RolePrefill) // a port that no test gets
			if leg == pdflow.LegPrefill {
				pair.Prefill = gone
			} else {
				pair.Decode = gone
			}
			_, err := x.flow.Do(
				t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", "")),
					Pick: &pair},
			)
			require.Equal(t, 502, pdflowError(t, err).HTTPStatus())
			require.Equal(t, leg, pdflowError(t, err).Leg)
			time.Sleep(20 * time.Millisecond)
			require.Empty(t, x.all(), "the other engine got a leg that waits for nobody")
			require.False(t, x.seen.list()[0].Orphan)
		})
	}
}

func pdflowError(t *testing.T, err error) *pdflow.Error {
	t.Helper()
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	return e
}

func TestADecodeWithoutItsPrefillIsAnOrphan(t *testing.T) {
	after := func(engine string, h handler) handler {
		return func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			for !strings.Contains(x.all(), engine) {
				time.Sleep(time.Millisecond)
			}
			h(x, w, r, b)
		}
	}
	lost := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: {\"error\":{\"message\":\"the KV load failed\"}}\n\n")
	}
	for name, c := range map[string]struct {
		conn   connector.KVConnector
		p, d   handler
		orphan bool
	}{
		"prefill refused": {&lonely{fake{order: connector.Together}}, after("D", status(400)), gone,
			true},
		"prefill failed": {&lonely{fake{order: connector.Together}}, after("D", status(500)), gone,
			true},
		"a protocol that leaves nothing": {&fake{order: connector.Together}, after("D", status(400)), gone, false},
		"decode failed after prefill": {&lonely{fake{order: connector.PrefillThenDecode}}, answer(ok),
			status(500), false},
		"served": {&lonely{fake{order: connector.Together}}, answer(ok), answer(ok), false},
		"decode refused it by itself": {&lonely{fake{order: connector.Together}}, gone, after("P", status(400)),
			false},
		"decode failed by itself": {&lonely{fake{order: connector.Together}}, gone, after("P", status(500)),
			false},
		"decode's stream is an error": {&lonely{fake{order: connector.Together}}, gone, after("P", lost), false},
		"prefill failed before decode began": {&lonely{fake{order: connector.PrefillThenDecode}}, status(400),
			answer(ok), false},
	} {
		t.Run(name, func(t *testing.T) {
			x := script(t, c.conn, c.p, c.d)
			post(t, x.url, "/v1/completions", completion("a", ""))
			require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 10*time.Second, time.Millisecond)
			require.Equal(t, c.orphan, x.seen.list()[0].Orphan)
		})
	}
}

func TestAPairThatKeepsAnOrphanCoolsDownWhileOthersAreThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		set := setOf(t, endpoint(t, "http://p1:1", discovery.RolePrefill),
			endpoint(t, "http://p2:1", discovery.RolePrefill), endpoint(t, "http://d:1", discovery.RoleDecode))
		picker := pick.New(set, pick.RoundRobin())
		first, err := picker.Pick(t.Context(), &pdflow.PickInput{})
		require.NoError(t, err)
		s := &connector.Session{Prefill: first.Prefill, Decode: first.Decode}
		first.Done(
			&pdflow.Outcome{Session: s, Orphan: true,
				Err: &pdflow.Error{Code: pdflow.CodePrefillRejected, Leg: pdflow.LegPrefill,
					Endpoint: first.Prefill.ID}},
		)
		for range 6 {
			next, err := picker.Pick(t.Context(), &pdflow.PickInput{})
			require.NoError(t, err)
			require.NotEqual(t, first.Prefill.ID, next.Prefill.ID,
				"the pair should have a cooldown, though a refused request is no engine's fault")
		}
		for range 500 {
			time.Sleep(10 * time.Millisecond)
			next, err := picker.Pick(t.Context(), &pdflow.PickInput{})
			if err == nil && next.Prefill.ID == first.Prefill.ID {
				return
			}
		}
		t.Fatal("the cooldown does not end")
	})
}

func TestWhatADecodeEngineCannotServeAloneNeedsAnEngineOfRoleBoth(t *testing.T) {
	several := `{"model":"tiny","prompt":["a","b"]}`
	x := script(t, &lonely{fake{order: connector.Together}}, answer(ok), answer(ok))
	r := post(t, x.url, "/v1/completions", several)
	require.Equal(t, 400, r.status, r.body)
	require.Contains(t, r.body, `"param":"prompt"`)
	require.Empty(t, x.all())

	whole := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, ok) }))
	flow, _ := newFlow(t, &lonely{fake{order: connector.Together}},
		[]discovery.Endpoint{x.pair.Prefill, x.pair.Decode, endpoint(t, whole, discovery.RoleBoth)})
	for range 4 {
		r = post(t, serve(t, flow), "/v1/completions", several)
		require.Equal(t, 200, r.status, r.body)
		require.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))
	}
	require.Empty(t, x.all(), "an engine that waits for KV got a whole request")
	for range 4 {
		r = post(t, serve(t, flow), "/v1/completions", completion("a", ""))
		require.Equal(t, 200, r.status, r.body)
		require.Equal(t, "disaggregated", r.header.Get("X-PD-Mode"))
	}
	require.Equal(t, 4, strings.Count(x.all(), "P"), "a pair had an engine without the connector")
	require.Equal(t, 4, strings.Count(x.all(), "D"))
}

func TestAFallbackToADecodeEngineThatCannotServeAloneIsRefused(t *testing.T) {
	_, err := pdflow.New(&lonely{}, pick.New(setOf(t), pick.RoundRobin()),
		pdflow.WithFallback(config.FallbackDecode))
	require.ErrorContains(t, err, "cannot serve alone")
}

type checking struct{ fake }

func (*checking) CheckPrefill(_ *connector.Session, p *connector.PrefillResult) error {
	if _, cut := p.Field("stopped"); cut {
		return handoff.NoTransfer("P did not end by length")
	}
	return nil
}

func TestAPrefillThatTransfersNothingCancelsDecode(t *testing.T) {
	x := script(t, &checking{fake{order: connector.Together}},
		func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			for !strings.Contains(x.all(), "D") {
				time.Sleep(time.Millisecond)
			}
			answer(`{"stopped":1}`)(x, w, r, b)
		}, gone)
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 502, r.status)
	require.Contains(t, r.body, "transfer_missing")
	require.Eventually(t, func() bool { return strings.Contains(x.all(), "cancelled") }, 10*time.Second,
		time.Millisecond)
}

func TestAnEngineWhoseEntryLacksSomethingIsPassedOver(t *testing.T) {
	c := &fake{order: connector.PrefillThenDecode, prefill: func(s *connector.Session, _ *connector.Leg) error {
		_, err := attr.Port(s.Prefill, "sideChannelPort", 0)
		return err
	}}
	x := script(t, c, answer(ok), answer(ok))
	whole := x.pair.Prefill
	whole.ID, whole.Attributes = "complete", map[string]string{"sideChannelPort": "5600"}
	flow, seen := newFlow(t, c, []discovery.Endpoint{x.pair.Prefill, whole, x.pair.Decode})
	for range 3 {
		require.Equal(t, 200, post(t, serve(t, flow), "/v1/completions", completion("a", "")).status)
	}
	failed := seen.list()[0]
	if failed.Err == nil {
		failed = seen.list()[1]
	}
	require.Equal(t, pdflow.CodePrefillFailed, failed.Err.Code)
	require.Equal(t, x.pair.Prefill.ID, failed.Err.Endpoint)
	require.ErrorContains(t, failed.Err.Err, "attribute sideChannelPort is missing")
}

func TestARewriterThatNeedsPrefillsResponseWaitsForIt(t *testing.T) {
	slow := func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		for !strings.Contains(x.all(), "answered") {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(20 * time.Millisecond)
		answer(`{"first":"changed"}`)(x, w, r, b)
	}
	c := &rewriting{fake{order: connector.Together}}
	x := script(t, c, slow, func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		answer(ok)(x, w, r, b)
		x.log("answered")
	})
	require.Equal(t, "changed", post(t, x.url, "/v1/completions", completion("a", `"logprobs":1`)).text(t))
}

// With some protocols P answers only when D has all of the KV. D may have ended a short response by then, and the flow
// must not cancel P's leg because of that.
func TestAPrefillThatEndsJustAfterDecodeIsHeardOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{order: connector.Together}, "p0 d0", config.Retry{MaxAttempts: 1},
			func(host string, _ int) response {
				if host == "p0" {
					return after(50*time.Millisecond, replies(200))
				}
				return replies(200)
			})
		require.NoError(t, f.do(completion("a", "")))
		require.Len(t, f.seen.list(), 1)
		require.Equal(t, 200, f.seen.list()[0].Prefill.Status)
		require.Nil(t, f.seen.list()[0].Prefill.Err)
	})
}

func TestTheClientsHeadersReachTheDescribers(t *testing.T) {
	var seen string
	c := &fake{prefill: func(s *connector.Session, l *connector.Leg) error {
		seen = s.Header.Get("X-Session-Id")
		l.Set("seen", json.RawMessage(`true`))
		return nil
	}}
	x := script(t, c, answer(ok), answer(ok))
	resp, err := x.flow.Do(
		t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", "")),
			Header: http.Header{"X-Session-Id": {"talk-7"}}, Pick: &x.pair},
	)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, "talk-7", seen)
}

func TestARequestThatThisPairCannotCarryGoesByThePolicy(t *testing.T) {
	c := &fake{prefill: func(s *connector.Session, _ *connector.Leg) error {
		if s.Prefill.Attribute("dpSize") != "" {
			return nil
		}
		return &connector.UnsupportedError{Member: "X-data-parallel-rank"}
	}}
	x := script(t, c, answer(ok), answer(ok))
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 200, r.status, r.body)
	require.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))
	require.Equal(t, "D", x.all())

	x = script(t, c, answer(ok), answer(ok), pdflow.WithUnsupported(config.UnsupportedRefuse))
	r = post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 400, r.status)
	require.Contains(t, r.body, `"param":"X-data-parallel-rank"`)
	require.Empty(t, x.all())
}

// A pair that the caller of Do has chosen is held to the same rules as one that a picker chooses.
func TestAGivenPairKeepsTheConnectorsRules(t *testing.T) {
	p, d := endpoint(t, "http://127.0.0.1:1", discovery.RolePrefill),
		endpoint(t, "http://127.0.0.1:2", discovery.RoleDecode)
	with := func(e discovery.Endpoint, name, value string) discovery.Endpoint {
		e.Attributes = map[string]string{name: value}
		return e
	}
	inGroup := func(e discovery.Endpoint, group string) discovery.Endpoint { e.Group = group; return e }
	for name, c := range map[string]struct {
		conn connector.KVConnector
		pick pdflow.Pick
		want string
	}{
		"tensor-parallel sizes": {
			newNIXL(t), pdflow.Pick{Prefill: with(p, "tpSize", "3"), Decode: with(d, "tpSize", "2")}, "tpSize",
		},
		"groups":                {newNIXL(t), pdflow.Pick{Prefill: inGroup(p, "a"), Decode: inGroup(d, "b")}, "group"},
		"a decode engine alone": {&lonely{}, pdflow.Pick{Decode: d}, "alone"},
	} {
		t.Run(name, func(t *testing.T) {
			flow, err := pdflow.New(c.conn, pick.New(setOf(t), pick.RoundRobin()))
			require.NoError(t, err)
			in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`), Pick: &c.pick}
			_, err = flow.Do(context.Background(), in)
			require.ErrorIs(t, err, pdflow.CodeInvalid)
			require.ErrorContains(t, err, "Pick")
			require.NotContains(t, err.Error(), "127.0.0.1", "clients may see it")
			require.ErrorContains(t, errors.Unwrap(err), c.want)

			in.AnyPair = true // then it is sent, to engines that are not there
			_, err = flow.Do(context.Background(), in)
			require.NotErrorIs(t, err, pdflow.CodeInvalid)
		})
	}
}

// sender is a connector whose prefill engines crash on a request that names no decode engine, as LMCache's senders do.
type sender struct{ fake }

func (s *sender) Traits() connector.Traits {
	t := s.fake.Traits()
	t.Serving.PrefillPairOnly = true
	return t
}

// An engine that can prefill gets no decode leg and no whole request, whether the picker or the caller has chosen it.
func TestNoEngineThatCanPrefillDecodesWhereThatEndsIt(t *testing.T) {
	p := endpoint(t, "http://p:1", discovery.RolePrefill)
	for name, pair := range map[string]pdflow.Pick{
		"role both alone":    {Decode: endpoint(t, "http://b:1", discovery.RoleBoth)},
		"role prefill alone": {Decode: p},
		"role both as D":     {Prefill: p, Decode: endpoint(t, "http://b:1", discovery.RoleBoth)},
		"no role told":       {Decode: discovery.Endpoint{ID: "p:1", URL: p.URL}},
	} {
		flow, err := pdflow.New(&sender{}, always(pair))
		require.NoError(t, err)
		defer flow.Shutdown(t.Context())
		for _, in := range []*pdflow.Request{{}, {Pick: &pair}, {Pick: &pair, AnyPair: true}} {
			in.API, in.Body = connector.APICompletions, []byte(completion("a", ""))
			_, err := flow.Do(t.Context(), in)
			want := pdflow.CodeInvalid
			if in.Pick == nil {
				want = pdflow.CodeInternal
			}
			require.ErrorIs(t, err, want, name)
		}
		require.ErrorContains(t, check.Of(&sender{}).CheckPair(p, pair.Decode), "role", name)
	}
}
