// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// refusals are ways in which D refuses a request that P has computed.
var refusals = map[string]func(s *setup, d func() *enginesim.Engine){
	"without telling P": func(_ *setup, d func() *enginesim.Engine) {
		d().Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode})
	},
	"and tells P": func(s *setup, d func() *enginesim.Engine) {
		if s != nil {
			s.decode.MaxModelLen = 64
		}
	},
}

// A D that refuses a request after P has computed it must not leave P's blocks pinned until the lease ends: six large
// requests would fill P's cache. D reads nothing for it: P may have given the blocks to another prompt.
func TestBlocksOfARequestThatDRefusesAreReleased(t *testing.T) {
	for name, refuse := range refusals {
		t.Run(name, func(t *testing.T) {
			count, s := &book{}, setup{}
			s.opts = append(s.opts, metered(count))
			if name == "and tells P" {
				refuse(&s, nil)
			}
			x := start(t, s)
			for range 3 {
				if name != "and tells P" {
					refuse(nil, func() *enginesim.Engine { return x.d })
				}
				r := post(t, x.url, "/v1/completions", completion(longPrompt, ""))
				require.Equal(t, 400, r.status, r.body)
			}
			require.Eventually(t, func() bool { return x.p.Stats().PinnedBlocks == 0 }, 20*time.Second,
				time.Millisecond)
			assert.Zero(t, x.d.Stats().Transfers)
			assert.Equal(t, 3, count.count("pd.handoffs.released"))
			assert.Zero(t, count.count("pd.attempts.expired"))
			assert.NoError(t, x.p.CheckKV())
			assert.NoError(t, x.d.CheckKV())
		})
	}
}

// Steps of a host give the release out as a side call.
func TestAHostSendsTheReleaseAsASideCall(t *testing.T) {
	x := start(t, setup{})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode})
	legs, _, err := drive(t, begin(t, x.flow, completion(longPrompt, ""), nil))
	require.ErrorIs(t, err, pdflow.CodeDecodeRejected)
	assert.Equal(t, []string{"prefill", "decode", ""}, legs)
	require.Eventually(t, func() bool { return x.p.Stats().PinnedBlocks == 0 }, 20*time.Second, time.Millisecond)
}

// Blocks that D does not release are counted: they wait for the lease.
func TestBlocksThatAreNotReleasedAreCounted(t *testing.T) {
	for name, fault := range map[string]enginesim.Fault{
		"D serves it":  {Kind: enginesim.FaultGarbage, Body: "{}", Count: -1},
		"D fails":      {Kind: enginesim.FaultStatus, Status: 500, Count: -1},
		"D is gone":    {Kind: enginesim.FaultReset, Count: -1},
		"D stays mute": {Kind: enginesim.FaultStall, Count: -1},
	} {
		t.Run(name, func(t *testing.T) {
			count := &book{}
			x := start(t, setup{opts: []pdflow.Option{metered(count),
				pdflow.WithTimeouts(config.Timeouts{Cleanup: 100 * time.Millisecond})}})
			x.d.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Leg: enginesim.LegDecode})
			x.d.Inject(fault)
			r := post(t, x.url, "/v1/completions", completion(longPrompt, ""))
			require.Equal(t, 400, r.status, r.body)
			require.Eventually(t, func() bool { return count.count("pd.attempts.expired") == 1 }, 20*time.Second,
				time.Millisecond)
			assert.Zero(t, count.count("pd.handoffs.released"))
			x.d.ClearFaults()
			require.NotEmpty(t, post(t, x.url, "/v1/completions", completion(longPrompt, "")).text(t))
		})
	}
}

// A prefill that ran on is counted by how it ended.
func TestPrefillsThatRanOnAreCounted(t *testing.T) {
	for _, fails := range []bool{false, true} {
		count := &book{}
		asked := make(chan struct{}) // else the client may leave before D is asked: then D does not wait for P
		x := newFinishes(t, func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
			close(asked)
			gone(x, w, r, body)
		}, metered(count))
		ctx, leave := context.WithCancel(t.Context())
		go func() { <-x.p.computes; <-asked; leave() }()
		require.ErrorIs(t, doers["Do"](ctx, t, x.flow, completion("a", "")), pdflow.CodeClientGone)
		if fails { // the leg is cut
			now, stop := context.WithCancel(t.Context())
			stop()
			_ = x.flow.Shutdown(now)
		} else {
			close(x.p.answer)
		}
		require.Eventually(t, func() bool { return count.count("pd.prefills.ran_on") == 1 }, 20*time.Second,
			time.Millisecond)
		orphans := 0
		if fails {
			orphans = 1
		}
		require.Eventually(t, func() bool { return count.count("pd.orphans") == orphans }, 20*time.Second,
			time.Millisecond, strings.Repeat("P had no end, and D asked ", orphans))
	}
}
