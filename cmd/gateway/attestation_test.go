// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
)

// corrupting is two pairs, of which the second D flips bits of all KV that it gets, and the ModelServer over them with
// lines of its spec.
func corrupting(t *testing.T) (right, wrong *enginesim.Engine, yaml func(spec string) string) {
	t.Helper()
	p1, right := startPair(t)
	p2, wrong := startPair(t)
	wrong.Inject(enginesim.Fault{Kind: enginesim.FaultCorruptKV, Leg: enginesim.LegDecode, Count: -1})
	return right, wrong, func(spec string) string { return gatewayYAML("") + simYAML(spec, p1, right, p2, wrong) }
}

// servesAs asks for a completion, and reports whether its text is that of one engine alone.
func (p *program) servesAs(alone *enginesim.Engine, prompt string) bool {
	body := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":8}`, prompt)
	status, _, got := p.complete(body)
	_, _, want := do(p.t, http.MethodPost, alone.URL()+"/v1/completions", body)
	return status == http.StatusOK && texts(p.t, got) == texts(p.t, want)
}

func attesting(mode, every string) string {
	return "  attestation: {mode: " + mode + ", every: " + every + "}\n"
}

// The gateway names the engine, tells it, and sends requests elsewhere.
func TestAnEngineThatCorruptsKVIsQuarantined(t *testing.T) {
	for mode, quarantined := range map[string]bool{"report": false, "quarantine": true} {
		t.Run(mode, func(t *testing.T) {
			right, corrupts, yaml := corrupting(t)
			g := start(t, yaml(attesting(mode, "1ms")))
			g.shows("pd_attest_named{")
			g.shows(fmt.Sprintf(`pd_decode=%q`, strings.TrimPrefix(corrupts.URL(), "http://")))
			g.logs(1, "corrupts KV") // after the quarantine
			wrong := 0
			for i := range 12 {
				if !g.servesAs(right, fmt.Sprint(i, " is asked")) {
					wrong++
				}
			}
			require.Equal(t, quarantined, wrong == 0, "%d of 12 responses were wrong", wrong)
		})
	}
}

// A reload that changes something about a model replaces the prober, and with a new connect timeout the pool, too. The
// quarantine holds all the while, also where the new prober sends no probe for long, until attestation is turned off.
func TestAQuarantineHoldsOverReloads(t *testing.T) {
	t.Parallel()
	right, corrupts, yaml := corrupting(t)
	config := func(mode, every, connect string, attempts int) string {
		return yaml(fmt.Sprintf("  kvConnector: {type: nixl, timeouts: {connect: %s, healthCheck: 30s}, retry: "+
			"{maxAttempts: %d}}\n", connect, attempts) + attesting(mode, every))
	}
	g := start(t, config("quarantine", "1ms", "30s", 2))
	g.logs(1, "corrupts KV")
	var asked, wrong atomic.Int64
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if !g.servesAs(right, fmt.Sprintf("%d of %d is asked", i, c)) {
					wrong.Add(1)
				}
				asked.Add(1)
			}
		})
	}
	for i := range 8 { // a new pool, and the same
		g.configure(config("quarantine", []string{"1h", "1ms"}[i/4], []string{"31s", "31s", "30s"}[i%3], 3+i))
		g.signals <- syscall.SIGHUP
		g.logs(i+1, reloadedLine)
		g.logs(i+1, `msg="a ModelServer ends"`)
		g.shows(fmt.Sprintf(`pd_decode=%q`, strings.TrimPrefix(corrupts.URL(), "http://")))
		before := asked.Load()
		require.Eventually(t, func() bool { return asked.Load() > before+20 }, time.Minute, time.Millisecond)
	}
	require.Zero(t, wrong.Load(), "of %d", asked.Load())
	g.configure(config("off", "1h", "30s", 2))
	g.signals <- syscall.SIGHUP
	require.Eventually(t, func() bool { return wrong.Load() > 0 }, time.Minute, time.Millisecond)
	close(stop)
	clients.Wait()
}
