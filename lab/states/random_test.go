// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"flag"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("rapid.nofailfile", "true") // a failure is printed, with the seed that makes it again
	if thorough && !flagGiven("rapid.checks") {
		_ = flag.Set("rapid.checks", "1000")
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			_, _ = os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
	}
	os.Exit(code)
}

func flagGiven(name string) (given bool) {
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	return given
}

// kind is what a random step does. Small numbers come first when a failure is shrunk, so that a failing sequence keeps
// only the events that it needs.
type kind int

const (
	goOn     kind = iota // a leg that waits goes on
	begin                // a client sends a request
	fails                // an engine fails
	leaves               // a client leaves
	sleeps               // time passes
	vanishes             // an engine leaves discovery, or all are back
	drains               // a drain or a shutdown begins
	kinds
)

// weights are how often each kind comes, of all.
var weights = [kinds]int{goOn: 30, begin: 8, fails: 6, leaves: 2, sleeps: 3, vanishes: 2, drains: 1}

type step struct {
	Kind  kind
	Which int
}

var anyStep = rapid.Custom(func(t *rapid.T) step {
	n := rapid.IntRange(0, 51).Draw(t, "kind")
	k := goOn
	for n >= weights[k] {
		n -= weights[k]
		k++
	}
	return step{k, rapid.IntRange(0, 63).Draw(t, "which")}
})

const mostClients = 4

// Random sequences of events over several requests at a time keep all rules of the ledger. The flags -rapid.checks and
// -rapid.seed make more runs, and one run again.
func TestRandomSequencesOfEvents(t *testing.T) {
	var runs, steps atomic.Int64
	for _, s := range slices.Concat(scenarios, transferring, rescuing) {
		t.Run(s.name, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				list := rapid.OneOf(rapid.SliceOfN(anyStep, 1, 20), rapid.SliceOfN(anyStep, 30, 100)).Draw(rt, "steps")
				runs.Add(1)
				steps.Add(int64(len(list)))
				var did []string
				slowly := setting{protocol: s, connect: 2 * leaseTime}
				breaches := bubble(t, slowly, func(w *world) { did = w.random(list) })
				if len(breaches) > 0 {
					rt.Fatalf("%s\nafter: %s", strings.Join(slices.Compact(breaches), "\n"), strings.Join(did, ", "))
				}
			})
		})
	}
	t.Logf("%d random runs of %d steps", runs.Load(), steps.Load())
}

// random does the steps that are possible, and then lets everything end.
func (w *world) random(list []step) (did []string) {
	w.start(entrances[0], w.protocol.rescues > 0 || w.protocol.transfer > 0, true)
	for _, s := range list {
		synctest.Wait()
		if what := w.step(s); what != "" {
			did = append(did, what)
		}
	}
	w.vanishQuietly("")
	w.settle()
	if w.draining == nil && w.meter.count("pd.rescues") > 0 {
		w.fillPlaces()
		w.settle()
	}
	return did
}

// settle lets all requests end.
func (w *world) settle() {
	for range 2000 {
		synctest.Wait()
		if !slices.ContainsFunc(w.clients, func(c *client) bool { return !c.isOver() }) {
			return
		}
		if waiting := w.waiting(); len(waiting) > 0 {
			waiting[0].let(nil)
			continue
		}
		select {
		case <-w.changed:
		default:
		}
		if !w.idle() {
			break
		}
	}
	w.breach("a request does not end")
}

// step does one step, and says what it did; "" if it is not possible now.
func (w *world) step(s step) string {
	waiting := w.waiting()
	switch s.Kind {
	case goOn:
		if len(waiting) > 0 {
			l := waiting[s.Which%len(waiting)]
			l.let(nil)
			return l.String() + " goes on"
		}
	case begin:
		if len(w.clients) < mostClients {
			named := [8][2]string{{"", "d1:1"}, {"p2:1", ""}}[s.Which/8]
			stream := s.Which%2 == 1 || w.protocol.transfer > 0
			c := w.startAt(entrances[s.Which%3], stream, s.Which%8 > 1, named[0], named[1])
			return c.name + " asks by " + c.entrance
		}
	case fails:
		var possible []*event
		if len(waiting) == 0 {
			return ""
		}
		l := waiting[s.Which%len(waiting)]
		c := w.clientOf(l.prompt)
		for _, e := range c.failures() {
			if e.role != "" && e.suits(l, c != nil && c.stream) {
				possible = append(possible, e)
			}
		}
		if len(possible) > 0 {
			e := possible[s.Which%len(possible)]
			what := l.String() + " " + e.name
			l.let(&e.fault)
			return what
		}
	case leaves:
		if c := w.clients[s.Which%len(w.clients)]; !c.isOver() {
			c.leave(context.Canceled)
			return c.name + " leaves"
		}
	case sleeps:
		d := time.Duration(s.Which) * time.Second / 2
		time.Sleep(d)
		return d.String() + " pass"
	case vanishes:
		id := ""
		if s.Which%5 > 0 {
			id = w.endpoints[s.Which%5-1].ID
		}
		w.vanishQuietly(id)
		return strconv.Quote(id) + " leaves discovery"
	case drains:
		if w.draining == nil && s.Which%4 == 0 {
			w.shutdown(time.Duration(s.Which) * time.Second)
			return "a shutdown begins"
		}
	}
	return ""
}

func (w *world) vanishQuietly(id string) {
	w.vanish(id)
	synctest.Wait()
}

func (l *leg) String() string {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	return l.role + " of " + l.prompt + " " + string(l.at)
}
