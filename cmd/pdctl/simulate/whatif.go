// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"math"
	"slices"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// Shown is what clients saw of a run. Times are in seconds. ITL is the mean time between two tokens of a response, and
// its quantiles are over responses.
type Shown struct {
	Requests int     `json:"requests"`
	TTFTP50  float64 `json:"ttftP50"`
	TTFTP99  float64 `json:"ttftP99"`
	ITLP50   float64 `json:"itlP50"`
	ITLP99   float64 `json:"itlP99"`
	Goodput  float64 `json:"goodput"` // share of the requests that met both objectives, of those with a known TTFT
	Split    float64 `json:"split"`   // share of the requests that two engines served
	Refused  float64 `json:"refused"`
	Failed   float64 `json:"failed"`
}

// shown is what one client saw.
type shown struct {
	class                  decide.Class // TTFT and ITL are its objectives
	ttft, itl              float64      // 0: not known
	split, refused, failed bool
}

func (s *shown) good(slo SLO) bool {
	most := objectives(decide.Class{TTFT: slo.TTFT, ITL: slo.TPOT}, s.class)
	return s.ttft <= most.TTFT.Seconds() && s.itl <= most.ITL.Seconds()
}

func newShown(all []shown, slo SLO) Shown {
	out := Shown{Requests: len(all)}
	var ttft, itl []float64
	unknown := 0
	for i := range all {
		s := &all[i]
		if s.split {
			out.Split++
		}
		switch {
		case s.refused:
			out.Refused++
			continue
		case s.failed:
			out.Failed++
			continue
		case s.ttft == 0: // it was not streamed
			unknown++
		case s.good(slo):
			out.Goodput++
		}
		if s.ttft > 0 {
			ttft = append(ttft, s.ttft)
		}
		if s.itl > 0 {
			itl = append(itl, s.itl)
		}
	}
	for _, n := range [...]*float64{&out.Split, &out.Refused, &out.Failed} {
		*n /= float64(max(len(all), 1))
	}
	out.Goodput /= float64(max(len(all)-unknown, 1))
	slices.Sort(ttft)
	slices.Sort(itl)
	out.TTFTP50, out.TTFTP99 = quantile(ttft, .5), quantile(ttft, .99)
	out.ITLP50, out.ITLP99 = quantile(itl, .5), quantile(itl, .99)
	return out
}

// Came is what clients saw when it was recorded. Goodput counts by the objectives that requests had; slo, as far as it
// says something, takes their place.
func (r *Recorded) Came(slo SLO) Shown { return newShown(r.came, slo) }

// Replay plays the recorded requests in virtual time, with another fleet or policy, or with the recorded ones. by.Class
// has the objectives of requests that have none of their own, and goodput counts as that of Came.
func (r *Recorded) Replay(ctx context.Context, f Fleet, by Deciding, slo SLO, seed uint64) (Shown, error) {
	all, err := r.replay(ctx, f, by, seed)
	return newShown(all, slo), err
}

func (r *Recorded) replay(ctx context.Context, f Fleet, by Deciding, seed uint64) ([]shown, error) {
	if err := f.playable(); err != nil {
		return nil, err
	}
	out, err := decidedOn(ctx, f, r.Trace, by, seed)
	if err != nil {
		return nil, err
	}
	all := make([]shown, 0, len(out.Outcomes))
	for i := range out.Outcomes {
		o := &out.Outcomes[i]
		e, _, _ := r.Trace.at(i)
		all = append(all, shown{class: objectives(e.class, by.Class), ttft: o.TTFT(), itl: o.TPOT(),
			split: o.Prefill >= 0, refused: o.Refused, failed: o.Failed})
	}
	return all, nil
}

const (
	fittings    = 8    // replays
	damped      = 0.7  // since times of waiting grow faster than speeds
	fittedLeast = 20   // requests whose median counts
	fittedFirst = 2000 // requests that are played
)

// Fit scales the fleet's speeds until a replay of the recorded set-up gives the medians that were recorded: of ITL, and
// of TTFT where two engines served, and where one did. What decisions knew of speeds has errors that a decider may have
// and a prediction should not: it was learnt while other requests waited, too.
func (r *Recorded) Fit(ctx context.Context, seed uint64) error {
	whole := r.Trace.requests
	r.Trace.requests = min(whole, fittedFirst)
	defer func() { r.Trace.requests = whole }()
	p, d := &r.Fleet.PrefillSpec.StepTime, &r.Fleet.DecodeSpec.StepTime
	terms := [3][]*float64{{&d.Base, &d.PerRequest, &d.PerContextToken}, {&p.PerPrefillToken}, {&d.PerPrefillToken}}
	if r.By.learns { // of the short prompts that one engine serves little is learnt: engines are taken to be alike
		d.PerPrefillToken = p.PerPrefillToken
		terms[1], terms[2] = append(terms[1], &d.PerPrefillToken), nil
	}
	want, best, least := medians(r.came), r.Fleet, math.Inf(1)
	for range fittings {
		all, err := r.replay(ctx, r.Fleet, r.By, seed)
		if err != nil {
			return err
		}
		got, off := medians(all), 0.
		for i := range want {
			if want[i] > 0 && got[i] > 0 {
				off += math.Abs(math.Log(want[i] / got[i]))
			}
		}
		if off < least {
			best, least = r.Fleet, off
		}
		for i := range want {
			if want[i] > 0 && got[i] > 0 {
				for _, x := range terms[i] {
					*x *= min(2, max(.5, math.Pow(want[i]/got[i], damped)))
				}
			}
		}
	}
	r.Fleet = best
	return nil
}

// medians are of ITL, and of the TTFT of requests that two engines served and that one did; 0: there are too few.
func medians(all []shown) (m [3]float64) {
	var times [3][]float64
	for i := range all {
		s := &all[i]
		ttft := 2
		if s.split {
			ttft = 1
		}
		if !s.refused && !s.failed && s.ttft > 0 {
			times[ttft] = append(times[ttft], s.ttft)
		}
		if s.itl > 0 {
			times[0] = append(times[0], s.itl)
		}
	}
	for i := range times {
		if len(times[i]) >= fittedLeast {
			m[i] = median(times[i])
		}
	}
	return m
}

// objectives are a class's own, where it has some.
func objectives(class, other decide.Class) decide.Class {
	if class.TTFT == 0 {
		class.TTFT = other.TTFT
	}
	if class.ITL == 0 {
		class.ITL = other.ITL
	}
	return class
}
