// SPDX-License-Identifier: Apache-2.0

package registration

import (
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// A message that says what is known must not cost more for there being many engines: whoever reaches the door may send
// 256 a second on each connection.
func BenchmarkPing(b *testing.B) {
	for _, n := range []int{10, 4096} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r := newRegistry(time.Minute, n)
			owner := make(chan struct{})
			all := make([]announcement, n)
			for i := range all {
				host := fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256)
				all[i] = announcement{zmq: host + "0", endpoint: discovery.Endpoint{
					ID: host, URL: &url.URL{Scheme: "http", Host: host}, Role: discovery.RolePrefill,
					Attributes: map[string]string{"zmqAddress": host + "0"},
				}}
				r.ping(&all[i], owner)
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				r.ping(&all[i%n], owner)
				i++
			}
		})
	}
}
