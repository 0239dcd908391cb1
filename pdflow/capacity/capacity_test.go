// SPDX-License-Identifier: Apache-2.0

package capacity_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow/capacity"
)

// fleet plays engines that are asked each second.
type fleet struct {
	now     time.Time
	meter   *capacity.Meter
	engines []discovery.Endpoint
	said    map[string]inspect.Reading
	roles   map[discovery.Role]capacity.Role
}

func newFleet(o *capacity.Options, role discovery.Role, n int) *fleet {
	f := &fleet{now: time.Unix(1_000_000, 0), meter: capacity.New(o), said: map[string]inspect.Reading{}}
	f.add(role, n)
	return f
}

func (f *fleet) add(role discovery.Role, n int) {
	for range n {
		id := role.String() + strconv.Itoa(len(f.engines))
		f.engines = append(f.engines, discovery.Endpoint{ID: id, Role: role, Phase: discovery.PhaseReady})
	}
}

// run lets each engine say for some seconds that it counts what one second brings, and that so much waits.
func (f *fleet) run(seconds int, each inspect.Load) {
	for range seconds {
		f.now = f.now.Add(time.Second)
		for i := range f.engines {
			id := f.engines[i].ID
			r := f.said[id]
			r.Load.At, r.Load.Running, r.Load.Waiting, r.Load.KVUsage = f.now, each.Running, each.Waiting, each.KVUsage
			r.Load.Fetching = each.Fetching
			r.Load.KV.Computed += each.KV.Computed
			r.Load.KV.Generated += each.KV.Generated
			r.Load.KV.Requests += each.KV.Requests
			f.said[id] = r
		}
		f.observe()
	}
}

func (f *fleet) observe() {
	f.roles = f.meter.Observe(f.now, f.engines, func(id string) (inspect.Reading, bool) {
		r, ok := f.said[id]
		return r, ok
	})
}

func load(tokens, requests float64, waiting int, usage float64) inspect.Load {
	return inspect.Load{Running: 1, Waiting: waiting, KVUsage: usage,
		KV: inspect.KV{Computed: tokens, Requests: requests}}
}

// Two engines serve 8,000 tokens a second each and have more to do. What comes is more than they can take, so more are
// wanted, by the tokens that wait. When these are served and less comes, the engines are wanted for ten minutes more.
func TestMoreEnginesAreWantedAtOnceAndFewerLater(t *testing.T) {
	f := newFleet(&capacity.Options{Target: 0.8}, discovery.RolePrefill, 2)
	f.run(60, load(8000, 4, 6, 0.1))
	p := f.roles[discovery.RolePrefill]
	assert.InDelta(t, 16000, p.Throughput, 1)
	assert.InDelta(t, 8000, p.Speed, 1)
	assert.InDelta(t, 12*2000, p.Backlog, 1, "12 requests of 2,000 tokens wait")
	assert.InDelta(t, 1, p.Saturation, 0.01)
	// 16,000 a second and 24,000 within 30 s, of engines that are to serve 6,400 each: 2.6
	assert.Equal(t, 3, p.Wanted)
	assert.Equal(t, capacity.Backlog, p.Reason)

	f.add(discovery.RolePrefill, 1)
	f.run(120, load(3000, 1.5, 0, 0.1))
	p = f.roles[discovery.RolePrefill]
	assert.Equal(t, 3, p.Wanted, "two would do now")
	assert.Equal(t, capacity.Held, p.Reason)
	assert.InDelta(t, 9000.0/24000, p.Saturation, 0.01)
	f.run(600, load(3000, 1.5, 0, 0.1))
	p = f.roles[discovery.RolePrefill]
	assert.Equal(t, 2, p.Wanted)
	assert.Equal(t, capacity.Throughput, p.Reason)
}

// Requests whose KV is on its way wait for no decode engine.
func TestRequestsThatFetchAreNoBacklog(t *testing.T) {
	f := newFleet(&capacity.Options{Target: 0.8}, discovery.RoleDecode, 2)
	busy := load(8000, 4, 6, 0.1)
	busy.Fetching = 6
	f.run(60, busy)
	d := f.roles[discovery.RoleDecode]
	assert.Zero(t, d.Backlog+float64(d.Waiting))
	assert.Zero(t, d.Speed, "nor do they say what its limit is")
}

// The memory of decode engines is full before their time is.
func TestMemoryWantsEnginesToo(t *testing.T) {
	f := newFleet(nil, discovery.RoleDecode, 4)
	f.run(10, load(0, 1, 0, 0.95))
	d := f.roles[discovery.RoleDecode]
	assert.Equal(t, 5, d.Wanted, "3.8 engines' memory is used, and each is to use 0.85")
	assert.Equal(t, capacity.Memory, d.Reason)
	assert.InDelta(t, 0.95, d.Saturation, 1e-9)
}

// A speed that was given needs no engine that is busy, and a difference of a tenth changes nothing.
func TestASpeedCanBeGiven(t *testing.T) {
	o := &capacity.Options{Speed: map[discovery.Role]float64{discovery.RoleDecode: 1000}}
	f := newFleet(o, discovery.RoleDecode, 10)
	f.run(60, inspect.Load{KV: inspect.KV{Generated: 920, Requests: 1}}) // 10.8 engines
	d := f.roles[discovery.RoleDecode]
	assert.Equal(t, 10, d.Wanted)
	assert.Equal(t, capacity.Tolerated, d.Reason)
	f = newFleet(o, discovery.RoleDecode, 10)
	f.run(60, inspect.Load{KV: inspect.KV{Generated: 960, Requests: 1}})
	assert.Equal(t, 12, f.roles[discovery.RoleDecode].Wanted)
}

func TestWithoutAWordAsManyEnginesAreWantedAsThereAre(t *testing.T) {
	f := newFleet(nil, discovery.RolePrefill, 3)
	f.observe()
	p := f.roles[discovery.RolePrefill]
	assert.Equal(t, 3, p.Wanted)
	assert.Equal(t, capacity.Unknown, p.Reason)

	f.run(1, load(0, 0, 2, 0)) // requests wait, and no rate is known yet
	p = f.roles[discovery.RolePrefill]
	assert.Equal(t, 4, p.Wanted)
	assert.Equal(t, capacity.Waiting, p.Reason)

	f.now = f.now.Add(2 * time.Minute) // what was said is old
	f.observe()
	assert.Zero(t, f.roles[discovery.RolePrefill].Told)
}

// One engine of two does not answer: the other's word is taken for both.
func TestAnEngineThatSaysNothingIsTakenToBeAsBusy(t *testing.T) {
	f := newFleet(&capacity.Options{Speed: map[discovery.Role]float64{discovery.RolePrefill: 1000}},
		discovery.RolePrefill, 1)
	f.engines = append(f.engines, discovery.Endpoint{ID: "silent", Role: discovery.RolePrefill,
		Phase: discovery.PhaseReady})
	for range 60 {
		f.now = f.now.Add(time.Second)
		r := f.said[f.engines[0].ID]
		r.Load.At, r.Load.KV.Computed = f.now, r.Load.KV.Computed+1600
		f.said[f.engines[0].ID] = r
		f.observe()
	}
	p := f.roles[discovery.RolePrefill]
	assert.Equal(t, 2, p.Engines)
	assert.Equal(t, 1, p.Told)
	assert.Equal(t, 5, p.Wanted, "3,200 tokens a second, of engines that are to compute 650")
}

// Requests of which few wait, as a decode engine's do until their KV has come, are no sign that it has all it can do.
func TestAnEngineIsAtItsLimitWhereManyRequestsWait(t *testing.T) {
	f := newFleet(nil, discovery.RoleDecode, 1)
	few := load(1000, 1, 2, 0.1)
	few.Running = 100
	f.run(10, few)
	assert.Zero(t, f.roles[discovery.RoleDecode].Speed)
	few.Waiting = 10
	f.run(10, few)
	assert.InDelta(t, 1000, f.roles[discovery.RoleDecode].Speed, 1)
}

// What the engines counted before they were first seen is not told, an engine that starts again counts from zero, and
// one that leaves takes nothing along.
func TestWhatIsCountedOnlyRises(t *testing.T) {
	f := newFleet(nil, discovery.RoleDecode, 1)
	id := f.engines[0].ID
	for _, step := range []struct{ bytes, want float64 }{{100, 0}, {130, 30}, {130, 30}, {5, 35}} {
		f.now = f.now.Add(time.Second)
		f.said[id] = inspect.Reading{Load: inspect.Load{At: f.now, KV: inspect.KV{Bytes: step.bytes}}}
		f.observe()
		assert.InDelta(t, step.want, f.roles[discovery.RoleDecode].Counted.Bytes, 0)
	}
	f.engines = nil
	f.observe()
	assert.InDelta(t, 35, f.roles[discovery.RoleDecode].Counted.Bytes, 0)
	assert.Zero(t, f.roles[discovery.RoleDecode].Engines)
}

// A draining engine is no engine that can be counted on.
func TestADrainingEngineIsNoCapacity(t *testing.T) {
	f := newFleet(nil, discovery.RoleDecode, 2)
	f.engines[1].Phase = discovery.PhaseDraining
	f.run(3, load(0, 1, 0, 0.5))
	d := f.roles[discovery.RoleDecode]
	assert.Equal(t, 1, d.Engines)
	assert.Equal(t, 1, d.Running)
}

// An engine that is loading its model is no reason for one more.
func TestEnginesThatLoadAreNoLoad(t *testing.T) {
	f := newFleet(&capacity.Options{Speed: map[discovery.Role]float64{discovery.RolePrefill: 1000}},
		discovery.RolePrefill, 2)
	f.run(60, load(850, 1, 3, 0))
	two := f.roles[discovery.RolePrefill].Wanted
	f.engines = append(f.engines, discovery.Endpoint{ID: "new", Role: discovery.RolePrefill,
		Phase: discovery.PhaseNotReady})
	f.said["new"] = inspect.Reading{}
	f.observe()
	p := f.roles[discovery.RolePrefill]
	assert.Equal(t, 3, p.Engines)
	assert.Equal(t, p.Wanted, two, "as before")

	f = newFleet(nil, discovery.RolePrefill, 1) // and where no speed is known
	f.engines = append(f.engines, discovery.Endpoint{ID: "new", Role: discovery.RolePrefill,
		Phase: discovery.PhaseNotReady})
	f.said["new"] = inspect.Reading{}
	f.now = f.now.Add(time.Second)
	f.said["prefill0"] = inspect.Reading{Load: inspect.Load{At: f.now, Waiting: 5}}
	f.observe()
	assert.Equal(t, 2, f.roles[discovery.RolePrefill].Wanted)
}

// While a configuration changes, two sources ask an engine. The older word is no restart of the engine.
func TestAnOlderWordIsNoRestart(t *testing.T) {
	f := newFleet(nil, discovery.RoleDecode, 1)
	id := f.engines[0].ID
	for _, step := range []struct {
		seconds     int
		bytes, want float64
	}{{10, 100, 0}, {30, 160, 60}, {20, 130, 60}, {40, 170, 70}, {30, 160, 70}} {
		at := f.now.Add(time.Duration(step.seconds) * time.Second)
		f.said[id] = inspect.Reading{Load: inspect.Load{At: at, KV: inspect.KV{Bytes: step.bytes}}}
		f.observe()
		assert.InDelta(t, step.want, f.roles[discovery.RoleDecode].Counted.Bytes, 0)
	}
}

// A page that lacks a counter for a while is no restart: what the engine has ever counted does not come anew.
func TestACounterThatStopsAndComesBackCountsOnce(t *testing.T) {
	f := newFleet(nil, discovery.RolePrefill, 1)
	f.run(30, load(1000, 1, 0, 0.1))
	id := f.engines[0].ID
	full := f.said[id]
	lacking := full
	lacking.Load.KV.Computed = 0
	f.now = f.now.Add(time.Second)
	lacking.Load.At = f.now
	f.said[id] = lacking
	f.observe()
	f.said[id] = full
	f.run(1, load(2000, 1, 0, 0.1))
	p := f.roles[discovery.RolePrefill]
	assert.InDelta(t, 31_000, p.Counted.Computed, 1, "29 seconds, and the two with the pause")
	assert.InDelta(t, 1000, p.Throughput, 50)
}

// A restarted engine counts from 0: what it had counted stays, and no rate is below 0.
func TestARestartLosesNothingAndCountsNothingTwice(t *testing.T) {
	f := newFleet(nil, discovery.RolePrefill, 1)
	f.run(30, load(1000, 1, 0, 0.1))
	f.said[f.engines[0].ID] = inspect.Reading{}
	f.run(30, load(1000, 1, 0, 0.1))
	p := f.roles[discovery.RolePrefill]
	assert.InDelta(t, 59_000, p.Counted.Computed, 1)
	assert.InDelta(t, 1000, p.Throughput, 1)
}

func TestAClockThatGoesBackStopsNothing(t *testing.T) {
	f := newFleet(nil, discovery.RolePrefill, 2)
	f.run(60, load(8000, 4, 6, 0.1))
	f.now = f.now.Add(-time.Hour)
	f.run(60, load(1000, 1, 0, 0.1))
	p := f.roles[discovery.RolePrefill]
	assert.InDelta(t, 2000, p.Throughput, 100)
	f.now = f.now.Add(2 * time.Hour)
	f.run(62, load(500, 1, 0, 0.1))
	assert.InDelta(t, 1000, f.roles[discovery.RolePrefill].Throughput, 100)
}

func TestAFleetComesBackFromZero(t *testing.T) {
	f := newFleet(nil, discovery.RolePrefill, 2)
	f.run(60, load(1000, 1, 0, 0.1))
	counted := f.roles[discovery.RolePrefill].Counted.Computed
	f.engines = nil
	f.run(60, inspect.Load{})
	p := f.roles[discovery.RolePrefill]
	assert.Equal(t, [2]int{0, 0}, [2]int{p.Engines, p.Wanted})
	assert.InDelta(t, counted, p.Counted.Computed, 0)
	f.said = map[string]inspect.Reading{}
	f.add(discovery.RolePrefill, 1)
	f.run(30, load(1000, 1, 0, 0.1))
	p = f.roles[discovery.RolePrefill]
	assert.InDelta(t, counted+29_000, p.Counted.Computed, 1)
	assert.InDelta(t, 1000, p.Throughput, 1)
	assert.Equal(t, 1, p.Wanted)
}
