// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/pdkit/pdkit/discovery"
)

const many = 10_000

// large is a set that holds 10,000 endpoints, with the function that publishes them again with another zone.
func large(b *testing.B) (*discovery.Set, func(zone string)) {
	list := make([]discovery.Endpoint, many)
	for i := range list {
		list[i] = endpoint(b, fmt.Sprint("engine-", i))
	}
	start := make(chan func(discovery.Snapshot))
	set, _ := run(b, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		start <- publish
		<-ctx.Done()
		return nil
	}))
	publish := <-start
	return set, func(zone string) {
		next := append([]discovery.Endpoint(nil), list...)
		next[many-1].Zone = zone // the last: comparing the lists costs the most
		publish(discovery.Snapshot{Endpoints: next})
	}
}

func BenchmarkPublish10000(b *testing.B) {
	_, publish := large(b)
	b.ReportAllocs()
	zones := [2]string{"a", "b"}
	for i := 0; b.Loop(); i++ {
		publish(zones[i%2])
	}
}

func BenchmarkPublishUnchanged10000(b *testing.B) {
	_, publish := large(b)
	b.ReportAllocs()
	for b.Loop() {
		publish("a")
	}
}

func BenchmarkVerdict10000(b *testing.B) {
	set, publish := large(b)
	publish("a")
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		set.SetHealthy("engine-5000", i%2 != 0)
	}
}

func BenchmarkLoad10000(b *testing.B) {
	set, publish := large(b)
	publish("a")
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if set.Load().Version == 0 {
				b.Error("nothing was published")
			}
		}
	})
}
