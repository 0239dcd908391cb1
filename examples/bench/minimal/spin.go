// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"time"
)

// spinning makes a handler dearer by a known time for each request. With one busy CPU, time that passes here is
// time that this process uses, so that the benchmark can be held against a number known beforehand.
func spinning(d time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for start := time.Now(); time.Since(start) < d; {
			continue
		}
		next.ServeHTTP(w, r)
	})
}
