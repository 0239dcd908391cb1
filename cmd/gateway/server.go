// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/cmd/otlp"
	"github.com/pdkit/pdkit/transport"
)

// Limits of a client's connection. There is none on a whole response: the flow bounds each of its silences and writes.
const (
	headerTimeout  = 10 * time.Second
	bodyTimeout    = 75 * time.Second // above the flow's own 60 s, whose response says more
	idleTimeout    = 120 * time.Second
	maxHeaderBytes = 64 << 10
	lastPatience   = 2 * time.Second // with what finds engines, at the program's end
	lastWords      = time.Second     // for responses that are through, after the drain
	lastSpans      = 5 * time.Second // for spans and metrics that are not sent yet, at the program's end
)

// serve serves until a signal asks it to end, then drains; a second signal cuts what still runs. SIGHUP is none of
// these: it reads the configuration again.
func serve(ctx context.Context, f flags, cfg *configuration, log *slog.Logger, signals <-chan os.Signal) (err error) {
	otlp.LogTo(log)
	tel, err := newTelemetry(ctx, cfg.gateway.Admin != "", f.trace)
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastSpans)
		defer cancel()
		if cerr := tel.close(ctx); cerr != nil {
			log.Warn("telemetry", "error", otlp.Clean(cerr.Error()))
		}
	}()
	if err != nil {
		return err
	}
	g, err := build(cfg, tel, log)
	if err != nil {
		return err
	}

	requests, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	s := &servers{log: log, failed: make(chan error, 2)}
	defer s.close()
	clients, err := s.listen(requests, "clients", cfg.gateway.Listen, g.clients())
	if err != nil {
		return err
	}
	if cfg.gateway.TLS != nil {
		secure, err := cfg.serverTLS()
		if err != nil {
			return err
		}
		g.secure.Store(secure)
		clients.ln = tls.NewListener(clients.ln, &tls.Config{MinVersion: tls.VersionTLS12,
			GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
				return g.secure.Load().GetConfigForClient(hello)
			}})
	}
	addresses := []any{"listen", clients.addr}
	if cfg.gateway.Admin != "" {
		admin, err := s.listen(requests, "admin", cfg.gateway.Admin, g.admin())
		if err != nil {
			return err
		}
		addresses = append(addresses, "admin", admin.addr)
	}

	background, stop := context.WithCancel(ctx)
	wait, err := g.start(background)
	if err != nil {
		stop()
		return err
	}
	defer wait()
	defer stop()
	s.serve()
	log.Info("serving", append(addresses, "models", len(g.models()))...)

	hup := make(chan struct{}, 1)
	var follow sync.WaitGroup
	follow.Go(func() { g.followFile(background, f.read, hup) })
	defer follow.Wait()
	defer stop()
	for draining := false; !draining; {
		select {
		case sig := <-signals:
			if draining = sig != syscall.SIGHUP; draining {
				log.Info("draining", "signal", sig.String(), "atMost", g.cfg.Load().gateway.DrainTimeout.String())
				continue
			}
			select {
			case hup <- struct{}{}:
			default: // the file is to be read anyway
			}
		case err := <-s.failed:
			return err
		}
	}
	g.shutDown(clients.Server, cut, signals)
	return nil
}

// shutDown drains the clients' side: readiness fails, running requests go on until the drain timeout or the next
// signal, then they are cut. Requests that come meanwhile are answered, with 503.
func (g *gateway) shutDown(clients *http.Server, cut func(), signals <-chan os.Signal) {
	g.draining.Store(true)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(g.cfg.Load().gateway.DrainTimeout))
	defer cancel()
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for {
			select {
			case sig := <-signals:
				if sig != syscall.SIGHUP {
					cancel()
				}
			case <-ended:
				return
			}
		}
	}()
	clients.SetKeepAlivesEnabled(false)
	g.drain(ctx)
	if clients.Shutdown(ctx) == nil {
		g.log.Info("drained")
		return
	}
	cut()
	last, cancelLast := context.WithTimeout(context.Background(), lastWords)
	defer cancelLast()
	_ = clients.Shutdown(last) // those that do not end now are cut by Close
	g.log.Warn("drained, requests were cut")
}

// servers are the HTTP servers of the program.
type servers struct {
	log    *slog.Logger
	all    []*server
	failed chan error
}

type server struct {
	*http.Server
	name string
	ln   net.Listener
	addr string
}

func (s *servers) listen(requests context.Context, name, addr string, h http.Handler) (*server, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("cannot listen for %s: %w", name, err)
	}
	srv := &server{name: name, ln: transport.NewListener(ln), addr: ln.Addr().String(), Server: &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		// for what no handler reads; those that read a body set their own deadline
		ReadTimeout:                  bodyTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeaderBytes,
		DisableGeneralOptionsHandler: true,
		BaseContext:                  func(net.Listener) context.Context { return requests },
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}}
	s.all = append(s.all, srv)
	return srv, nil
}

func (s *servers) serve() {
	for _, srv := range s.all {
		go func() {
			if err := srv.Serve(srv.ln); !errors.Is(err, http.ErrServerClosed) {
				s.failed <- fmt.Errorf("serving %s: %w", srv.name, err)
			}
		}()
	}
}

func (s *servers) close() {
	for _, srv := range s.all {
		_ = srv.Close()
		_ = srv.ln.Close() // for a server that never served
	}
}
