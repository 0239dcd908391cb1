// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"math"
	"time"
)

// A transfer of KV may never end while both engines are well: a notice that is lost, a write that was not posted. D
// then waits for minutes, or for ever. So once P has answered, D has Timeouts.Transfer for its first event. A response
// that is no stream has its first byte when its last token is made: when the time is over, a synthetic probe tells
// whether the pair transfers.

// phaseTransfer is the phase of an error that says that D, which has what P answered, did not begin in time.
const phaseTransfer = "transfer"

// transferProbe is the longest that such a probe may take.
const transferProbe = 10 * time.Second

// decodeLimit is for how long D may go on without its first event.
func (a *attempt) decodeLimit() time.Duration {
	most, p := a.f.limits.Decode, a.p.Load()
	if a.f.limits.Transfer <= 0 || p == nil || !a.s.Request.Stream && a.x.sender.steps != nil {
		return most
	}
	left := max(time.Until(p.At.Add(a.f.limits.Transfer)), 1)
	if most > 0 && most < left {
		return most
	}
	a.transfers.Store(true)
	return left
}

// mayGenerate reports whether D, whose time to begin is over, may be at work on a response that is no stream: then it
// has the rest of Timeouts.Decode. Its caller is the watch.
func (a *attempt) mayGenerate() bool {
	if !a.transfers.Load() || a.s.Request.Stream || a.silent.Streams() {
		return false
	}
	p, d := a.s.Prefill, a.s.Decode
	if !a.f.pairProbes.Well(a.ctx, p.ID+" "+d.ID, func(outer context.Context) (well bool) {
		ctx, stop := context.WithTimeout(outer, transferProbe)
		defer stop()
		_ = a.guard(LegDecode, "probe", func() error {
			err := a.f.Probe(ctx, p, d, a.s.Request.Model, a.x.probeHeader())
			// any other answer says nothing of the transfer, and that the client has left nothing of the pair
			well = err == nil || outer.Err() == nil && !errors.Is(err, CodeTimeout)
			return nil
		})
		return well
	}) && a.watch.Over() && a.ctx.Err() == nil {
		return false
	}
	a.transfers.Store(false)
	left := time.Duration(math.MaxInt64 / 2)
	if most := a.f.limits.Decode; most > 0 {
		left = time.Until(a.p.Load().At.Add(most))
	}
	a.watch.Extend(max(left, 1))
	return true
}
