// SPDX-License-Identifier: Apache-2.0

// Command minimal is the PD proxy with which the benchmark compares cmd/gateway: what a careful expert writes by
// hand for one pair of engines and NIXL pull. It is fast and right, but has no telemetry, health checks, deadlines or
// retries: do not use it as a gateway.
package main

import (
	"flag"
	"fmt"
	"net/http"
	"os"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8000", "address for clients")
	prefill := flag.String("prefill", "http://127.0.0.1:8100", "URL of the prefill engine")
	decode := flag.String("decode", "http://127.0.0.1:8200", "URL of the decode engine")
	spin := flag.Duration("spin", 0, "burn this much CPU time for each request: shows that the benchmark sees it")
	flag.Parse()

	var handler http.Handler = newProxy(*prefill, *decode, newTransport())
	if *spin > 0 {
		handler = spinning(*spin, handler)
	}
	server := &http.Server{Addr: *listen, Handler: handler}
	if err := server.ListenAndServe(); err != nil {
		fmt.Fprintln(os.Stderr, "minimal:", err)
		os.Exit(1)
	}
}
