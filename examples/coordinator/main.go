// SPDX-License-Identifier: Apache-2.0

// Coordinator sends both legs of each request through another gateway, as llm-d's coordinator does: it knows the
// protocol and the order of the legs, and the gateway knows the engines. Each leg names its pool in a header, by which
// the gateway routes it.
//
//	go run ./examples/coordinator -gateway http://127.0.0.1:8080
package main

import (
	"context"
	"errors"
	"flag"
	"io"
	"log"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// poolHeader is what the gateway routes by: "prefill" or "decode".
const poolHeader = "X-Pool"

const maxBody = 32 << 20

func main() {
	gateway := flag.String("gateway", "http://127.0.0.1:8080", "URL of the gateway that routes by "+poolHeader)
	listen := flag.String("listen", "127.0.0.1:8000", "where clients connect")
	flag.Parse()
	c, err := newCoordinator(*gateway)
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Addr: *listen, Handler: c, ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

// coordinator owns both HTTP calls of a request.
type coordinator struct {
	flow *pdflow.Flow
	send *transport.Transport
}

func newCoordinator(gateway string) (*coordinator, error) {
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	var pools pdflow.Pick
	if pools.Prefill, err = discovery.New(gateway, discovery.RolePrefill); err != nil {
		return nil, err
	}
	if pools.Decode, err = discovery.New(gateway, discovery.RoleDecode); err != nil {
		return nil, err
	}
	pools.Prefill.ID, pools.Decode.ID = "prefill", "decode" // as spans, metrics and outcomes name them
	// The pair is always the gateway and the gateway. An engine is chosen there, for each leg anew.
	picker := pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) { return pools, nil })
	flow, err := pdflow.New(conn, picker)
	if err != nil {
		return nil, err
	}
	return &coordinator{flow: flow, send: transport.New(nil)}, nil
}

// ServeHTTP runs one request.
func (c *coordinator) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	api := connector.APIOf(r.URL.Path)
	if api == connector.APIUnknown || r.Method != http.MethodPost {
		e := &pdflow.Error{Code: pdflow.CodeNotFound, Message: "there is no such path and method here"}
		e.Send(w, r)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: "want a body of at most 32 MiB"}
		e.Send(w, r)
		return
	}
	steps, err := c.flow.Begin(r.Context(), &pdflow.Request{API: api, Header: r.Header, Body: body})
	if err != nil {
		e := new(pdflow.Error)
		errors.As(err, &e)
		e.Send(w, r)
		return
	}
	var legs sync.WaitGroup
	defer legs.Wait()
	defer steps.End(nil) // cancels what still runs; what was not read to its end is a client that left
	resp, err := c.run(r.Context(), steps, &legs)
	if err != nil {
		steps.WriteError(w, r, err)
		return
	}
	_ = resp.Send(w, r) // it has told the client what went wrong, or cut the connection
}

// run sends the legs as the flow wants them, until it has the response. Legs may run together, so each has its
// goroutine.
func (c *coordinator) run(ctx context.Context, steps *pdflow.Steps, legs *sync.WaitGroup) (*pdflow.Response, error) {
	for {
		step, resp, err := steps.Next(ctx)
		if step == nil {
			return resp, err
		}
		legs.Go(func() {
			if step.Leg != "" { // a connector's side call goes to the engine that it names
				step.Header.Set(poolHeader, string(step.Leg))
			}
			step.Send(c.send)
		})
	}
}
