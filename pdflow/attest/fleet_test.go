// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/pdkit/pdkit/pdflow/attest"
)

// fleet is 8 P x 8 D without engines: probes whose result is drawn.
type fleet struct {
	*attest.Estimator
	rng               *rand.Rand
	prefills, decodes []string
	faults            map[attest.Suspect]float64 // the share of transfers that each corrupts
	noise             float64                    // the share of probes that are wrong for no fault
	probes            int
}

func newFleet(seed uint64, p, d int, o attest.EstimatorOptions) *fleet {
	f := &fleet{Estimator: attest.NewEstimator(o), rng: rand.New(rand.NewPCG(seed, 1)),
		faults: map[attest.Suspect]float64{}}
	for i := range p {
		f.prefills = append(f.prefills, fmt.Sprintf("p%d", i))
	}
	for i := range d {
		f.decodes = append(f.decodes, fmt.Sprintf("d%d", i))
	}
	f.rng.Shuffle(p, func(i, j int) { f.prefills[i], f.prefills[j] = f.prefills[j], f.prefills[i] })
	f.rng.Shuffle(d, func(i, j int) { f.decodes[i], f.decodes[j] = f.decodes[j], f.decodes[i] })
	f.SetFleet(f.prefills, f.decodes, nil)
	return f
}

// kinds are the suspects that a trial draws one of.
var kinds = map[string]func(f *fleet) attest.Suspect{
	"prefill engine": func(f *fleet) attest.Suspect {
		return attest.Suspect{Prefill: f.prefills[f.rng.IntN(len(f.prefills))]}
	},
	"decode engine": func(f *fleet) attest.Suspect {
		return attest.Suspect{Decode: f.decodes[f.rng.IntN(len(f.decodes))]}
	},
	"pair": func(f *fleet) attest.Suspect {
		return attest.Suspect{Prefill: f.prefills[f.rng.IntN(len(f.prefills))],
			Decode: f.decodes[f.rng.IntN(len(f.decodes))]}
	},
}

// probe sends one and returns what it named and released.
func (f *fleet) probe() (named, released []attest.Finding) {
	p, d, ok := f.Next()
	if !ok {
		panic("no pair")
	}
	f.probes++
	right := f.rng.Float64() >= f.noise
	for s, rate := range f.faults {
		if s.Covers(p, d) && f.rng.Float64() < rate {
			right = false
		}
	}
	return f.Record(p, d, right)
}

// until probes until something is named, at most so often.
func (f *fleet) until(most int) (named []attest.Finding) {
	for range most {
		if named, _ = f.probe(); len(named) > 0 {
			return named
		}
	}
	return nil
}
