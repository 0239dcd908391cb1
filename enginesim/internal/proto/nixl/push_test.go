// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func pushing(p, d *enginesim.Config) {
	p.Connector, d.Connector, p.EngineID = "nixl-push", "nixl-push", "pdkit-prefill"
}

// pushParams are what a proxy tells D before P has answered (docs/protocols/nixl-push.md, recording 05).
func pushParams(s *simtest.Scene) simtest.Obj {
	host, port := simtest.Side(s.T, s.P)
	return simtest.Obj{"do_remote_decode": false, "do_remote_prefill": true, "remote_engine_id": "pdkit-prefill",
		"remote_host": host, "remote_port": port, "tp_size": 1, "pp_size": 1, "remote_request_id": "a"}
}

// pushLeg is P's leg.
func pushLeg(body simtest.Obj) simtest.Obj {
	return simtest.With(simtest.Leg(body, simtest.Obj{"do_remote_decode": true}), simtest.Obj{"max_tokens": 1})
}

func pushedRight(s *simtest.Scene, body simtest.Obj, a simtest.Response) {
	s.T.Helper()
	s.Right(body, a)
	p, d := s.P.Stats(), s.D.Stats()
	assert.EqualValues(s.T, 240, d.ExternalKVTransfer)
	assert.Zero(s.T, d.LocalCompute)
	assert.EqualValues(s.T, (240+simtest.Block-1)/simtest.Block*simtest.Block*16, p.BytesTransferred,
		"P is the writer, and counts")
	assert.Zero(s.T, d.BytesTransferred)
	s.Clean()
}

// TestPushSerial is docs/protocols/nixl-push.md, recording 01: P's handoff of 13 keys, relayed as it is.
func TestPushSerial(t *testing.T) {
	s := simtest.New(t, pushing)
	body := simtest.Completion("serial")
	h := s.Ask(s.P, pushLeg(body), "X-Request-Id", "a").Params(t)
	assert.Len(t, h, 12+1)
	assert.Equal(t, "push", h["transfer_mode"])
	assert.Regexp(t, `^cmpl-a-0-[0-9a-f]{8}$`, h["remote_request_id"])
	a := s.Ask(s.D, simtest.Leg(body, h), "X-Request-Id", "a")
	pushedRight(s, body, a)
	assert.Zero(t, a.Get("usage.prompt_tokens_details.cached_tokens").Int(), "P's own count")
}

// TestPushTogether are docs/protocols/nixl-push.md, recording 05: either leg may come first.
func TestPushTogether(t *testing.T) {
	for _, order := range simtest.Orders {
		t.Run(order, func(t *testing.T) {
			s := simtest.New(t, pushing)
			body := simtest.Completion("together")
			p, d := s.Both(order, pushLeg(body), simtest.Leg(body, pushParams(s)), "X-Request-Id", "a")
			require.Equal(t, 200, p.Status)
			pushedRight(s, body, d)
			assert.EqualValues(t, 240, d.Get("usage.prompt_tokens_details.cached_tokens").Int(),
				"nobody told P's count")
		})
	}
}

// TestPushThatNobodyWrites are docs/protocols/nixl-push.md, recordings 04, 06 and 09: D waits until its client leaves,
// and never gets its blocks back.
func TestPushThatNobodyWrites(t *testing.T) {
	body := simtest.Completion("orphan")
	for name, k := range map[string]struct {
		prefill simtest.Obj
		id      string
		status  int
	}{
		"other X-Request-Id on P":            {pushLeg(body), "b", 200},
		"P refused its leg":                  {simtest.With(pushLeg(body), simtest.Obj{"min_tokens": 5}), "a", 400},
		"P did not know what its leg is for": {simtest.With(body, simtest.Obj{"max_tokens": 1}), "a", 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := simtest.New(t, pushing)
			require.Equal(t, k.status, s.Ask(s.P, k.prefill, "X-Request-Id", k.id).Status)
			leave := s.Waits(simtest.Leg(body, pushParams(s)), "X-Request-Id", "a")
			time.Sleep(time.Second) // D has registered, which P does not show
			leave()
			s.Lost()
			simtest.WaitFor(t, "they belong to nobody", func() bool { return s.D.CheckKV() != nil })
			s.Alive(s.D)
		})
	}
}

func TestPushWithFieldsThatDoNotFit(t *testing.T) {
	t.Run("an engine id that does not answer there: 500", func(t *testing.T) {
		s := simtest.New(t, pushing)
		params := simtest.With(pushParams(s), simtest.Obj{"remote_engine_id": "other"})
		assert.Equal(t, 500, s.Decode(simtest.Completion("x"), params).Status)
		s.Alive(s.D)
	})
	for _, key := range []string{"remote_engine_id", "remote_host", "remote_port", "tp_size", "remote_request_id"} {
		t.Run("without "+key+" the engine dies", func(t *testing.T) {
			s := simtest.New(t, pushing, simtest.OwnPorts(t))
			params := pushParams(s)
			delete(params, key)
			s.Kills(s.D, s.Decode(simtest.Completion("x"), params))
		})
	}
	t.Run("a leg that stays away: P's blocks wait for the lease", func(t *testing.T) {
		s := simtest.New(t, pushing, func(p, _ *enginesim.Config) { p.Lease = 50 * time.Millisecond })
		require.Equal(t, 200, s.Ask(s.P, pushLeg(simtest.Completion("x"))).Status)
		simtest.WaitFor(t, "the lease ends", func() bool { return s.P.Stats().Expired == 1 })
		assert.Equal(t, enginesim.KVLeak, simtest.FirstFault(t, s.P))
	})
}
