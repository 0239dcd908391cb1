// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/discovery/static"
)

// list is the set of engines that a request may name.
func (f *flags) list(tell func(error)) (*discovery.Set, error) {
	var sources []discovery.Source
	for _, x := range []struct {
		name string
		role discovery.Role
		tls  bool
		from listFlags
	}{
		{"prefillers", discovery.RolePrefill, f.tls.prefiller, f.prefill},
		{"encoders", discovery.RoleEncode, f.tls.encoder, f.encode},
	} {
		scheme := "http"
		if x.tls {
			scheme = "https"
		}
		if x.from.static != "" {
			src, err := listed(x.from.static, scheme, x.role)
			if err != nil {
				return nil, fmt.Errorf("--%s %w", x.name, err)
			}
			sources = append(sources, src)
		}
		if x.from.dns != "" {
			src, err := f.looked(x.from.dns, scheme, x.role)
			if err != nil {
				return nil, fmt.Errorf("--%s-dns%w", x.name, err)
			}
			sources = append(sources, src)
		}
	}
	if f.file != "" {
		src, err := file.New(f.file, nil)
		if err != nil {
			return nil, fmt.Errorf("--prefillers-file: %w", err)
		}
		sources = append(sources, src)
	}
	if f.pooled() {
		src, err := newPool(f, tell)
		if err != nil {
			return nil, fmt.Errorf("--inference-pool: %w", err)
		}
		sources = append(sources, src)
	}
	for i, src := range sources {
		sources[i] = each{src, f.describe}
	}
	return discovery.NewSet(sources...), nil
}

// known reports whether the engines of --prefillers and --encoders are in the list.
func (f *flags) known(list *discovery.Snapshot) bool {
	for _, x := range []struct {
		role discovery.Role
		from string
	}{{discovery.RolePrefill, f.prefill.static}, {discovery.RoleEncode, f.encode.static}} {
		if x.from != "" && !slices.ContainsFunc(list.Endpoints, func(e discovery.Endpoint) bool {
			return e.Role.Has(x.role)
		}) {
			return false
		}
	}
	return true
}

// listed is the source of --prefillers and --encoders.
func listed(text, scheme string, role discovery.Role) (discovery.Source, error) {
	var endpoints []discovery.Endpoint
	for entry := range strings.SplitSeq(text, ",") {
		host, first, last, ok := addresses(strings.TrimSpace(entry))
		if !ok || first == 0 {
			return nil, errors.New("is not a list of HOST:PORT or HOST:FIRST-LAST, separated by commas")
		}
		for port := first; port <= last; port++ {
			e, err := discovery.New(scheme+"://"+net.JoinHostPort(host, strconv.Itoa(port)), role)
			if err != nil || e.URL.Hostname() != host {
				return nil, errors.New("is not a list of HOST:PORT or HOST:FIRST-LAST, separated by commas")
			}
			endpoints = append(endpoints, e)
		}
	}
	src, err := static.New(endpoints...)
	if err != nil {
		return nil, fmt.Errorf("is no list: %w", err)
	}
	return src, nil
}

// looked is the source of --prefillers-dns and --encoders-dns.
func (f *flags) looked(text, scheme string, role discovery.Role) (discovery.Source, error) {
	name, first, last, ok := addresses(text)
	if !ok {
		return nil, errors.New(" is not NAME, NAME:PORT or NAME:FIRST-LAST")
	}
	o := &dns.Options{Prefill: name, Port: first, Resolver: f.resolver, Scheme: scheme}
	if role == discovery.RoleEncode {
		o.Prefill, o.Encode = "", name
	}
	src, err := dns.New(o)
	if err != nil {
		return nil, fmt.Errorf(": %w", err)
	}
	if first == last {
		return src, nil
	}
	all := make([]int, last-first+1)
	for i := range all {
		all[i] = first + i
	}
	return spread{src, all}, nil
}

// addresses parses HOST, HOST:PORT and HOST:FIRST-LAST. The ports are 0 if there are none.
func addresses(text string) (host string, first, last int, ok bool) {
	if !strings.Contains(text, ":") {
		return text, 0, 0, text != ""
	}
	host, ports, err := net.SplitHostPort(text)
	from, to, isRange := strings.Cut(ports, "-")
	if !isRange {
		to = from
	}
	a, errA := strconv.ParseUint(from, 10, 16)
	b, errB := strconv.ParseUint(to, 10, 16)
	if err != nil || host == "" || errA != nil || errB != nil || a == 0 || b < a || b-a >= maxRanks {
		return "", 0, 0, false
	}
	return host, int(a), int(b), true
}

// spread lists each engine of a source at several ports, for the data-parallel ranks behind one address. The source
// lists it at the first port.
type spread struct {
	src   discovery.Source
	ports []int
}

// Watch watches the source.
func (s spread) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	return s.src.Watch(ctx, func(snap discovery.Snapshot) {
		all := make([]discovery.Endpoint, 0, len(snap.Endpoints)*len(s.ports))
		for _, e := range snap.Endpoints {
			all = append(all, e)
			for _, port := range s.ports[1:] {
				next := e
				next.URL = new(url.URL)
				*next.URL = *e.URL
				next.URL.Host = net.JoinHostPort(e.URL.Hostname(), strconv.Itoa(port))
				if next.ID = next.URL.Host; e.ID != e.URL.Host { // the engine has a name
					next.ID = e.ID + ":" + strconv.Itoa(port)
				}
				all = append(all, next)
			}
		}
		publish(discovery.Snapshot{Version: snap.Version, Endpoints: all})
	})
}

// each applies a change to each endpoint of a source.
type each struct {
	src    discovery.Source
	change func(discovery.Endpoint) discovery.Endpoint
}

// Watch watches the source.
func (s each) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	return s.src.Watch(ctx, func(snap discovery.Snapshot) {
		all := make([]discovery.Endpoint, len(snap.Endpoints))
		for i, e := range snap.Endpoints {
			all[i] = s.change(e)
		}
		publish(discovery.Snapshot{Version: snap.Version, Endpoints: all})
	})
}

// describe adds the attributes that follow from the data-parallel rank in an engine's address. As in llm-d, the tier of
// rank r is at --p2p-connector-port + r, and the engine's port is --port + r (pkg/sidecar/proxy/connector_p2p.go:
// p2pPortFor).
func (f *flags) describe(e discovery.Endpoint) discovery.Endpoint {
	port, err := strconv.Atoi(e.URL.Port())
	rank := port - f.port
	if f.kvConnector != "offloading" || err != nil || rank < 1 || rank >= f.ranks || e.Attribute("p2pPort") != "" {
		return e
	}
	e.Attributes = maps.Clone(e.Attributes)
	if e.Attributes == nil {
		e.Attributes = map[string]string{}
	}
	e.Attributes["p2pPort"] = strconv.Itoa(f.p2pPort + rank)
	return e
}

// pooled reports whether an InferencePool is the list, because no list is given by hand.
func (f *flags) pooled() bool {
	return f.prefill == (listFlags{}) && f.file == "" && f.pool.name != ""
}

// checkLists says which flag is missing or superfluous, or returns "".
func (f *flags) checkLists() string {
	switch {
	case f.prefill == (listFlags{}) && f.file == "" && f.pool.name == "":
		return "--prefillers, --prefillers-file, --prefillers-dns or --inference-pool is missing: without a list " +
			"anybody who can send a header could have any host called"
	case f.ecConnector == "" && f.encode != (listFlags{}):
		return "--encoders and --encoders-dns have no use without --ec-connector"
	case f.ecConnector != "" && f.encode == (listFlags{}) && f.file == "" && !f.pooled():
		return "--encoders, --encoders-dns or --prefillers-file is missing, for --ec-connector"
	case f.ecConnector != "" && f.pooled() &&
		(f.tls.prefiller != f.tls.encoder || f.insecure.prefiller != f.insecure.encoder):
		return "an InferencePool does not tell encode engines from prefill engines: --enable-tls and " +
			"--tls-insecure-skip-verify must name both or neither"
	case f.pooled():
		return f.pool.check()
	}
	return ""
}
