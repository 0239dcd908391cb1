// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Headers of llm-d's scheduler, besides pick.PrefillerHeader (llm-d-router ebab6879, pkg/common/routing/common.go).
const (
	encodersHeader = "X-Encoder-Hosts-Ports"       // encode engines: host:port,…
	rankHeader     = "X-Data-Parallel-Host-Port"   // this pod's address and the port of a rank
	sourceHeader   = "X-Kv-Cache-Source-Host-Port" // the engine that has a prefix cached; the sidecar ignores it
)

// rankKey is the key of the data-parallel rank in a request's context.
type rankKey struct{}

// picker takes the prefill engine from its header, the decode engine from the rank that the client has called, and the
// encode engines from their header.
type picker struct {
	pick.Around // pick.FromHeader
	set         *discovery.Set
	decode      []discovery.Endpoint // by rank
	encode      bool                 // there is an encode stage
	anyone      bool                 // the list has no roles, so each engine may encode
	log         *slog.Logger

	toldEncode, toldAlone *sync.Once
}

// Bind binds the picker of the header.
func (p *picker) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	bound := *p
	bound.Around = pick.NewAround(p.Around.Bind(c, serving))
	return &bound
}

// Pick does not block.
func (p *picker) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	out, err := p.Around.Pick(ctx, in)
	if err != nil {
		return out, err
	}
	if out.Reason == pick.NoHeader {
		p.toldAlone.Do(func() {
			p.log.Warn("requests name no prefill engine: the decode engine serves them alone. The metrics count them",
				"header", pick.PrefillerHeader, "pd_reason", pick.NoHeader)
		})
	}
	rank, _ := ctx.Value(rankKey{}).(int)
	out.Decode = p.decode[rank]
	if !p.encode {
		return out, nil
	}
	if out.Encode = p.encoders(in.Header); len(out.Encode) > 0 && out.Prefill.URL == nil {
		p.toldEncode.Do(func() {
			p.log.Warn("requests name encode engines and no prefill engine: the decode engine encodes their " +
				"media itself")
		})
	}
	return out, nil
}

// encoders are the listed and ready engines that the header names. It skips others, as llm-d's sidecar does. If none is
// left, the prefill engine encodes the media.
func (p *picker) encoders(h http.Header) []discovery.Endpoint {
	var named []discovery.Endpoint
	for _, line := range h[encodersHeader] {
		for text := range strings.SplitSeq(line, ",") {
			want := canonical(strings.TrimPrefix(strings.TrimSpace(text), "http://"))
			if want == "" {
				continue
			}
			for _, e := range p.set.Load().Endpoints {
				if (p.anyone || e.Role.Has(discovery.RoleEncode)) && e.Phase == discovery.PhaseReady &&
					canonical(e.URL.Host) == want {
					named = append(named, e)
					break
				}
			}
			if len(named) == maxNamed {
				return named
			}
		}
	}
	return named
}

const maxNamed = 64 // encode engines in one request's header

// canonical brings host:port into the form in which addresses are compared. It returns "" for anything else.
func canonical(text string) string {
	host, port, err := net.SplitHostPort(text)
	if err != nil || host == "" {
		return ""
	}
	if a, err := netip.ParseAddr(host); err == nil {
		host = a.Unmap().String()
	}
	return net.JoinHostPort(strings.ToLower(host), port)
}

// rank returns the rank of the decode engine that a request needs. It is the rank of the port to which the request
// came. At rank 0's port it is the rank in the header, which schedulers set behind a gateway that knows only one port.
// ok is false if the header names no rank.
func (f *flags) rank(listener int, h http.Header) (rank int, ok bool) {
	want := h.Get(rankHeader)
	if listener != 0 || want == "" {
		return listener, true
	}
	for r := range f.ranks {
		if want == net.JoinHostPort(f.podIP, strconv.Itoa(f.port+r)) {
			return r, true
		}
	}
	return 0, false
}

// onDemand skips the encode stage if the scheduler has named no encode engine.
type onDemand struct {
	connector.KVConnector
	connector.Encoder
}

// Unwrap returns the connector with the stage, for its other abilities.
func (c onDemand) Unwrap() connector.KVConnector { return c.KVConnector }

// Items returns a request's media if there is an engine to encode them.
func (c onDemand) Items(s *connector.Session) []connector.Item {
	if len(s.Encode) == 0 {
		return nil
	}
	return c.Encoder.Items(s)
}
