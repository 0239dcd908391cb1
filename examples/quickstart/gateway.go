// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// engine is the configuration of all three engines. They must have the same, since D reads P's KV as its own. Rate and
// ITL make the two phases long enough to see.
var engine = enginesim.Config{
	Model:         "toy",
	PrefillRate:   2000, // prompt tokens per second
	ITL:           8 * time.Millisecond,
	BytesPerToken: 1024,
	Blocks:        512,
}

// lab is everything that runs.
type lab struct {
	prefill, decode, alone *enginesim.Engine
	url                    string // the gateway's URL
	legs                   legs
	ends                   []func() error // what stop calls, in reverse order
}

// newHandler makes the gateway. It is all that a program of yours would need.
func newHandler(conn connector.KVConnector, prefillURL, decodeURL string, o legs) (*pdflow.Flow, error) {
	p, err := discovery.New(prefillURL, discovery.RolePrefill)
	if err != nil {
		return nil, err
	}
	d, err := discovery.New(decodeURL, discovery.RoleDecode)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(p, d)
	if err != nil {
		return nil, err
	}
	return pdflow.New(conn, pick.New(set, pick.RoundRobin()),
		pdflow.WithObserver(pdflow.Observer{SessionEnd: o.SessionEnd}))
}

func newConnector(name string) (connector.KVConnector, error) {
	switch name {
	case nixl.Name:
		return nixl.New(nil)
	case plainhttp.Name:
		return plainhttp.New(nil)
	}
	return nil, fmt.Errorf("-connector %q is not here: nixl or http", name)
}

// start starts the engines, the gateway and a server for it. The end of ctx (Ctrl-C) does not stop them: lab.stop does.
func start(ctx context.Context, conn connector.KVConnector, listen string) (_ *lab, err error) {
	ctx = context.WithoutCancel(ctx)
	l := &lab{legs: make(legs, 16)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.stop())
		}
	}()
	if l.prefill, l.decode, err = enginesim.Pair(engine, engine); err != nil {
		return nil, err
	}
	l.atEnd(l.prefill.Close)
	l.atEnd(l.decode.Close)
	if l.alone, err = enginesim.Start(engine); err != nil {
		return nil, err
	}
	l.atEnd(l.alone.Close)

	flow, err := newHandler(conn, l.prefill.URL(), l.decode.URL(), l.legs)
	if err != nil {
		return nil, err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("the gateway cannot listen: %w (-listen chooses another address)",
			errors.Join(err, flow.Shutdown(ctx)))
	}
	l.url = "http://" + listener.Addr().String()
	server := &http.Server{Handler: flow, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	l.atEnd(func() error {
		drain, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		err := errors.Join(flow.Shutdown(drain), server.Shutdown(drain)) // what runs may end; nothing new begins
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
		return err
	})
	return l, nil
}

func (l *lab) atEnd(f func() error) { l.ends = append(l.ends, f) }

// stop stops what start started, in reverse order.
func (l *lab) stop() (err error) {
	for _, end := range slices.Backward(l.ends) {
		err = errors.Join(err, end())
	}
	return err
}

// legs is an observer. It keeps what the gateway reports about both legs of each request.
type legs chan pdflow.Outcome

func (l legs) SessionEnd(_ context.Context, o *pdflow.Outcome) {
	select {
	case l <- *o:
	default: // nobody reads any more: an observer must not block
	}
}

// next returns the outcome of the next request that ends. A request has one attempt, or more if an engine fails.
func (l legs) next(ctx context.Context, wait time.Duration) (pdflow.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		select {
		case o := <-l:
			if o.Final {
				return o, nil
			}
		case <-ctx.Done():
			return pdflow.Outcome{}, errors.New("the gateway did not say how its legs went")
		}
	}
}
