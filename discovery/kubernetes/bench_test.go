// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/pdkit/pdkit/discovery"
)

// One of 10,000 engines changes: the time until the new list is ready to be published, and what is kept of each engine.
// Each iteration includes the event, which makes an endpoint of one pod (of a slice of 100, in the service modes).
func BenchmarkOneOf10000Changes(b *testing.B) {
	const engines = 10_000
	for _, c := range []struct {
		name string
		o    Options
	}{
		{"pods", Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole}}},
		{"services", Options{Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}},
		{"services and pods", Options{Selector: Selector{PDGroup: byRole}, Services: []Service{{Name: "prefill"}}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			o := c.o.clone()
			m := newMaker(&o)
			nothing := func() {}
			pods, parts := m.podTable(nothing, nothing), m.sliceTable(nothing, nothing)
			before := heap()
			for i := 0; i < engines && (len(o.Services) == 0 || m.join); i++ {
				_ = pods.Add(enginePod(named(podName(i)), onNode, annotated("pdkit.dev/bootstrapPort", "8998")))
			}
			for i := 0; i < engines && len(o.Services) > 0; i += 100 {
				_ = parts.Add(sliceOf100(i, isReady))
			}
			kept := float64(heap()-before) / engines
			var last []discovery.Endpoint
			var f faults
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				conditions := isReady
				event := enginePod(named(podName(5000)), onNode, annotated("pdkit.dev/bootstrapPort", "8998"))
				if i%2 == 0 {
					conditions = isUnready
					unready(event)
				}
				if len(o.Services) == 0 {
					_ = pods.Update(event)
				} else {
					_ = parts.Update(sliceOf100(5000, conditions))
				}
				list := m.endpoints(stock{pods: pods.snapshot(), slices: parts.snapshot()}, &f)
				if slices.EqualFunc(last, list, func(a, b discovery.Endpoint) bool { return sameEndpoint(&a, &b) }) {
					b.Fatal("nothing has changed")
				}
				last = list
			}
			b.ReportMetric(kept, "B/engine")
		})
	}
}

func podName(i int) string { return fmt.Sprintf("llama-70b-prefill-%05d", i) }

func sliceOf100(from int, conditions discoveryv1.EndpointConditions) *discoveryv1.EndpointSlice {
	endpoints := make([]discoveryv1.Endpoint, 100)
	for i := range endpoints {
		endpoints[i] = of(podName(from+i), fmt.Sprintf("10.0.%d.%d", (from+i)/250, (from+i)%250), conditions)
	}
	return endpointSlice(fmt.Sprintf("s-%05d", from), endpoints...)
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
