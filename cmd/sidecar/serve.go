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
	"net/http/httputil"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// Limits of a client's connection, as in llm-d's sidecar, and of the drain. There is no limit on a whole response.
const (
	headerTimeout  = 30 * time.Second
	idleTimeout    = 300 * time.Second
	maxHeaderBytes = 1 << 20
	drainTimeout   = 60 * time.Second
)

// server is a listener and the HTTP server on it.
type server struct {
	ln     net.Listener
	server *http.Server
}

// serve serves until ctx ends. Then it lets the running requests end, and cuts those that take too long.
func (s *sidecar) serve(ctx context.Context) error {
	defer s.legs.close()
	if err := s.flow.Start(ctx); err != nil {
		return err
	}
	servers, metrics, err := s.open()
	if err != nil {
		return err
	}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx)) // requests during the drain need the list, too
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { _ = s.set.Run(watching) }) // the error is nil, since it runs only once
	soon, enough := context.WithTimeout(watching, time.Second)
	_ = s.set.WaitReady(soon, s.flags.known) // the first request must find the engines that the flags list
	enough()

	failed := make(chan error, len(servers)+len(metrics))
	for _, d := range append(servers, metrics...) {
		defer d.server.Close() // what the drain has left
		running.Go(func() { failed <- d.server.Serve(d.ln) })
	}
	for _, d := range metrics {
		s.log.Info("metrics", "listen", d.ln.Addr().String(), "tls", s.flags.metricsCert != "")
	}
	for rank, d := range servers {
		s.log.Info("serving", "listen", d.ln.Addr().String(), "rank", rank, "tls", s.flags.secure, "connector",
			s.flow.Connector().Traits().Name)
	}
	select {
	case err := <-failed:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	s.log.Info("draining", "atMost", drainTimeout.String())
	s.draining.Store(true)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	if s.drain(last, servers) != nil {
		s.log.Warn("drained, requests were cut")
	}
	return nil
}

// drain waits for running requests. While requests of the flow run, the sidecar still accepts connections, so that
// clients that do not know of the drain get a response that sends them elsewhere. After that it waits for requests that
// pass through to the engine.
func (s *sidecar) drain(ctx context.Context, servers []server) error {
	errs := make([]error, len(servers)+1)
	errs[len(servers)] = s.flow.Shutdown(ctx)
	var wg sync.WaitGroup
	for i, d := range servers {
		wg.Go(func() { errs[i] = d.server.Shutdown(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// open listens at all ports: those of the ranks, and that of metrics if there is one.
func (s *sidecar) open() (servers, metrics []server, err error) {
	defer func() {
		if err != nil {
			for _, d := range append(servers, metrics...) {
				_ = d.ln.Close()
			}
		}
	}()
	var secure *tls.Config
	if s.flags.secure {
		certificate, err := certificate(s.flags.certPath)
		if err != nil {
			return nil, nil, fmt.Errorf("--cert-path: %w", err)
		}
		secure = &tls.Config{MinVersion: s.flags.minTLS, CipherSuites: s.flags.ciphers, GetCertificate: certificate}
	}
	for rank := range s.flags.ranks {
		port := s.flags.port
		if port > 0 {
			port += rank
		}
		d, err := s.listen(":"+strconv.Itoa(port), secure, s.handler(rank))
		if err != nil {
			return servers, nil, err
		}
		servers = append(servers, d)
	}
	if s.flags.metrics == "" {
		return servers, nil, nil
	}
	var own *tls.Config
	if s.flags.metricsCert != "" {
		certificate, err := certificate(s.flags.metricsCert)
		if err != nil {
			return servers, nil, fmt.Errorf("--metrics-cert-dir: %w", err)
		}
		own = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate}
	}
	d, err := s.listen(s.flags.metrics, own, s.tel.handler())
	if err != nil {
		return servers, nil, err
	}
	return servers, []server{d}, nil
}

func (s *sidecar) listen(address string, secure *tls.Config, h http.Handler) (server, error) {
	ln, err := net.Listen("tcp", address)
	if err != nil {
		return server{}, fmt.Errorf("cannot listen: %w", err)
	}
	ln = transport.NewListener(ln)
	if secure != nil {
		ln = tls.NewListener(ln, secure)
	}
	return server{ln, &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}}, nil
}

// handler serves the paths of client APIs over both engines. It forwards all other paths to the engine beside the
// sidecar, as llm-d's sidecar does (pkg/sidecar/proxy/proxy.go: createRoutes). So everyone who reaches the sidecar
// reaches the engine.
func (s *sidecar) handler(listener int) http.Handler {
	both := s.flow.Middleware(s.passthrough(listener))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		if s.draining.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		rank, ok := listener, true
		switch served := r.Method == http.MethodPost && connector.APIOf(r.URL.Path) != connector.APIUnknown; {
		case served:
			rank, ok = s.flags.rank(listener, r.Header)
		case s.draining.Load(): // the flow itself answers that it drains
			writeError(
				w, r, &pdflow.Error{Code: pdflow.CodeDraining, Message: "this engine is shutting down",
					RetryAfter: time.Second},
			)
			return
		}
		if !ok {
			writeError(
				w, r, &pdflow.Error{Code: pdflow.CodeInvalid, Param: rankHeader,
					Message: "names no rank of this engine"},
			)
			return
		}
		both.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), rankKey{}, rank)))
	})
	return mux
}

func (s *sidecar) passthrough(rank int) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.SetURL(s.decode[rank].URL)
			for _, name := range []string{pick.PrefillerHeader, encodersHeader, rankHeader, sourceHeader} {
				pr.Out.Header.Del(name)
			}
		},
		Transport:     s.legs,
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				s.log.Warn("the engine did not answer", "kind", fmt.Sprintf("%T", err))
			}
			writeError(
				w, r, &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode,
					Message: "the engine could not be reached or did not answer", Err: err},
			)
		},
	}
}

// writeError writes OpenAI's error object. It uses llm-d's status where llm-d's differs from pdflow's: 403 if the
// header names an engine that is not listed, 503 if the decode engine accepts no connections.
func writeError(w http.ResponseWriter, r *http.Request, e *pdflow.Error) {
	status := 0
	switch {
	case e.Code == pdflow.CodeInvalid && e.Param == pick.PrefillerHeader && r.Header.Get(pick.PrefillerHeader) != "":
		status = http.StatusForbidden
	case e.Code == pdflow.CodeDecodeFailed && e.Status == 0 && errors.Is(e.Err, syscall.ECONNREFUSED):
		status = http.StatusServiceUnavailable
		w.Header().Set("Retry-After", "1")
	}
	if status != 0 {
		w = &restated{w, status}
	}
	e.Send(w, r)
}

// restated writes a response with status in place of the status that it is given.
type restated struct {
	http.ResponseWriter
	status int
}

// WriteHeader ignores its argument and writes the status of restated.
func (r *restated) WriteHeader(int) { r.ResponseWriter.WriteHeader(r.status) }
