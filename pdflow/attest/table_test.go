// SPDX-License-Identifier: Apache-2.0

package attest_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/attest"
)

const tableHead = `# KV attestation: how soon a fault is named

<!-- Written by: PDKIT_UPDATE=1 go test -run TheTable -timeout 60m ./pdflow/attest -->

[pdflow/attest](../attestation.md) probes pairs and names the engine or pair that corrupts KV. Each trial is one fault, drawn by a seed, among 8 prefill and 8 decode engines.

## Simulated engines

enginesim over HTTP, with connector nixl: the KV really moves, and a fault flips one bit of it. Each probe is a request through one pair and one to another engine alone.

| what corrupts | share of its transfers | trials | named | named wrongly | probes: half of the trials | 95 % | most |
|---|---|---|---|---|---|---|---|
`

const drawnHead = `
## Drawn results

The estimator alone, whose probes are drawn: more trials, and rarer faults. One pair of 64 has a 64th of the probes, so a fault of 1 % of its transfers shows for the first time after 6,400 probes in the mean, whoever looks for it.

| what corrupts | share of its transfers | trials | named | named wrongly | probes: half of the trials | 95 % | most |
|---|---|---|---|---|---|---|---|
`

// TestTheTable writes docs/reliability/attestation.md with PDKIT_UPDATE=1. It takes some minutes.
func TestTheTable(t *testing.T) {
	if os.Getenv("PDKIT_UPDATE") != "1" {
		t.Skip("PDKIT_UPDATE=1 writes docs/reliability/attestation.md, in some minutes")
	}
	var b strings.Builder
	b.WriteString(tableHead)
	f := startEngines(t, nixlConn(t), enginesim.Config{}, 8, 8)
	order := []string{"prefill engine", "decode engine", "pair"}
	began := time.Now()
	for _, share := range []float64{1, 0.1, 0.01} {
		for _, kind := range order {
			if share == 0.01 && kind == "pair" {
				continue // 200,000 probes
			}
			row(&b, kind, share, 20, func(seed uint64) (attest.Suspect, []attest.Finding, int) {
				defer f.mend()
				s := kinds[kind](newFleet(seed, 8, 8, attest.EstimatorOptions{}))
				f.corrupt(s, share)
				named, probes := until(t, f.prober(t), 10_000)
				return s, named, probes
			})
			t.Logf("%s, %v: %s", kind, share, time.Since(began))
		}
	}
	const clean = 100_000
	named, probes := until(t, f.prober(t), clean)
	require.Empty(t, named)
	fmt.Fprintf(&b, "| nothing | | 1 | 0 | %d of %d probes | | | |\n", len(named), probes)
	t.Logf("clean: %s", time.Since(began))

	b.WriteString(drawnHead)
	for _, share := range []float64{1, 0.1, 0.01} {
		for _, kind := range order {
			row(&b, kind, share, 200, func(seed uint64) (attest.Suspect, []attest.Finding, int) {
				x := newFleet(seed, 8, 8, attest.EstimatorOptions{})
				s := kinds[kind](x)
				x.faults[s] = share
				return s, x.until(100_000), x.probes
			})
		}
	}
	for _, noise := range []float64{0, 1e-4, 3e-4} {
		bad := 0
		for seed := range uint64(20) {
			x := newFleet(seed, 8, 8, attest.EstimatorOptions{})
			x.noise = noise
			bad += min(1, len(x.until(clean)))
		}
		what := "nothing"
		if noise > 0 {
			what = fmt.Sprintf("nothing, but %g %% of all probes are wrong", 100*noise)
		}
		fmt.Fprintf(&b, "| %s | | 20 of %d probes | | %d | | | |\n", what, clean, bad)
	}
	require.NoError(t, os.MkdirAll("../../docs/reliability", 0o755))
	require.NoError(t, os.WriteFile("../../docs/reliability/attestation.md", []byte(b.String()), 0o644))
}

func row(b *strings.Builder, kind string, share float64, trials int,
	trial func(seed uint64) (attest.Suspect, []attest.Finding, int)) {
	named, wrong := 0, 0
	var took []int
	for seed := range uint64(trials) {
		s, found, probes := trial(5000 + seed)
		took = append(took, probes)
		switch {
		case len(found) == 1 && found[0].Suspect == s:
			named++
		case len(found) > 0:
			wrong++
		}
	}
	slices.Sort(took)
	fmt.Fprintf(b, "| one %s | %g %% | %d | %d | %d | %d | %d | %d |\n", kind, 100*share, trials, named, wrong,
		took[len(took)/2], took[len(took)*95/100-1], took[len(took)-1])
}
