// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"time"
)

// spinning has a handler burn a known time for each request. The process has a CPU to itself, so this time is CPU time,
// and the benchmark must measure a cost that is known beforehand.
func spinning(d time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for start := time.Now(); time.Since(start) < d; {
			continue
		}
		next.ServeHTTP(w, r)
	})
}
