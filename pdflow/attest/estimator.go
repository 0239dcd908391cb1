// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"cmp"
	"math"
	"slices"
)

// Suspect is what may corrupt KV: a prefill engine (Decode is ""), a decode engine (Prefill is ""), or a pair whose
// engines are right with all others. The strings are endpoint IDs.
type Suspect struct{ Prefill, Decode string }

// String returns "prefill P", "decode D" or "pair P D".
func (s Suspect) String() string {
	switch {
	case s.Decode == "":
		return "prefill " + s.Prefill
	case s.Prefill == "":
		return "decode " + s.Decode
	}
	return "pair " + s.Prefill + " " + s.Decode
}

// Covers reports whether a transfer of a pair goes through the suspect.
func (s Suspect) Covers(prefill, decode string) bool {
	return (s.Prefill == "" || s.Prefill == prefill) && (s.Decode == "" || s.Decode == decode)
}

// Finding is a suspect that was named.
type Finding struct {
	Suspect
	Wrong, Probes int // of the probes that go through it, when it was named
	Clean         int // right probes in a row since its last wrong one
}

// Rate returns the share of the suspect's transfers that were wrong, 0 to 1.
func (f Finding) Rate() float64 { return float64(f.Wrong) / float64(max(1, f.Probes)) }

// ReleaseAfter returns how many right probes in a row acquit the suspect: with as many, a fault of the rate that was
// seen would have shown with a probability of 99 %; at least 32.
func (f Finding) ReleaseAfter() int {
	return max(32, int(math.Ceil(math.Log(100)/max(f.Rate(), 0.001))))
}

// EstimatorOptions are the settings of an [Estimator].
type EstimatorOptions struct {
	// Noise is the probability that a probe is wrong although nothing is at fault, for example by kernels that break
	// ties differently beyond the tolerance; default 0.0001.
	Noise float64
	// Window is how many of the newest results count; default 8192.
	Window int
}

// Estimator chooses the pairs of probes, and names the suspect that explains the wrong ones. It holds the results of
// the newest probes and nothing else, so that it can be tested without engines. It is not safe for concurrent use.
//
// It surveys the fleet by group testing: each round of the larger role's size asks every engine once, and every pair
// comes once before any comes again. A wrong result at (p, d) may be p's fault, d's, or the pair's. The estimator then
// probes p with other decode engines, d with other prefill engines, and the pair itself, and compares the likelihoods:
// see judge.
type Estimator struct {
	o EstimatorOptions
	// what one wrong and one right result add to the log odds of a fault, by its rate
	perWrong, perRight [len(rates)]float64

	prefills, decodes []string
	fits              func(prefill, decode string) bool

	window []result // a ring
	at     int
	cells  map[Suspect]*cell // by pair
	rows   map[string][]*cell
	cols   map[string][]*cell

	named  []*Finding
	open   []hypothesis // not named, but worth probing, the likeliest first
	survey int          // the next place in the survey
	turn   int          // probes that were chosen
	again  int          // of these, probes of what is named
}

// result is one probe of a pair.
type result struct {
	*cell
	right bool
}

// cell counts the results of one pair in the window.
type cell struct {
	pair         Suspect
	wrong, right int
}

// NewEstimator returns an estimator without a fleet: see [Estimator.SetFleet].
func NewEstimator(o EstimatorOptions) *Estimator {
	if o.Noise <= 0 || o.Noise >= 0.5 {
		o.Noise = 1e-4
	}
	if o.Window <= 0 {
		o.Window = 8192
	}
	e := &Estimator{o: o, cells: map[Suspect]*cell{}, rows: map[string][]*cell{}, cols: map[string][]*cell{}}
	for i, q := range rates {
		e.perWrong[i], e.perRight[i] = math.Log(q/o.Noise), math.Log((1-q)/(1-o.Noise))
	}
	return e
}

// SetFleet names the engines that can be probed now. fits reports whether two of them can form a pair; nil: all can.
// Call it when the fleet changes. What is known of engines that left is forgotten.
func (e *Estimator) SetFleet(prefills, decodes []string, fits func(prefill, decode string) bool) {
	e.prefills, e.decodes, e.fits = slices.Clone(prefills), slices.Clone(decodes), fits
	if e.fits == nil {
		e.fits = func(string, string) bool { return true }
	}
	here := func(s Suspect) bool {
		return (s.Prefill == "" || slices.Contains(prefills, s.Prefill)) &&
			(s.Decode == "" || slices.Contains(decodes, s.Decode))
	}
	e.named = slices.DeleteFunc(e.named, func(f *Finding) bool { return !here(f.Suspect) })
	e.forget(func(pair Suspect) bool { return !here(pair) })
	e.judge()
}

// pairs returns how many pairs there are at most.
func (e *Estimator) pairs() int { return len(e.prefills) * len(e.decodes) }

// Next returns the pair to probe next; ok is false if no two engines can form one.
func (e *Estimator) Next() (prefill, decode string, ok bool) {
	e.turn++
	if n := len(e.named); n > 0 && e.turn%max(2, 8/n) == 0 { // do they still corrupt?
		e.again++
		if c := e.rarest(e.named[e.again%n].Suspect); c != nil {
			return c.Prefill, c.Decode, true
		}
	}
	if len(e.open) > 0 && e.turn%4 != 1 { // the survey goes on meanwhile, so that no other fault hides behind this one
		if c := e.rarest(e.open[e.turn%min(3, len(e.open))].Suspect); c != nil {
			return c.Prefill, c.Decode, true
		}
	}
	var second *Suspect
	for range e.pairs() {
		pair := e.surveyed(e.survey)
		e.survey = (e.survey + 1) % e.pairs()
		if !e.can(pair) {
			continue
		}
		if !e.explained(pair, nil) {
			return pair.Prefill, pair.Decode, true
		}
		if second == nil {
			second = &pair
		}
	}
	if second == nil {
		return "", "", false
	}
	return second.Prefill, second.Decode, true // all that is left is named
}

// surveyed returns the pair of a place in the survey: a diagonal of the matrix of pairs, then the next one.
func (e *Estimator) surveyed(place int) Suspect {
	if n := len(e.prefills); n >= len(e.decodes) {
		return Suspect{e.prefills[place%n], e.decodes[(place%n+place/n)%len(e.decodes)]}
	}
	n := len(e.decodes)
	return Suspect{e.prefills[(place%n+place/n)%len(e.prefills)], e.decodes[place%n]}
}

func (e *Estimator) can(pair Suspect) bool {
	return pair.Prefill != pair.Decode && e.fits(pair.Prefill, pair.Decode)
}

// explained reports whether a wrong result of the pair tells nothing, since something in it is named already. What is
// named as except does not count; nil: all does.
func (e *Estimator) explained(pair Suspect, except *Suspect) bool {
	return slices.ContainsFunc(e.named, func(f *Finding) bool {
		return (except == nil || f.Suspect != *except) && f.Covers(pair.Prefill, pair.Decode)
	})
}

// rarest returns the pair with the fewest results among those that go through a suspect, and through nothing else that
// is named; nil if there is none.
func (e *Estimator) rarest(s Suspect) *Suspect {
	var best *Suspect
	fewest := math.MaxInt
	prefills, decodes := e.prefills, e.decodes
	if s.Prefill != "" {
		prefills = []string{s.Prefill}
	}
	if s.Decode != "" {
		decodes = []string{s.Decode}
	}
	for _, p := range prefills {
		for _, d := range decodes {
			pair := Suspect{p, d}
			if !e.can(pair) || e.explained(pair, &s) {
				continue
			}
			n := 0
			if c := e.cells[pair]; c != nil {
				n = c.wrong + c.right
			}
			if n < fewest {
				best, fewest = &pair, n
			}
		}
	}
	return best
}

// Record takes the result of one probe, and returns what it made the estimator name, and what it made it acquit.
func (e *Estimator) Record(prefill, decode string, right bool) (named, released []Finding) {
	pair := Suspect{prefill, decode}
	e.add(pair, right)
	for _, f := range e.named {
		if !f.Covers(prefill, decode) {
			continue
		}
		switch {
		case right:
			f.Clean++
		case !e.explained(pair, &f.Suspect): // else it may be the other's fault
			f.Clean = 0
		}
		if f.Clean >= f.ReleaseAfter() {
			released = append(released, *f)
		}
	}
	for _, f := range released {
		e.named = slices.DeleteFunc(e.named, func(x *Finding) bool { return x.Suspect == f.Suspect })
		e.forget(func(pair Suspect) bool { return f.Covers(pair.Prefill, pair.Decode) })
	}
	if !right || len(e.open) > 0 || len(released) > 0 {
		named = e.judge()
	}
	return named, released
}

// Named returns what is named now, in the order in which it was.
func (e *Estimator) Named() []Finding {
	out := make([]Finding, len(e.named))
	for i, f := range e.named {
		out[i] = *f
	}
	return out
}

// Suspects returns what may be at fault and is not named, the likeliest first.
func (e *Estimator) Suspects() []Suspect {
	out := make([]Suspect, len(e.open))
	for i, h := range e.open {
		out[i] = h.Suspect
	}
	return out
}

// add puts a result into the window, and takes the oldest out of a full one.
func (e *Estimator) add(pair Suspect, right bool) {
	c := e.cells[pair]
	if c == nil {
		c = &cell{pair: pair}
		e.cells[pair] = c
		e.rows[pair.Prefill] = append(e.rows[pair.Prefill], c)
		e.cols[pair.Decode] = append(e.cols[pair.Decode], c)
	}
	c.count(right, 1)
	if len(e.window) < e.o.Window {
		e.window = append(e.window, result{c, right})
		return
	}
	old := e.window[e.at]
	old.count(old.right, -1)
	e.window[e.at] = result{c, right}
	e.at = (e.at + 1) % len(e.window)
}

func (c *cell) count(right bool, by int) {
	if right {
		c.right += by
	} else {
		c.wrong += by
	}
}

// forget drops the results of some pairs.
func (e *Estimator) forget(some func(pair Suspect) bool) {
	kept := make([]result, 0, len(e.window))
	for i := range e.window { // the oldest first, so that the ring begins at 0 again
		if r := e.window[(e.at+i)%len(e.window)]; !some(r.pair) {
			kept = append(kept, r)
		}
	}
	e.window, e.at = nil, 0
	clear(e.cells)
	clear(e.rows)
	clear(e.cols)
	for _, r := range kept {
		e.add(r.pair, r.right)
	}
}

func byScore(a, b hypothesis) int { return cmp.Compare(b.score, a.score) }
