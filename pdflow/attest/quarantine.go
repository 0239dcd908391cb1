// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Quarantine is a picker that keeps requests away from engines and pairs that corrupt KV, by asking another picker to
// avoid them as it avoids engines that failed the request. So no role is ever emptied: where only such engines are
// left, they serve. A [Prober] says which they are, and goes on to probe them.
type Quarantine struct {
	inner
	tells source                       // nil: the inner picker does not tell its candidates
	state *atomic.Pointer[quarantined] // of all quarantines that were bound from one
}

// inner is the picker that is asked.
type inner = pick.Around

// source is a picker that tells its candidates.
type source interface {
	Candidates(in *pdflow.PickInput, c *pick.Candidates) (tells bool)
}

// quarantined is what to keep away from.
type quarantined struct {
	engines []string
	named   []Suspect // engines, with their role
	pairs   []Suspect
}

// NewQuarantine returns a picker around another one. It keeps away from nothing before a prober has it among its
// options.
func NewQuarantine(p pdflow.Picker) *Quarantine {
	return quarantine(p, new(atomic.Pointer[quarantined]))
}

// Bind binds the inner picker. What the quarantine keeps away from is the same for all flows.
func (q *Quarantine) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	return quarantine(q.inner.Bind(c, serving), q.state)
}

func quarantine(p pdflow.Picker, state *atomic.Pointer[quarantined]) *Quarantine {
	tells, _ := p.(source)
	return &Quarantine{pick.NewAround(p), tells, state}
}

// Adopt keeps requests away from what another quarantine keeps them away from now, and from nothing else, until a
// prober says otherwise; with nil, from nothing. A picker that replaces another one begins so, and a quarantine whose
// prober has ended is released so.
func (q *Quarantine) Adopt(other *Quarantine) {
	if other == nil {
		q.state.Store(nil)
		return
	}
	q.state.Store(other.state.Load())
}

// Suspects returns what requests are kept away from now: engines, which have one ID, and pairs, which have two. It is
// safe for concurrent use.
func (q *Quarantine) Suspects() []Suspect {
	s := q.state.Load()
	if s == nil {
		return nil
	}
	return slices.Concat(s.named, s.pairs)
}

func (q *Quarantine) set(named []Finding) {
	if len(named) == 0 {
		q.state.Store(nil)
		return
	}
	s := &quarantined{}
	for _, f := range named {
		switch {
		case f.Decode == "":
			s.engines, s.named = append(s.engines, f.Prefill), append(s.named, f.Suspect)
		case f.Prefill == "":
			s.engines, s.named = append(s.engines, f.Decode), append(s.named, f.Suspect)
		default:
			s.pairs = append(s.pairs, f.Suspect)
		}
	}
	q.state.Store(s)
}

// Pick asks the inner picker. Where that chooses a pair that is named, it is asked again without that pair's decode
// engine, and then without its prefill engine. Nothing is kept away from requests that one engine serves alone: no KV
// is moved for them.
func (q *Quarantine) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	s := q.state.Load()
	if s == nil || in.Single {
		return q.inner.Pick(ctx, in)
	}
	return q.around(ctx, in, s)
}

// around picks another pair than those that are named, if it can.
func (q *Quarantine) around(ctx context.Context, in *pdflow.PickInput, s *quarantined) (pdflow.Pick, error) {
	x := *q.Prepare(ctx, in)
	x.Avoid = slices.Concat(in.Avoid, s.engines)
	pick, err := q.inner.Pick(ctx, &x)
	if err != nil || !s.bad(pick) {
		return pick, err
	}
	for _, e := range []discovery.Endpoint{pick.Decode, pick.Prefill} {
		y := x
		y.Avoid = append(slices.Clone(x.Avoid), e.ID)
		other, err := q.inner.Pick(ctx, &y)
		if err != nil {
			continue
		}
		if !s.bad(other) && !s.worse(other, in) {
			abandon(pick)
			return other, nil
		}
		abandon(other)
	}
	return pick, nil
}

func (s *quarantined) bad(p pdflow.Pick) bool {
	return slices.Contains(s.pairs, Suspect{p.Prefill.ID, p.Decode.ID})
}

// worse reports whether a choice has an engine that is named, or that failed this request: then the pair is no worse.
func (s *quarantined) worse(p pdflow.Pick, in *pdflow.PickInput) bool {
	return slices.ContainsFunc([]string{p.Prefill.ID, p.Decode.ID}, func(id string) bool {
		return in.Avoids(id) || slices.Contains(s.engines, id)
	})
}

// abandon gives a choice back that no request was sent to.
func abandon(p pdflow.Pick) {
	if p.Done != nil {
		p.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}, Final: true})
	}
}

// Candidates are the inner picker's, without those that are named: see pick.WithCandidates.
func (q *Quarantine) Candidates(in *pdflow.PickInput, c *pick.Candidates) (tells bool) {
	if q.tells == nil {
		return false
	}
	s := q.state.Load()
	if s == nil {
		return q.tells.Candidates(in, c)
	}
	x := *in
	x.Avoid = slices.Concat(in.Avoid, s.engines)
	tells = q.tells.Candidates(&x, c)
	for _, pair := range s.pairs {
		for i := range c.Decode {
			for k := range c.Prefill {
				if (Suspect{c.Prefill[k].Endpoint.ID, c.Decode[i].Endpoint.ID}) == pair {
					c.Decode[i].Apart |= 1 << k
				}
			}
		}
	}
	return tells
}
