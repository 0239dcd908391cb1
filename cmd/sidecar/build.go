// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

type sidecar struct {
	flags    *flags
	log      *slog.Logger
	set      *discovery.Set
	decode   []discovery.Endpoint // by rank
	flow     *pdflow.Flow
	legs     *engines
	tel      *telemetry
	draining atomic.Bool
}

// build makes the sidecar from its flags. It opens no connections and no listeners.
func build(f *flags, log *slog.Logger, tel *telemetry) (*sidecar, error) {
	s := &sidecar{flags: f, log: log, tel: tel}
	conn, err := f.connector()
	if err != nil {
		return nil, err
	}
	tell := func(err error) { log.Warn("list of engines", "error", err) }
	if s.set, err = f.list(tell); err != nil {
		return nil, err
	}
	s.set.OnError(tell)
	if err := s.local(conn); err != nil {
		return nil, err
	}
	o := &pick.HeaderOptions{PairOnly: f.requireHeader || conn.Traits().Serving.PairOnly}
	if f.sampling {
		o.Sample = rand.IntN
	}
	s.legs = newEngines(f, s.set, s.decode)
	picker := &picker{Around: pick.NewAround(pick.FromHeader(s.set, s.decode[0], o)), set: s.set,
		decode: s.decode, encode: f.ecConnector != "", anyone: f.pooled(), log: log,
		toldEncode: new(sync.Once), toldAlone: new(sync.Once)}
	s.flow, err = pdflow.New(conn, picker, append(tel.options(),
		pdflow.WithTransport(s.legs),
		pdflow.WithForwardHeaders(f.forward...),
		pdflow.WithRetry(config.Retry{MaxAttempts: 1 + f.retries,
			BackoffBase: f.backoff, BackoffMax: max(f.backoff, 2*time.Second)}),
		pdflow.WithErrorHandler(writeError),
		pdflow.WithTelemetry(pdflow.Telemetry{Logger: log}))...)
	return s, err
}

// local makes the decode engines' endpoints, one for each rank.
func (s *sidecar) local(conn connector.KVConnector) error {
	for rank := range s.flags.ranks {
		// Without TLS the host is an address, so that no name is resolved. With TLS it is a name, since certificates
		// hold names.
		port := strconv.Itoa(s.flags.modelServerPort + rank)
		local := "http://" + net.JoinHostPort("127.0.0.1", port)
		if s.flags.tls.decoder {
			local = "https://" + net.JoinHostPort("localhost", port)
		}
		e, err := discovery.New(local, discovery.RoleDecode)
		if err != nil {
			return err
		}
		if s.flags.moriio.write {
			e.Attributes = s.flags.moriio.attributes()
		}
		if err := check.Of(conn).CheckEndpoint(e); err != nil {
			return fmt.Errorf("--kv-connector: this connector needs to know more of the decode engine than a sidecar "+
				"has flags for: %w", err)
		}
		s.decode = append(s.decode, e)
	}
	return nil
}

// connector makes the connector of --kv-connector, with the stage of --ec-connector before it. llm-d's names are in
// pkg/sidecar/constants/constants.go.
func (f *flags) connector() (connector.KVConnector, error) {
	spec := config.Spec{Type: f.kvConnector}
	config := map[string]any{}
	switch f.kvConnector {
	case "nixlv2":
		if spec.Type = "nixl"; f.moriio.write {
			spec.Type = "moriio"
			f.moriio.config(config)
		}
	case "shared-storage":
		spec.Type = "sharedstorage"
	case "sglang":
		config["bootstrapPort"] = f.sglangPort
	case "mooncake":
		config["bootstrapPort"] = f.mooncakePort
	case "offloading":
		spec.Type, config["port"] = "offload-p2p", f.p2pPort
	}
	if f.connectorConfig != "" {
		if err := json.Unmarshal([]byte(f.connectorConfig), &config); err != nil || config == nil {
			return nil, errors.New("--kv-connector-config is not a JSON object")
		}
	}
	if len(config) > 0 {
		spec.Config, _ = json.Marshal(config) // it holds JSON, numbers and texts, so this cannot fail
	}
	c, err := connector.Open(spec)
	if err != nil {
		return nil, fmt.Errorf("--kv-connector: %w", err)
	}
	if f.ecConnector == "" {
		return c, nil
	}
	stage := map[string]string{"ec-example": epd.Example, "ec-nixl": epd.NIXL}[f.ecConnector]
	if c, err = epd.Wrap(c, &epd.Options{Type: stage}); err != nil {
		return nil, fmt.Errorf("--ec-connector: %w", err)
	}
	encoder, ok := connector.As[connector.Encoder](c)
	if !ok {
		return nil, errors.New("--ec-connector: the stage encodes nothing")
	}
	return onDemand{c, encoder}, nil
}

// engines sends requests to engines. Each stage has its own TLS settings.
type engines struct {
	local                   map[string]bool // the decode engines, by host:port
	set                     *discovery.Set
	decode, prefill, encode *transport.Transport
}

func newEngines(f *flags, set *discovery.Set, local []discovery.Endpoint) *engines {
	to := func(insecure bool) *transport.Transport {
		o := &transport.Options{MaxIdlePerHost: f.maxIdle}
		if insecure {
			//nolint:gosec // the flag's very meaning
			o.TLS = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}
		}
		return transport.New(o)
	}
	e := &engines{local: map[string]bool{}, set: set, decode: to(f.insecure.decoder), prefill: to(f.insecure.prefiller),
		encode: to(f.insecure.encoder)}
	for _, d := range local {
		e.local[d.URL.Host] = true
	}
	return e
}

// RoundTrip sends a leg.
func (e *engines) RoundTrip(r *http.Request) (*http.Response, error) {
	switch {
	case e.local[r.URL.Host]:
		return e.decode.RoundTrip(r)
	case e.encodes(r.URL.Host):
		return e.encode.RoundTrip(r)
	}
	return e.prefill.RoundTrip(r)
}

// encodes reports whether an engine only encodes.
func (e *engines) encodes(host string) bool {
	for _, x := range e.set.Load().Endpoints {
		if x.Role == discovery.RoleEncode && x.URL.Host == host {
			return true
		}
	}
	return false
}

func (e *engines) close() {
	for _, t := range []*transport.Transport{e.decode, e.prefill, e.encode} {
		_ = t.Close() // it never fails
	}
}
