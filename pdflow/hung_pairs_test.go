// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// hungFleet is engines of which some pairs hang: P answers, and D, which knows its P, sends nothing.
type hungFleet struct {
	flow   *pdflow.Flow
	picker pdflow.Picker

	mu      sync.Mutex
	hangs   func(prefill, decode string, prompt string) bool
	refuses bool           // synthetic probes
	legs    map[string]int // of decode and of clients, by pair
	probes  int            // legs of synthetic probes
	most    int            // clients' decode legs that hung at the same time
	hung    int            // those that hang now
	hit     int            // clients who waited for a timeout
	wrong   int            // clients who got an error
	begun   time.Time
	last    time.Duration // when the last client came who waited for a timeout
}

func (f *hungFleet) RoundTrip(r *http.Request) (*http.Response, error) {
	body, _ := io.ReadAll(r.Body)
	p, d := r.Header.Get("X-From"), r.URL.Host
	if p == "" {
		p, d = d, ""
	}
	f.mu.Lock()
	probe := !strings.Contains(string(body), `"user"`)
	hangs := f.hangs(p, d, string(body))
	switch {
	case probe:
		f.probes++
	case d != "":
		f.legs[p+" "+d]++
	}
	if hangs && !probe {
		f.hung++
		f.most = max(f.most, f.hung)
	}
	refuses := f.refuses && probe
	f.mu.Unlock()
	switch {
	case refuses:
		return replies(http.StatusUnauthorized)(r)
	case hangs:
		<-r.Context().Done()
		f.mu.Lock()
		defer f.mu.Unlock()
		if !probe {
			f.hung--
		}
		return nil, r.Context().Err()
	}
	return after(20*time.Millisecond, replies(200))(r)
}

func newHungFleet(t *testing.T, names string, limits config.Timeouts,
	hangs func(prefill, decode, prompt string) bool) *hungFleet {
	t.Helper()
	var eps []discovery.Endpoint
	for name := range strings.FieldsSeq(names) {
		role := discovery.RolePrefill
		if name[0] == 'd' {
			role = discovery.RoleDecode
		}
		e := endpoint(t, "http://"+name, role)
		e.ID = name
		eps = append(eps, e)
	}
	f := &hungFleet{hangs: hangs, legs: map[string]int{}, begun: time.Now(),
		picker: pick.New(setOf(t, eps...), pick.Random(), pick.WithSeed(1))}
	c := &fake{decode: func(s *connector.Session, _ *connector.PrefillResult, l *connector.Leg) error {
		l.SetHeader("X-From", s.Prefill.ID)
		return nil
	}}
	var err error
	f.flow, err = pdflow.New(c, f.picker, pdflow.WithTransport(f), pdflow.WithTimeouts(limits))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.flow.Shutdown(context.Background())) })
	return f
}

// A probe of a caller's own goes through the pair that it names, and says what came of it.
func TestAProbeSaysWhetherAPairServes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newHungFleet(t, "p0 d0 d1", transfer20, onePair)
		ends := map[string]discovery.Endpoint{}
		for _, name := range []string{"p0", "d0", "d1"} {
			ends[name] = endpoint(t, "http://"+name, map[byte]discovery.Role{'p': discovery.RolePrefill,
				'd': discovery.RoleDecode}[name[0]])
			e := ends[name]
			e.ID = name
			ends[name] = e
		}
		require.NoError(t, f.flow.Probe(t.Context(), ends["p0"], ends["d1"], "m", nil))
		began := time.Now()
		require.ErrorIs(t, f.flow.Probe(t.Context(), ends["p0"], ends["d0"], "m", nil), pdflow.CodeTimeout)
		require.InDelta(t, 20*time.Second, time.Since(began), float64(time.Second), "Timeouts.Transfer")
		ctx, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		require.ErrorIs(t, f.flow.Probe(ctx, ends["p0"], ends["d0"], "m", nil), pdflow.CodeTimeout, "the caller's")
		f.refuses = true
		require.ErrorIs(t, f.flow.Probe(t.Context(), ends["p0"], ends["d1"], "m", nil), pdflow.CodePrefillRejected)
		require.Empty(t, f.legs, "no client's")
	})
}

// serve sends a client's request each time a period is over, for some time, and waits for all.
func (f *hungFleet) serve(period, lasts time.Duration, prompt func(n int) string) {
	var all sync.WaitGroup
	for n := range int(lasts / period) {
		all.Go(func() { f.client(prompt(n)) })
		time.Sleep(period)
	}
	all.Wait()
}

func (f *hungFleet) client(prompt string) {
	began := time.Now()
	resp, err := f.flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions,
		Body: fmt.Appendf(nil, `{"prompt":%q,"stream":true,"user":"somebody"}`, prompt)})
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(began) > time.Second {
		f.hit++
		f.last = max(f.last, began.Sub(f.begun))
	}
	if err != nil {
		f.wrong++
	}
}

// probing starts a prober; stop must follow.
func (f *hungFleet) probing(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	prober := pick.Prober{Picker: f.picker, Flows: []*pdflow.Flow{f.flow}}
	running.Go(func() { assert.NoError(t, prober.Run(ctx)) })
	return func() { cancel(); running.Wait() }
}

// reset begins a new count.
func (f *hungFleet) reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.legs, f.most, f.probes, f.hit, f.wrong, f.begun, f.last = map[string]int{}, 0, 0, 0, 0, time.Now(), 0
}

// shortly is a shorter time for the race detector, which takes ten times as long.
func shortly(d time.Duration) time.Duration {
	if raceDetector {
		return d / 6
	}
	return d
}

func numbered(n int) string { return fmt.Sprint("client ", n) }

var transfer20 = config.Timeouts{Transfer: 20 * time.Second}

func onePair(p, d, _ string) bool { return p == "p0" && d == "d0" }

// One of four pairs hangs for good while both of its engines are ready; at random, it gets a quarter of the clients. In
// half an hour, with cooldowns of 8 s and a limit of 20 s for decode, 751 of 7,200 clients got an error, and 19 of 90.
// After Timeouts.Decode of 600 s it were 341 of 1,800; half of them come before the first of them has run out of time.
func TestAPairThatHangsCostsFewClients(t *testing.T) {
	for name, c := range map[string]struct {
		limits config.Timeouts
		probes bool
		period time.Duration
		most   int           // clients that wait for a timeout
		wrong  int           // clients that get an error
		last   time.Duration // when the last of them comes, at the latest
	}{
		"transfer, prober":         {transfer20, true, time.Second / 4, 25, 0, 25 * time.Second},
		"transfer, no prober":      {transfer20, false, time.Second / 4, 35, 0, time.Hour},
		"transfer, prober, idle":   {transfer20, true, 20 * time.Second, 2, 0, 3 * time.Minute},
		"no transfer, prober":      {config.Timeouts{}, true, time.Second, 160, 160, 605 * time.Second},
		"no transfer, no prober":   {config.Timeouts{}, false, time.Second, 165, 165, time.Hour},
		"transfer, probes refused": {transfer20, true, time.Second / 4, 35, 0, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newHungFleet(t, "p0 p1 d0 d1", c.limits, onePair)
				f.refuses = strings.Contains(name, "refused")
				stop := func() {}
				if c.probes {
					stop = f.probing(t)
				}
				f.serve(c.period, shortly(30*time.Minute), numbered)
				stop()
				t.Log("hit", f.hit, "wrong", f.wrong, "last", f.last, "probe legs", f.probes, f.legs)
				assert.LessOrEqual(t, f.hit, c.most)
				assert.LessOrEqual(t, f.wrong, c.wrong)
				assert.LessOrEqual(t, f.last, c.last)
				assert.LessOrEqual(t, f.probes, 2*15, "each at P and D")
			})
		})
	}
}

// Without a prober the first client after a cooldown tries the pair, and no other before its end.
func TestOneClientAtATimeTriesWhatHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newHungFleet(t, "p0 p1 d0 d1", transfer20, onePair)
		f.serve(time.Second/4, time.Minute, numbered)
		f.reset()
		var all sync.WaitGroup
		for range 200 { // as many come at the same time, again and again
			for range 20 { // some of them at the pair
				all.Go(func() { f.client("x") })
			}
			time.Sleep(5 * time.Second)
		}
		all.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		require.Equal(t, 1, f.most)
		require.Positive(t, f.hit)
		require.Zero(t, f.wrong)
	})
}

// What hung and is well again serves again as soon as something shows it, and nobody has to wait for that.
func TestWhatHungServesAgainOnceItIsWell(t *testing.T) {
	for name, hung := range map[string]func(p, d, prompt string) bool{
		"pair":           onePair,
		"decode engine":  func(_, d, _ string) bool { return d == "d0" },
		"prefill engine": func(p, _, _ string) bool { return p == "p0" },
	} {
		for _, probes := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", prober ", probes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					limits := config.Timeouts{Transfer: 20 * time.Second, Prefill: 20 * time.Second}
					f := newHungFleet(t, "p0 p1 d0 d1", limits, hung)
					if probes {
						defer f.probing(t)()
					}
					f.serve(time.Second/2, 10*time.Minute, numbered)
					t.Log("hit", f.hit, "last", f.last, f.legs)
					assert.Less(t, f.hit, 45, "half of the clients of the first 20 s, and a few")
					f.mu.Lock()
					f.hangs = func(string, string, string) bool { return false }
					f.mu.Unlock()
					f.reset()
					f.serve(time.Second/2, 10*time.Minute, numbered)
					assert.Zero(t, f.hit)
					for _, pair := range []string{"p0 d0", "p0 d1", "p1 d0", "p1 d1"} {
						assert.Greater(t, f.legs[pair], 120, "%s of %v", pair, f.legs)
					}
				})
			})
		}
	}
}

// Where everything hangs, nothing is better than anything else: requests go on to all.
func TestAFleetThatHangsWholeIsUsedAllTheSame(t *testing.T) {
	for _, names := range []string{"p0 d0", "p0 p1 d0 d1"} {
		synctest.Test(t, func(t *testing.T) {
			f := newHungFleet(t, names, transfer20, func(_, d, _ string) bool { return d != "" })
			defer f.probing(t)()
			f.serve(time.Second, 10*time.Minute, numbered)
			for p := range strings.FieldsSeq(names) {
				for d := range strings.FieldsSeq(names) {
					if p[0] == 'p' && d[0] == 'd' {
						assert.Greater(t, f.legs[p+" "+d], 30, "%s %s of %v", p, d, f.legs)
					}
				}
			}
		})
	}
}

// A client whose prompts run out of time wherever they go takes no pair away from others. Each of its prompts is
// another one.
func TestAClientWhosePromptsTimeOutTakesNoPairAway(t *testing.T) {
	for _, probes := range []bool{true, false} {
		for name, prefill := range map[string]bool{"at prefill": true, "at decode": false} {
			t.Run(fmt.Sprint(name, ", prober ", probes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					limits := config.Timeouts{Transfer: 20 * time.Second, Prefill: 20 * time.Second}
					f := newHungFleet(t, "p0 p1 d0 d1", limits, func(_, d, prompt string) bool {
						return (d == "") == prefill && strings.Contains(prompt, "huge")
					})
					if probes {
						defer f.probing(t)()
					}
					var attack sync.WaitGroup
					attack.Go(func() {
						f.serve(time.Second/8, 5*time.Minute, func(n int) string { return fmt.Sprint("huge ", n) })
					})
					f.serve(time.Second/4, 5*time.Minute, numbered)
					attack.Wait()
					t.Log(f.legs)
					for _, pair := range []string{"p0 d0", "p0 d1", "p1 d0", "p1 d1"} {
						assert.Greater(t, f.legs[pair], 150, "%s of %v", pair, f.legs)
					}
				})
			})
		}
	}
}

// Short probes pass, and clients' prompts hang: probes are not believed for long.
func TestProbesThatPassWhereClientsHangAreNotBelieved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newHungFleet(t, "p0 p1 d0 d1", transfer20, func(p, d, prompt string) bool {
			return onePair(p, d, prompt) && strings.Contains(prompt, "client")
		})
		stop := f.probing(t)
		f.serve(time.Second/4, shortly(30*time.Minute), numbered)
		stop()
		t.Log("hit", f.hit, "wrong", f.wrong, "last", f.last, "probe legs", f.probes, f.legs)
		require.Less(t, f.hit, 60)
	})
}

// Nobody but the probe's caller is there for a panic of a host's transport, and that may be a timer.
func TestAProbeWhoseResponsePanicsFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeFleet(t, &fake{}, "p0 d0", config.Retry{}, func(host string, _ int) response {
			if host == "p0" {
				return replies(200)
			}
			return func(*http.Request) (*http.Response, error) {
				token := "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":null}]}\n\n"
				return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}},
					ContentLength: -1, Body: io.NopCloser(io.MultiReader(strings.NewReader(token), panics{}))}, nil
			}
		})
		p, d := endpoint(t, "http://p0", discovery.RolePrefill), endpoint(t, "http://d0", discovery.RoleDecode)
		require.ErrorIs(t, f.flow.Probe(t.Context(), p, d, "m", nil), pdflow.CodeInternal)
		synctest.Wait()
	})
}

type panics struct{}

func (panics) Read([]byte) (int, error) { panic("boom") }
