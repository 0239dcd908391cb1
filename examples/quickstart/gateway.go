// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/passthrough"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/enginesim"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// engine is how all three engines are set up. They must agree on it, since D reads P's KV as its own. Rate and ITL make the
// two phases long enough to see.
var engine = enginesim.Config{
	Model:         "toy",
	PrefillRate:   2000, // tokens of a prompt per second
	ITL:           8 * time.Millisecond,
	BytesPerToken: 1024,
	Blocks:        512,
}

// lab is everything that runs.
type lab struct {
	prefill, decode, alone *enginesim.Engine
	url                    string // the gateway's
	legs                   legs
	stop                   func() error
}

// newHandler is the gateway, and all that a program of yours would need. It follows the set of engines until ctx ends.
func newHandler(ctx context.Context, conn connector.KVConnector, prefillURL, decodeURL string, o pdflow.Observer) (*pdflow.Flow, error) {
	p, err := discovery.New(prefillURL, discovery.RolePrefill)
	if err != nil {
		return nil, err
	}
	d, err := discovery.New(decodeURL, discovery.RoleDecode)
	if err != nil {
		return nil, err
	}
	engines, err := static.New(p, d)
	if err != nil {
		return nil, err
	}
	set := discovery.NewSet(engines)
	go func() { _ = set.Run(ctx) }()
	return pdflow.New(conn, pick.RoundRobin(set), pdflow.WithObserver(o))
}

func newConnector(name string) (connector.KVConnector, error) {
	switch name {
	case nixl.Name:
		return nixl.New(nil)
	case passthrough.Name:
		return passthrough.New(nil)
	}
	return nil, fmt.Errorf("-connector %q is not here: nixl or http", name)
}

// start starts the engines and the gateway.
func start(ctx context.Context, conn connector.KVConnector, listen string) (l *lab, err error) {
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("the gateway cannot listen: %w (-listen chooses another address)", err)
	}
	l = &lab{url: "http://" + listener.Addr().String(), legs: make(legs, 16)}
	if l.prefill, l.decode, err = enginesim.Pair(engine, engine); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	closeEngines := func() error { return errors.Join(l.decode.Close(), l.prefill.Close()) }
	if l.alone, err = enginesim.Start(engine); err != nil {
		return nil, errors.Join(err, closeEngines(), listener.Close())
	}
	watching, stopWatching := context.WithCancel(context.WithoutCancel(ctx)) // Ctrl-C begins the drain; engines are known until its end
	flow, err := newHandler(watching, conn, l.prefill.URL(), l.decode.URL(), l.legs)
	if err != nil {
		stopWatching()
		return nil, errors.Join(err, l.alone.Close(), closeEngines(), listener.Close())
	}
	server := &http.Server{Handler: flow, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	l.stop = func() error {
		drain, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err := errors.Join(flow.Shutdown(drain), server.Shutdown(drain)) // what runs may end; nothing new begins
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
		stopWatching()
		return errors.Join(err, l.alone.Close(), closeEngines())
	}
	return l, nil
}

// legs is an observer: it keeps what the gateway says about both legs of each request.
type legs chan pdflow.Outcome

func (legs) SessionStart(context.Context, *connector.Session) {}

func (l legs) SessionEnd(_ context.Context, o *pdflow.Outcome) {
	select {
	case l <- *o:
	default: // nobody reads any more: an observer must not block
	}
}

// next returns the outcome of the next attempt that ends.
func (l legs) next(ctx context.Context, wait time.Duration) (pdflow.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	select {
	case o := <-l:
		return o, nil
	case <-ctx.Done():
		return pdflow.Outcome{}, errors.New("the gateway did not say how its legs went")
	}
}
