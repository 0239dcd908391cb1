// SPDX-License-Identifier: Apache-2.0

package states

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

var interleavings atomic.Int64

// Each event happens at each point, in each order, streamed or not, through Do, the handler and steps. Where two legs
// run at one time, Do reaches each pair of their points from both sides, and after the event either leg goes first.
// Then each event happens once more at each point of what follows a failed first attempt; and where P's leg runs on, of
// what follows a client that has left.
func TestEveryEventAtEveryPoint(t *testing.T) {
	before := interleavings.Load()
	t.Run("all", func(t *testing.T) {
		for _, s := range slices.Concat(scenarios, transferring) {
			for _, entrance := range entrances {
				for _, stream := range []bool{false, true} {
					if !stream && s.transfer > 0 {
						continue
					}
					if !thorough && !stream && entrance != byDo {
						continue
					}
					name := fmt.Sprintf("%s/%s/stream=%t", s.name, entrance, stream)
					t.Run(name, func(t *testing.T) {
						t.Parallel()
						explore(t, path{scenario: s, entrance: entrance, stream: stream})
					})
				}
			}
		}
	})
	n := interleavings.Load() - before
	t.Logf("%d interleavings", n)
	stated(t, "**%s interleavings**", int(n))
}

// stated checks that docs/reliability.md has a number that a whole run has counted.
func stated(t *testing.T, format string, n int) {
	t.Helper()
	if t.Failed() || !thorough || flagGiven("test.run") {
		return
	}
	page, err := os.ReadFile("../../docs/reliability.md")
	require.NoError(t, err)
	want := fmt.Sprintf(format, fmt.Sprintf("%d,%03d", n/1000, n%1000))
	if !strings.Contains(string(page), want) {
		t.Errorf("docs/reliability.md does not say %q", want)
	}
}

// node is a moment from which events are tried.
type node struct {
	moves []move
	state seen
}

func key(moves []move) string { return fmt.Sprint(moves) }

// run runs one path and reports rules that it breaks.
func run(t *testing.T, p path) (r record, ok bool) {
	t.Helper()
	breaches := bubble(t, setting{protocol: p.scenario, attempts: p.attempts}, func(w *world) { r = p.follow(w) })
	interleavings.Add(1)
	if r.strange != "" {
		breaches = append(breaches, r.strange)
	}
	for _, b := range slices.Compact(breaches) {
		t.Errorf("%s\n  moves: %v\n  client: %s, attempts: %d, engines: %v", b, r.moves, r.told, r.attempts,
			strings.Join(r.engines, "; "))
	}
	return r, len(breaches) == 0
}

// explore tries all events at all nodes of a scenario's undisturbed runs, and of the runs after a failed attempt.
func explore(t *testing.T, base path) {
	nodes := trunk(t, base, nil, served)
	for _, n := range nodes {
		disturb(t, base, n)
	}
	if !thorough && base.entrance != byHandler {
		return
	}
	firsts := []move{"!P answers 500", "!D resets"}
	if base.scenario.finishes {
		firsts = append(firsts, clientLeaves)
	}
	for _, first := range firsts {
		want := served
		if first == clientLeaves {
			want = gone
		}
		for _, n := range nodes {
			if slices.Contains(n.state.possible, byMove[first]) && computing(n, first) {
				for _, later := range trunk(t, base, append(slices.Clone(n.moves), first), want) {
					if len(later.moves) > len(n.moves) {
						disturb(t, base, later)
					}
				}
				break
			}
		}
	}
}

// clientLeaves is an event after which P's leg may run on.
const clientLeaves move = "!the client leaves"

// computing reports whether the leg that is to fail computes.
func computing(n node, e move) bool {
	return strings.Contains(n.state.waiting, byMove[e].role+" "+string(atCompute))
}

// trunk returns the moments of runs that begin with these moves and go on undisturbed. With two legs at one time there
// are several such runs: the lead may go ahead by any number of steps.
func trunk(t *testing.T, base path, moves []move, want string) []node {
	leads, most := []string{prefillRole}, 1
	if base.scenario.beside() {
		leads, most = []string{prefillRole, decodeRole}, len(points)
		if len(moves) > 0 || !thorough || base.entrance != byDo {
			leads, most = []string{prefillRole, decodeRole}, 3
		}
	}
	var nodes []node
	known := map[string]bool{}
	for _, lead := range leads {
		for turns := range most {
			p := base
			p.moves, p.lead, p.turns = moves, lead, turns
			r, ok := run(t, p)
			if !ok {
				return nodes
			}
			if r.told != want {
				t.Errorf("an undisturbed request got %s: %v", r.told, r.moves)
			}
			for i := len(moves); i < len(r.moves); i++ {
				if k := key(r.moves[:i]); !known[k] {
					known[k] = true
					nodes = append(nodes, node{r.moves[:i], r.states[i]})
				}
			}
		}
	}
	return nodes
}

// disturb tries all events at a node.
func disturb(t *testing.T, base path, n node) {
	for _, e := range n.state.possible {
		leads := []string{prefillRole}
		if base.scenario.beside() && thorough && base.entrance == byDo {
			leads = append(leads, decodeRole)
		}
		for _, lead := range leads {
			p := base
			p.moves, p.lead = append(slices.Clone(n.moves), e.move()), lead
			r, ok := run(t, p)
			if ok {
				expectOf(t, &base.scenario, e, n, r)
			}
		}
	}
}

// expectOf checks what the client got of an event.
func expectOf(t *testing.T, s *scenario, e *event, n node, r record) {
	t.Helper()
	if r.strange != "" {
		return
	}
	allowed := e.means
	switch {
	case n.state.told != "":
		allowed = []string{n.state.told}
	case slices.Contains(n.moves, clientLeaves):
		allowed = []string{gone}
	case n.state.first:
		allowed = e.later
	case e.role != "" && slices.ContainsFunc(n.moves, func(m move) bool { return byMove[m] != nil }):
		allowed = slices.Concat(allowed, lastAttempt[e.role])
	case s.transfer > 0 && e.hangsBeforeItsFirstEvent(n):
		allowed = goesOn
	}
	if slices.Contains(allowed, r.told) {
		return
	}
	t.Errorf("%s, at %q: the client got %q, not %q\n  moves: %v\n  attempts: %d, engines: %v", e.move(),
		n.state.waiting, r.told, allowed, r.moves, r.attempts, strings.Join(r.engines, "; "))
}

// hangsBeforeItsFirstEvent reports whether the event is a D that begins nothing: a transfer that never ends.
func (e *event) hangsBeforeItsFirstEvent(n node) bool {
	return e.role == decodeRole && e.fault.hangs && slices.ContainsFunc([]point{atDial, atAccept, atCompute, atHead},
		func(at point) bool { return strings.Contains(n.state.waiting, decodeRole+" "+string(at)) })
}

// lastAttempt is what the client may get if an engine of the last attempt fails: D's own status is the client's to see.
var lastAttempt = map[string][]string{
	prefillRole: {"502 prefill_failed", "502 transfer_missing"},
	decodeRole:  {"502 decode_failed", "500 decode_failed", "503 decode_failed", "500 c", "502 c", "503 c"},
}
