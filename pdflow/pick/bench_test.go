// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"maps"
	"net/http"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

var sizes = []int{10, 1000, 10_000}

// sharing is how many connectors share a picker, by the name of the benchmark's variant: mostly one.
var sharing = map[string]int{"": 1, "/two": 2}

// flows binds a picker to n connectors.
func flows(p pdflow.Picker, n int) []pdflow.Picker {
	conns := []*protocol{sameTP(), {name: "a", rules: []attr.PairRule{attr.Multiple("tpSize")}}}
	bound := make([]pdflow.Picker, n)
	for i := range bound {
		bound[i] = bind(p, conns[i])
	}
	return bound
}

// inputs are requests of 2 KB in 64 sessions with a prompt each.
func inputs(b *testing.B) []*pdflow.PickInput {
	all := make([]*pdflow.PickInput, 64)
	for i := range all {
		prompt := strings.Repeat("words of prompt "+strconv.Itoa(i)+" ", 110)
		all[i] = &pdflow.PickInput{Request: request(b, prompt, 100),
			Header: http.Header{"X-Session-Id": {strconv.Itoa(i)}}}
	}
	return all
}

func zoned(n int) []discovery.Endpoint {
	eps := many(n/2, n/2)
	for i := range eps {
		eps[i].Zone = "z" + strconv.Itoa(i%3)
	}
	return eps
}

// variants runs a benchmark for each policy, with one connector and with two.
func variants(b *testing.B, run func(b *testing.B, policy pick.Policy, connectors int)) {
	for _, name := range pick.Policies() {
		policy, _ := pick.ParsePolicy(name)
		for _, variant := range slices.Sorted(maps.Keys(sharing)) {
			b.Run(name+variant, func(b *testing.B) { run(b, policy, sharing[variant]) })
		}
	}
}

// BenchmarkPick is Pick and Done, on all processors at once.
func BenchmarkPick(b *testing.B) {
	variants(b, func(b *testing.B, policy pick.Policy, connectors int) {
		in := inputs(b)
		for _, n := range sizes {
			b.Run(strconv.Itoa(n), func(b *testing.B) {
				p := flows(pick.New(newFleet(b, zoned(n)...).Set, policy), connectors)
				out := &pdflow.Outcome{}
				for i := range in {
					mustPick(b, p[i%len(p)], in[i]).Done(out)
				}
				b.ReportAllocs()
				b.ResetTimer()
				b.RunParallel(func(pb *testing.PB) {
					for i := 0; pb.Next(); i++ {
						x, err := p[i%len(p)].Pick(context.Background(), in[i%len(in)])
						if err != nil {
							b.Error(err)
							return
						}
						x.Done(out)
					}
				})
			})
		}
	})
}

// BenchmarkMemory is what a picker holds for 10,000 endpoints, beyond the snapshot. Its time is what the first pick of
// each connector takes.
func BenchmarkMemory(b *testing.B) {
	const n = 10_000
	variants(b, func(b *testing.B, policy pick.Policy, connectors int) {
		f, in := newFleet(b, zoned(n)...), inputs(b)
		var p []pdflow.Picker
		renew := func() {
			p = flows(pick.New(f.Set, policy), connectors)
			for i := range p {
				mustPick(b, p[i], in[i])
			}
		}
		before := heap()
		renew()
		holds := float64(heap() - before)
		for b.Loop() {
			renew()
		}
		b.ReportMetric(holds/n, "B/endpoint")
		runtime.KeepAlive(p)
	})
}

// BenchmarkReplace is the latency of picks while a snapshot of 10,000 endpoints is replaced ten times a second, each
// time with other engines in it: to be compared with the calm half of the same run.
func BenchmarkReplace(b *testing.B) {
	variants(b, func(b *testing.B, policy pick.Policy, connectors int) {
		in := inputs(b)
		lists := [2][]discovery.Endpoint{zoned(10_000), zoned(9_900)}
		f := newFleet(b, lists[0]...)
		p := flows(pick.New(f.Set, policy), connectors)
		for i := range in {
			mustPick(b, p[i%len(p)], in[i]).Done(&pdflow.Outcome{})
		}
		next := 1 // a list that is the set's already would change nothing
		for b.Loop() {
			calm := paced(b, p, in, 2*time.Second)
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				tick := time.NewTicker(100 * time.Millisecond)
				defer tick.Stop()
				for {
					select {
					case <-tick.C:
						f.replace(lists[next%2]...)
						next++
					case <-stop:
						return
					}
				}
			})
			busy := paced(b, p, in, 2*time.Second)
			close(stop)
			wg.Wait()
			for _, q := range []struct {
				name string
				at   float64
			}{{"p50", .5}, {"p99", .99}, {"p999", .999}} {
				b.ReportMetric(calm(q.at), "calm-"+q.name+"-ns")
				b.ReportMetric(busy(q.at), "busy-"+q.name+"-ns")
			}
		}
	})
}

// paced picks 5,000 times a second and returns the quantiles of the picks' own time.
func paced(b *testing.B, p []pdflow.Picker, in []*pdflow.PickInput, d time.Duration) func(float64) float64 {
	var took []time.Duration
	out := &pdflow.Outcome{}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
		for i := range 5 {
			began := time.Now()
			x, err := p[i%len(p)].Pick(context.Background(), in[(len(took)+i)%len(in)])
			took = append(took, time.Since(began))
			if err != nil {
				b.Fatal(err)
			}
			x.Done(out)
		}
	}
	slices.Sort(took)
	return func(q float64) float64 { return float64(took[int(q*float64(len(took)-1))]) }
}
