// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"cmp"
	"math"
	"slices"
)

// A suspect is named if both hold.
const (
	// what explains all results best is e^nameAbove (10,000) times as likely as what explains them best without it
	nameAbove = 9.21
	// no accident repeats so often
	nameWrong = 3
)

// A suspect whose odds are below e^probeAbove is not worth a probe of its own: the survey goes on.
const probeAbove = -9

// most is how many faults at once the estimator looks for. What is named is not among them.
const most = 4

// The odds, before a probe, that any engine of a role is at fault, and that any pair is. Pairs are the rarer: otherwise
// two pairs of a D would explain the results as well as D itself, where there are but two P.
const (
	engineOdds = 0.01
	pairOdds   = engineOdds / 4
)

// rates are the shares of transfers that a fault may corrupt. One that always corrupts does not quite always show.
var rates = [...]float64{0.005, 0.01, 0.03, 0.1, 0.3, 0.99}

// hypothesis is that one suspect is at fault.
type hypothesis struct {
	Suspect
	wrong, right int     // of its cells, without those that another fault explains
	score        float64 // log odds against: all that is wrong in these cells is noise
}

// judge names whom the results convict, and notes in open whom they make worth probing.
//
// The likelihood of w wrong and r right results in the cells of a suspect that corrupts the share q of transfers is
// q^w (1-q)^r, and noise^w (1-noise)^r if nothing is at fault there. The quotient, averaged over rates and times the
// prior odds, is the suspect's odds. The likeliest suspect explains its cells, and the others are judged by the rest,
// and so on. The sum of their scores says how well they explain the whole. A suspect is named if that sum falls by more
// than nameAbove without it: then noise, its rivals (the same wrong results are in the cells of a P, a D and a pair)
// and all combinations of them are too unlikely.
func (e *Estimator) judge() (named []Finding) {
	for {
		all := e.suspects()
		chosen, sum := e.explain(all, nil)
		var convicted *hypothesis
		for i := range chosen {
			h := &chosen[i]
			if h.wrong < nameWrong {
				continue
			}
			if _, without := e.explain(all, &h.Suspect); sum-without >= nameAbove {
				convicted = h
				break
			}
		}
		if convicted == nil {
			e.note(all)
			return named
		}
		f := &Finding{Suspect: convicted.Suspect, Wrong: convicted.wrong, Probes: convicted.wrong + convicted.right}
		e.named = append(e.named, f)
		named = append(named, *f)
	}
}

// note keeps the suspects that are worth probing, those that are likelier first.
func (e *Estimator) note(all []hypothesis) {
	e.open = e.open[:0]
	for _, h := range all {
		if h.score > probeAbove {
			e.open = append(e.open, h)
		}
	}
	slices.SortStableFunc(e.open, byScore)
}

// suspects returns all that has a wrong result which nothing that is named explains, in a fixed order.
func (e *Estimator) suspects() []hypothesis {
	seen := map[Suspect]bool{}
	var all []hypothesis
	for _, c := range e.cells {
		if c.wrong == 0 || e.explained(c.pair, nil) {
			continue
		}
		for _, s := range []Suspect{{c.pair.Prefill, ""}, {"", c.pair.Decode}, c.pair} {
			if !seen[s] {
				seen[s] = true
				all = append(all, e.weigh(s, nil))
			}
		}
	}
	slices.SortFunc(all, func(a, b hypothesis) int {
		return cmp.Or(cmp.Compare(a.Prefill, b.Prefill), cmp.Compare(a.Decode, b.Decode))
	})
	return all
}

// explain chooses, the likeliest first, the suspects that together explain the results, and returns the sum of their
// scores. It leaves out one suspect, or none.
func (e *Estimator) explain(all []hypothesis, without *Suspect) (chosen []hypothesis, sum float64) {
	rest := slices.Clone(all)
	for len(chosen) < most {
		best := -1
		for i, h := range rest {
			if h.score > 0 && (without == nil || h.Suspect != *without) && (best < 0 || h.score > rest[best].score) {
				best = i
			}
		}
		if best < 0 {
			break
		}
		chosen, sum = append(chosen, rest[best]), sum+rest[best].score
		rest = slices.Delete(rest, best, best+1)
		newest := chosen[len(chosen)-1].Suspect
		for i := range rest {
			if rest[i].meets(newest) {
				rest[i] = e.weigh(rest[i].Suspect, chosen)
			}
		}
	}
	return chosen, sum
}

// meets reports whether two suspects have a pair in common.
func (s Suspect) meets(x Suspect) bool {
	return (s.Prefill == "" || x.Prefill == "" || s.Prefill == x.Prefill) &&
		(s.Decode == "" || x.Decode == "" || s.Decode == x.Decode)
}

// weigh computes a suspect's odds from the results that nothing named and nothing chosen explains.
func (e *Estimator) weigh(s Suspect, chosen []hypothesis) hypothesis {
	h := hypothesis{Suspect: s}
	var cells []*cell
	var prior float64
	switch {
	case s.Decode == "":
		cells, prior = e.rows[s.Prefill], engineOdds/float64(len(e.prefills))
	case s.Prefill == "":
		cells, prior = e.cols[s.Decode], engineOdds/float64(len(e.decodes))
	default:
		cells, prior = []*cell{e.cells[s]}, pairOdds/float64(e.pairs())
	}
	for _, c := range cells {
		if e.explained(c.pair, nil) || slices.ContainsFunc(chosen, func(x hypothesis) bool {
			return x.Covers(c.pair.Prefill, c.pair.Decode)
		}) {
			continue
		}
		h.wrong, h.right = h.wrong+c.wrong, h.right+c.right
	}
	h.score = e.odds(h.wrong, h.right) + math.Log(prior)
	return h
}

// odds returns the logarithm of the likelihood of a fault, averaged over rates, divided by that of noise.
func (e *Estimator) odds(wrong, right int) float64 {
	var logs [len(rates)]float64
	top := math.Inf(-1)
	for i := range rates {
		logs[i] = float64(wrong)*e.perWrong[i] + float64(right)*e.perRight[i]
		top = max(top, logs[i])
	}
	sum := 0.0
	for _, l := range logs {
		sum += math.Exp(l - top)
	}
	return top + math.Log(sum/float64(len(rates)))
}
