// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/sharedstorage"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// engines is a fleet of simulated engines, and a flow over them whose picker is a quarantine.
type engines struct {
	prefills, decodes []*enginesim.Engine
	ids               map[*enginesim.Engine]string
	set               *discovery.Set
	quarantine        *attest.Quarantine
	flow              *pdflow.Flow
}

func startEngines(t testing.TB, conn connector.KVConnector, config enginesim.Config, p, d int) *engines {
	t.Helper()
	f := &engines{ids: map[*enginesim.Engine]string{}}
	var list []discovery.Endpoint
	begin := func(n int, kv, name string, role discovery.Role) (out []*enginesim.Engine) {
		for i := range n {
			c := config
			c.KVRole, c.BlockSize, c.Blocks, c.KeepRequests = kv, 16, 512, -1
			e, err := enginesim.Start(c)
			require.NoError(t, err)
			t.Cleanup(func() { _ = e.Close() })
			ep, err := discovery.New(e.URL(), role)
			require.NoError(t, err)
			ep.ID = fmt.Sprintf("%s%d", name, i)
			f.ids[e] = ep.ID
			list, out = append(list, ep), append(out, e)
		}
		return out
	}
	f.prefills = begin(p, enginesim.RoleProducer, "p", discovery.RolePrefill)
	f.decodes = begin(d, enginesim.RoleConsumer, "d", discovery.RoleDecode)
	var err error
	f.set, err = static.NewSet(list...)
	require.NoError(t, err)
	f.quarantine = attest.NewQuarantine(pick.New(f.set, pick.Random(), pick.WithSeed(1)))
	f.flow, err = pdflow.New(conn, f.quarantine)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, f.flow.Shutdown(context.Background()))
	})
	return f
}

func (f *engines) options() attest.Options {
	return attest.Options{Flow: f.flow, Model: "tiny", Quarantine: f.quarantine, Characters: 64,
		Endpoints: func() []discovery.Endpoint { return f.set.Load().Endpoints }}
}

func (f *engines) prober(t testing.TB) *attest.Prober {
	p, err := attest.New(f.options())
	require.NoError(t, err)
	return p
}

// corrupt makes a suspect's transfers wrong, and nothing else.
func (f *engines) corrupt(s attest.Suspect, share float64) {
	fault := enginesim.Fault{Kind: enginesim.FaultCorruptKV, Count: -1, Share: share, Leg: enginesim.LegDecode}
	if s.Decode == "" {
		fault.Leg = enginesim.LegPrefill
	}
	for _, e := range f.prefills {
		if f.ids[e] != s.Prefill {
			continue
		}
		if s.Decode == "" {
			e.Inject(fault)
		} else {
			fault.Peer = e.EngineID()
		}
	}
	for _, e := range f.decodes {
		if f.ids[e] == s.Decode {
			e.Inject(fault)
		}
	}
}

func (f *engines) mend() {
	for e := range f.ids {
		e.ClearFaults()
	}
}

func nixlConn(t testing.TB) connector.KVConnector {
	c, err := nixl.New(nil)
	require.NoError(t, err)
	return c
}

func until(t testing.TB, p *attest.Prober, most int) (named []attest.Finding, probes int) {
	for i := range most {
		_, err := p.Probe(t.Context())
		require.NoError(t, err)
		if named = p.Findings(); len(named) > 0 {
			return named, i + 1
		}
	}
	return nil, most
}

// Through real HTTP and real KV: 8 P, 8 D, and one engine or pair whose KV has a flipped bit.
func TestASimulatedFleetsFaultIsNamedAndKeptAwayFrom(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 8, 8)
	for _, s := range []attest.Suspect{{Prefill: "p3"}, {Decode: "d6"}, {Prefill: "p2", Decode: "d5"}} {
		t.Run(s.String(), func(t *testing.T) {
			defer f.mend()
			p := f.prober(t)
			named, _ := until(t, p, 64)
			require.Empty(t, named, "a clean fleet")
			f.corrupt(s, 0)
			named, probes := until(t, p, 100)
			require.Len(t, named, 1)
			require.Equal(t, s, named[0].Suspect)
			require.Equal(t, []attest.Suspect{s}, f.quarantine.Suspects())
			t.Logf("%s: %d probes", s, probes)
			bound := f.bound()
			for range 40 {
				x, err := bound.Pick(t.Context(), &pdflow.PickInput{})
				require.NoError(t, err)
				require.False(t, s.Covers(x.Prefill.ID, x.Decode.ID))
				x.Done(&pdflow.Outcome{})
			}
			f.mend()
			for range 400 {
				_, err := p.Probe(t.Context())
				require.NoError(t, err)
			}
			require.Empty(t, p.Findings(), "released by right probes")
			require.Empty(t, f.quarantine.Suspects())
			require.NoError(t, pickAll(t, f, s), "and it serves again")
		})
	}
}

// bound returns another picker like the flow's. What the prober says holds for all that were bound from the quarantine.
func (f *engines) bound() pdflow.Picker {
	c := f.flow.Connector()
	return f.quarantine.Bind(c, c.Traits().Serving)
}

// pickAll picks until a suspect is chosen.
func pickAll(t *testing.T, f *engines, s attest.Suspect) error {
	bound := f.bound()
	for range 1000 {
		x, err := bound.Pick(t.Context(), &pdflow.PickInput{})
		require.NoError(t, err)
		x.Done(&pdflow.Outcome{})
		if s.Covers(x.Prefill.ID, x.Decode.ID) {
			return nil
		}
	}
	return fmt.Errorf("%s was never chosen", s)
}

// A role is never emptied: with all of its engines named, they serve.
func TestARoleIsNeverEmptied(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 1, 3)
	f.corrupt(attest.Suspect{Prefill: "p0"}, 0)
	p := f.prober(t)
	named, _ := until(t, p, 100)
	require.Equal(t, attest.Suspect{Prefill: "p0"}, named[0].Suspect)
	resp, err := f.flow.Do(t.Context(), &pdflow.Request{API: connector.APICompletions,
		Body: []byte(`{"model":"tiny","prompt":"still served","max_tokens":2}`)})
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, pdflow.ModeDisaggregated, resp.Mode)
}

// A prober that goes on from one whose Run has returned keeps requests away from what that one has named before it
// has sent a probe, and can release it.
func TestAProberGoesOnFromAPreviousOne(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 3, 3)
	bad := attest.Suspect{Decode: "d1"}
	f.corrupt(bad, 0)
	before := f.prober(t)
	named, _ := until(t, before, 100)
	require.Len(t, named, 1)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, before.Run(ctx))
	require.Error(t, pickAll(t, f, bad), "between two probers")
	o := f.options()
	o.Previous = before
	p, err := attest.New(o)
	require.NoError(t, err)
	require.Equal(t, named, p.Findings())
	require.Error(t, pickAll(t, f, bad))
	f.mend()
	for range 400 {
		_, err := p.Probe(t.Context())
		require.NoError(t, err)
	}
	require.Empty(t, p.Findings())
	require.NoError(t, pickAll(t, f, bad))
}

// One P and one D look alike. What is known is told, and nobody is named.
func TestOnePairIsSuspectedAsAWhole(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 1, 1)
	f.corrupt(attest.Suspect{Decode: "d0"}, 0)
	p := f.prober(t)
	r, err := p.Probe(t.Context())
	require.NoError(t, err)
	require.Equal(t, attest.Wrong, r.Verdict)
	named, _ := until(t, p, 50)
	require.Empty(t, named)
	require.ElementsMatch(t, []attest.Suspect{{Prefill: "p0"}, {Decode: "d0"}, {Prefill: "p0", Decode: "d0"}},
		p.Suspects())
}

// With a store, D's text is compared with what P computed before the store had it.
func TestCorruptedFilesOfAStoreAreFound(t *testing.T) {
	c, err := sharedstorage.New(nil)
	require.NoError(t, err)
	f := startEngines(t, c, enginesim.Config{Connector: "sharedstorage",
		Extra: map[string]string{"shared_storage_path": t.TempDir()}}, 3, 3)
	for _, s := range []attest.Suspect{{Prefill: "p1"}, {Decode: "d2"}} {
		p := f.prober(t)
		named, _ := until(t, p, 20)
		require.Empty(t, named)
		for e, id := range f.ids {
			if id == s.Prefill || id == s.Decode { // the legs do not say which they are
				e.Inject(enginesim.Fault{Kind: enginesim.FaultCorruptKV, Count: -1})
			}
		}
		named, _ = until(t, p, 100)
		require.Len(t, named, 1)
		require.Equal(t, s, named[0].Suspect)
		f.mend()
	}
}

// An engine that is asked to compare and computes otherwise blames nobody but itself.
func TestAnOddReferenceBlamesNobody(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 3, 3)
	odd, err := enginesim.Start(enginesim.Config{Seed: 7, KVRole: enginesim.RoleConsumer, KeepRequests: -1})
	require.NoError(t, err)
	t.Cleanup(func() { _ = odd.Close() })
	e, err := discovery.New(odd.URL(), discovery.RoleDecode)
	require.NoError(t, err)
	e.ID = "odd"
	o := f.options()
	o.Alone = append(o.Alone, e)
	for _, x := range f.set.Load().Endpoints {
		if x.Role == discovery.RoleDecode {
			o.Alone = append(o.Alone, x)
			break
		}
	}
	p, err := attest.New(o)
	require.NoError(t, err)
	for range 30 {
		r, err := p.Probe(t.Context())
		require.NoError(t, err)
		require.Equal(t, attest.Right, r.Verdict)
		require.Equal(t, "odd", r.Odd)
	}
}

// A prober that gets no response asks more and more seldom, and names nobody.
func TestProbesSlowDownWhileNobodyAnswers(t *testing.T) {
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 2, 2)
	for _, e := range f.prefills {
		e.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusTooManyRequests, Count: -1})
	}
	o := f.options()
	o.Every = time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	var at []time.Time
	o.OnResult = func(_ attest.Result, err error) {
		assert.Error(t, err)
		mu.Lock()
		defer mu.Unlock()
		if at = append(at, time.Now()); len(at) == 1 { // there is one, however slow the engines are
			time.AfterFunc(300*time.Millisecond, cancel)
		}
	}
	p, err := attest.New(o)
	require.NoError(t, err)
	require.NoError(t, p.Run(ctx))
	require.NotEmpty(t, at)
	require.Less(t, len(at), 40, "16 ms apart at last")
	require.Empty(t, p.Findings())
}
