// SPDX-License-Identifier: Apache-2.0

// Chi mounts a flow under a prefix of a chi router, as one handler among others. Middleware around it names requests,
// recovers from panics, checks the client's key and limits its rate.
//
//	echo my-key > keys
//	go run ./examples/chi -keys keys -prefill http://127.0.0.1:8100 -decode http://127.0.0.1:8200
//	curl http://127.0.0.1:8000/llm/v1/completions -H 'Authorization: Bearer my-key' \
//	  -H 'Content-Type: application/json' -d '{"prompt":"Hello","max_tokens":16}'
package main

import (
	"flag"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"golang.org/x/time/rate"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	var o options
	flag.StringVar(&o.prefill, "prefill", "http://127.0.0.1:8100", "URL of the prefill engine")
	flag.StringVar(&o.decode, "decode", "http://127.0.0.1:8200", "URL of the decode engine")
	keys := flag.String("keys", "keys", "file with the clients' keys, one a line")
	perSecond := flag.Float64("rate", 10, "requests a second for each key")
	flag.BoolVar(&o.forwardKey, "forward-key", false, "send the client's key to the engines, too")
	listen := flag.String("listen", "127.0.0.1:8000", "where clients connect")
	flag.Parse()
	text, err := os.ReadFile(*keys)
	if err != nil {
		log.Fatal(err)
	}
	o.keys, o.rate, o.burst = strings.Fields(string(text)), rate.Limit(*perSecond), 10
	flow, err := newFlow(&o)
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Addr: *listen, Handler: handler(flow, &o), ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

type options struct {
	prefill, decode string // URLs
	keys            []string
	rate            rate.Limit // of requests of one key
	burst           int
	forwardKey      bool // to the engines
}

// newFlow makes a flow over the two engines.
func newFlow(o *options) (*pdflow.Flow, error) {
	p, err := discovery.New(o.prefill, discovery.RolePrefill)
	if err != nil {
		return nil, err
	}
	d, err := discovery.New(o.decode, discovery.RoleDecode)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(p, d)
	if err != nil {
		return nil, err
	}
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	return pdflow.New(conn, pick.New(set, pick.RoundRobin()), pdflow.WithRequestID(requestID))
}

// requestID gives engines and clients the ID that chi's own logs have. chi makes host/counter, and a slash is not
// valid in an X-Request-Id.
func requestID(r *http.Request) string {
	return strings.ReplaceAll(middleware.GetReqID(r.Context()), "/", ":")
}

// prefix is where the flow is mounted. The flow knows only the paths of the client APIs, so StripPrefix removes it.
const prefix = "/llm"

func handler(flow *pdflow.Flow, o *options) http.Handler {
	r := chi.NewRouter()
	r.Use(middleware.RequestID, middleware.Logger, middleware.Recoverer)
	r.Get("/healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	r.With(authenticate(o.keys, o.forwardKey), limit(o.rate, o.burst)).Mount(prefix, http.StripPrefix(prefix, flow))
	return r
}
