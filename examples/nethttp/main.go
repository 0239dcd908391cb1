// SPDX-License-Identifier: Apache-2.0

// Nethttp mounts pdkit in net/http: one prefill engine, one decode engine, one handler.
//
//	go run ./examples/nethttp -prefill http://127.0.0.1:8100 -decode http://127.0.0.1:8200
//	curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
//	  -d '{"prompt":"Hello","max_tokens":16}'
//
// The engines are vLLM servers that share KV by NixlConnector. Anything beyond this (probes, a drain, several models,
// metrics) is in cmd/gateway.
package main

import (
	"flag"
	"log"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	prefill := flag.String("prefill", "http://127.0.0.1:8100", "URL of the prefill engine")
	decode := flag.String("decode", "http://127.0.0.1:8200", "URL of the decode engine")
	listen := flag.String("listen", "127.0.0.1:8000", "where clients connect")
	flag.Parse()

	flow := handler(*prefill, *decode)
	server := http.Server{Addr: *listen, Handler: flow, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

// handler serves the OpenAI paths over the two engines.
func handler(prefill, decode string) *pdflow.Flow {
	p := must(discovery.New(prefill, discovery.RolePrefill))
	d := must(discovery.New(decode, discovery.RoleDecode))
	set := must(static.NewSet(p, d))
	return must(pdflow.New(must(nixl.New(nil)), pick.New(set, pick.RoundRobin())))
}

func must[T any](v T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return v
}
