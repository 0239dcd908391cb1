// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// Prober tries pairs at which requests ran out of time, by synthetic probes, so that no client finds out whether such a
// pair works again. As long as [Prober.Run] runs, the picker sends no request to a pair or an engine in a cooldown
// after timeouts before a probe has served there, unless nothing else is left. A probe follows the first timeout at
// once, so that one that any body may have drawn costs the pair no cooldown, and later ones come when the cooldown is
// over. They go out one after another, at most four a second, each a completion of a short prompt.
//
// A probe that the engines refuse (a key that they want, an API that they lack) decides nothing, and neither do probes
// after which requests ran out of time again: then one request at a time tries the pair, as without a prober.
type Prober struct {
	Picker pdflow.Picker // of [New], or bound from one
	// Those that ask the picker. A probe goes out by those of the request's connector, or by all if there is none now.
	Flows   []*pdflow.Flow
	Header  func() http.Header // of each probe, for engines that want an Authorization; nil: none
	Timeout time.Duration      // of one probe; default 10 s
	// OnProbe is called after each probe, from Run's goroutine, with the IDs of the pair; nil allowed.
	OnProbe func(prefill, decode string, r ProbeResult, err error)
}

// probePause is the shortest time between two probes.
const probePause = 250 * time.Millisecond

// Run probes until ctx ends, and then returns nil. It returns an error at once if Picker is none of [New].
func (p *Prober) Run(ctx context.Context) error {
	own, ok := p.Picker.(*picker)
	if !ok {
		return errors.New("pick: a Prober needs a picker of New")
	}
	c := &own.cooldowns
	c.probers.Add(1)
	defer c.probers.Add(-1)
	for ctx.Err() == nil {
		t, release, wait, wake := c.next(time.Now())
		if t != nil {
			p.try(ctx, own, t)
			release()
			wait, wake = probePause, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-wake:
		case <-ctx.Done():
		}
		timer.Stop()
	}
	return nil
}

// next returns an attempt that ran out of time and whose pair is to be probed now; release must follow. If there is
// none, it returns how long to wait for one, and what is closed sooner if one comes.
func (c *cooldowns) next(now time.Time) (t *timedOut, release func(), wait time.Duration, wake <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sweep(now)
	c.n.Store(int64(len(c.m)))
	wait = time.Hour
	for key, x := range c.m {
		if !c.decides(key, &x) || x.timedOut.tried() {
			continue
		}
		if left := x.due(now).Sub(now); left < wait {
			t, wait = x.timedOut, max(left, 0)
		}
	}
	if t != nil && wait == 0 {
		var all []*timedOut
		for _, key := range keysOf(t.prefill, t.decode) {
			if x := c.m[key]; x.timedOut != nil {
				all = append(all, x.timedOut)
			}
		}
		return t, c.trying(all), 0, nil
	}
	if c.wake == nil {
		c.wake = make(chan struct{})
	}
	return nil, nil, wait, c.wake
}

// decides reports whether a probe decides what becomes of an engine or a pair at which requests ran out of time. None
// does once probes have served where requests then ran out of time, and none is needed for an engine whose pair is
// probed. The caller holds c.mu.
func (c *cooldowns) decides(key cooldownKey, x *cooldown) bool {
	if x.timedOut == nil || x.timedOut.refused || !x.passed.IsZero() {
		return false
	}
	pair := c.m[cooldownKey{x.timedOut.prefill, x.timedOut.decode}]
	return x.hung || key.decode != "" || !pair.hung && pair.passed.IsZero()
}

// due returns when to probe.
func (x *cooldown) due(now time.Time) time.Time {
	switch {
	case x.timedOut.probed.IsZero():
		return now
	case x.hung:
		return x.until
	}
	return x.timedOut.probed.Add(timeoutKept / 8)
}

// ProbeResult is what came of a probe of a [Prober].
type ProbeResult string

// The results.
const (
	ProbeServed   ProbeResult = "served"
	ProbeTimedOut ProbeResult = "timed_out"
	ProbeFailed   ProbeResult = "failed" // another fault of an engine
	ProbeRefused  ProbeResult = "refused"
)

// try sends a probe through a pair, and lets the picker learn from it.
func (p *Prober) try(ctx context.Context, own *picker, t *timedOut) {
	c := &own.cooldowns
	var ends [2]*discovery.Endpoint
	snap := own.set.Load()
	for i := range snap.Endpoints {
		switch e := &snap.Endpoints[i]; {
		case e.Phase != discovery.PhaseReady:
		case e.ID == t.prefill:
			ends[0] = e
		case e.ID == t.decode:
			ends[1] = e
		}
	}
	began := time.Now()
	if ends[0] == nil || ends[1] == nil { // they are back when they are ready
		c.probed(t, began, ProbeFailed, nil)
		return
	}
	limited, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	var header http.Header
	if p.Header != nil {
		header = p.Header()
	}
	err := errNoFlow
	for _, f := range p.flowsOf(t.connector) {
		if err = f.Probe(limited, *ends[0], *ends[1], t.model, header); err != nil {
			break
		}
	}
	if ctx.Err() != nil {
		return
	}
	var result ProbeResult
	e, _ := errors.AsType[*pdflow.Error](err)
	switch {
	case err == nil:
		result = ProbeServed
	case e != nil && e.Code == pdflow.CodeTimeout:
		result = ProbeTimedOut
	case e != nil && e.EngineFault():
		result = ProbeFailed
	default:
		result = ProbeRefused
	}
	c.probed(t, began, result, e)
	if p.OnProbe != nil {
		p.OnProbe(t.prefill, t.decode, result, err)
	}
}

// flowsOf returns the flows of a connector. Where a reload has taken that away, requests go to the pair by the others,
// and so do probes: a pair that waited for a probe of the connector that has gone would wait for ever.
func (p *Prober) flowsOf(name string) []*pdflow.Flow {
	flows := slices.DeleteFunc(slices.Clone(p.Flows), func(f *pdflow.Flow) bool {
		return f.Connector().Traits().Name != name
	})
	if len(flows) == 0 {
		return p.Flows
	}
	return flows
}

func (p *Prober) timeout() time.Duration {
	if p.Timeout > 0 {
		return p.Timeout
	}
	return 10 * time.Second
}

var errNoFlow = errors.New("pick: the prober has no flow")

// probed learns from a probe. e is not nil if it was late.
func (c *cooldowns) probed(t *timedOut, began time.Time, result ProbeResult, e *pdflow.Error) {
	late := &timedOut{prefill: t.prefill, decode: t.decode, model: t.model, connector: t.connector, since: began}
	switch {
	case result != ProbeTimedOut:
	case e.Leg == pdflow.LegDecode:
		c.handoffFailed(t.prefill, t.decode, 0, late)
	default:
		c.fault(cooldownKey{engine: t.prefill}, 0, 0, late)
		c.fault(cooldownKey{t.prefill, t.decode}, 0, 0, late) // if both legs ran, it is the pair's
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for _, key := range keysOf(t.prefill, t.decode) {
		x, ok := c.m[key]
		switch {
		case !ok || x.timedOut == nil || x.timedOut.refused || !x.passed.IsZero():
			continue
		case result == ProbeServed && x.hung:
			x.passed = began
			x.recover(now)
		case result == ProbeServed:
			x.passed, x.timedOut, x.bodies, x.peers = began, nil, distinct{}, distinct{}
		case result == ProbeRefused:
			x.timedOut.refused = true
		default:
			if x.timedOut.probed = now; x.hung && now.After(x.until) { // it has failed otherwise than by a timeout
				x.until = now.Add(x.length)
			}
		}
		c.m[key] = x
	}
}
