// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

type sidecar struct {
	flags    *flags
	log      *slog.Logger
	set      *discovery.Set
	decode   discovery.Endpoint
	flow     *pdflow.Flow
	legs     *engines
	draining atomic.Bool
}

// build makes the sidecar of its flags. It dials and listens nowhere.
func build(f *flags, log *slog.Logger) (*sidecar, error) {
	s := &sidecar{flags: f, log: log}
	conn, err := f.connector()
	if err != nil {
		return nil, err
	}
	if s.set, err = f.list(); err != nil {
		return nil, err
	}
	s.set.OnError(func(err error) { log.Warn("list of prefill engines", "error", err) })
	// An address, so that no name service is asked; over TLS a name, since certificates hold names.
	local := "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(f.modelServerPort))
	if f.tls.decoder {
		local = "https://" + net.JoinHostPort("localhost", strconv.Itoa(f.modelServerPort))
	}
	if s.decode, err = discovery.New(local, discovery.RoleDecode); err != nil {
		return nil, err
	}
	if check, ok := connector.As[connector.EndpointChecker](conn); ok {
		if err := check.CheckEndpoint(s.decode); err != nil {
			return nil, fmt.Errorf("--kv-connector: this connector needs to know more of the decode engine than a sidecar has flags for: %w", err)
		}
	}
	o := &pick.HeaderOptions{}
	if only, ok := connector.As[connector.PairOnly](conn); ok {
		o.PairOnly = only.PairOnly()
	}
	if f.sampling {
		o.Sample = rand.IntN
	}
	s.legs = newEngines(f, s.decode.URL.Host)
	s.flow, err = pdflow.New(conn, pick.FromHeader(s.set, s.decode, o),
		pdflow.WithTransport(s.legs),
		pdflow.WithRetry(pdflow.Retry{MaxAttempts: 1 + f.retries, BackoffBase: f.backoff, BackoffMax: max(f.backoff, 2*time.Second)}),
		pdflow.WithLogger(log))
	return s, err
}

// list is the set of prefill engines that a request may name.
func (f *flags) list() (*discovery.Set, error) {
	var sources []discovery.Source
	scheme := "http"
	if f.tls.prefiller {
		scheme = "https"
	}
	if f.prefillers != "" {
		var endpoints []discovery.Endpoint
		for text := range strings.SplitSeq(f.prefillers, ",") {
			e, err := discovery.New(scheme+"://"+strings.TrimSpace(text), discovery.RolePrefill)
			if err != nil || e.URL.Port() == "" || e.URL.Path != "" {
				return nil, errors.New("--prefillers is not a list of HOST:PORT, separated by commas")
			}
			endpoints = append(endpoints, e)
		}
		src, err := static.New(endpoints...)
		if err != nil {
			return nil, fmt.Errorf("--prefillers: %w", err)
		}
		sources = append(sources, src)
	}
	if f.prefillersFile != "" {
		src, err := file.New(f.prefillersFile, nil)
		if err != nil {
			return nil, fmt.Errorf("--prefillers-file: %w", err)
		}
		sources = append(sources, src)
	}
	if f.prefillersDNS != "" {
		name, port, found := strings.Cut(f.prefillersDNS, ":")
		o := &dns.Options{Prefill: name, Resolver: f.resolver, Scheme: scheme}
		var err error
		if found {
			if o.Port, err = strconv.Atoi(port); err != nil || o.Port < 1 {
				return nil, errors.New("--prefillers-dns is not NAME or NAME:PORT")
			}
		}
		src, err := dns.New(o)
		if err != nil {
			return nil, fmt.Errorf("--prefillers-dns: %w", err)
		}
		sources = append(sources, src)
	}
	return discovery.NewSet(sources...), nil
}

// engines sends requests to the local engine and to others, each with its own idea of certificates.
type engines struct {
	local          string // host:port
	decode, others *transport.Transport
}

func newEngines(f *flags, local string) *engines {
	to := func(insecure bool) *transport.Transport {
		o := &transport.Options{MaxIdlePerHost: f.maxIdle}
		if insecure {
			o.TLS = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true} //nolint:gosec // the flag's very meaning
		}
		return transport.New(o)
	}
	return &engines{local: local, decode: to(f.insecure.decoder), others: to(f.insecure.prefiller)}
}

// RoundTrip sends a leg.
func (e *engines) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Host == e.local {
		return e.decode.RoundTrip(r)
	}
	return e.others.RoundTrip(r)
}

func (s *sidecar) close() {
	_ = s.legs.decode.Close() // they never fail
	_ = s.legs.others.Close()
}

// handler serves the paths of client APIs over both engines and hands all others to the engine beside the sidecar, as llm-d's sidecar
// does (pkg/sidecar/proxy/proxy.go: createRoutes). Whoever reaches the sidecar reaches the engine.
func (s *sidecar) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		if s.draining.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	mux.Handle("/", s.flow.Middleware(s.passthrough()))
	return mux
}

func (s *sidecar) passthrough() http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.SetURL(s.decode.URL)
			pr.Out.Header.Del(pick.PrefillerHeader)
		},
		Transport:     s.legs,
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				s.log.Warn("the engine did not answer", "kind", fmt.Sprintf("%T", err))
			}
			pdflow.WriteError(w, r, &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode, Message: "the engine could not be reached or did not answer", Err: err})
		},
	}
}
