// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	wire "github.com/miekg/dns"
)

// found is the outcome for one role's name. Without hosts and without an error, the name does not exist or has no
// records.
type found struct {
	hosts []netip.AddrPort // sorted, each once
	ttl   time.Duration
	err   error
}

// asker asks the questions of one round.
type asker struct {
	client
	port   uint16
	types  []uint16              // of addresses, the preferred first
	search func(string) []string // the absolute names to try for a name
}

// maxAliases bounds how many further questions CNAME records cause. Aliases inside one message cause none.
const maxAliases = 8

// maxAtOnce bounds how many targets of SRV records are looked up at once.
const maxAtOnce = 8

// maxHosts bounds the engines of a name. Each port of an SRV target counts at each of the target's addresses, so that
// two small messages could list millions.
const maxHosts = 10_000

var (
	errTooMany   = fmt.Errorf("the name has more than %d engines", maxHosts)
	errNoServers = errors.New("the system names no server to ask")
	errAliases   = errors.New("the name's aliases do not end")
	errReferral  = errors.New("the server refers to others")
)

// asker returns the asker of a round. It reads the system's list of servers again, which may have changed.
func (s *Source) asker() (*asker, error) {
	a := &asker{port: uint16(s.opts.Port), client: client{timeout: s.opts.Timeout}}
	switch s.opts.Network {
	case "ip4":
		a.types = []uint16{wire.TypeA}
	case "ip6":
		a.types = []uint16{wire.TypeAAAA}
	default:
		a.types = []uint16{wire.TypeA, wire.TypeAAAA}
	}
	if s.opts.Resolver != "" {
		a.servers = []string{s.opts.Resolver}
		a.search = func(name string) []string { return []string{wire.Fqdn(name)} }
		return a, nil
	}
	conf, err := wire.ClientConfigFromFile(s.conf)
	if err != nil || len(conf.Servers) == 0 {
		return nil, errNoServers
	}
	for _, server := range conf.Servers {
		a.servers = append(a.servers, net.JoinHostPort(server, cmp.Or(s.confPort, conf.Port)))
	}
	a.search = conf.NameList
	return a, nil
}

// find looks up a role's name. It tries the absolute names in order and returns the first that has hosts.
func (a *asker) find(ctx context.Context, name string) found {
	var f found
	for _, absolute := range a.search(name) {
		if a.port > 0 {
			f = a.addresses(ctx, absolute)
		} else {
			f = a.services(ctx, absolute)
		}
		if f.err != nil || len(f.hosts) > 0 {
			break
		}
	}
	slices.SortFunc(f.hosts, netip.AddrPort.Compare)
	f.hosts = slices.Compact(f.hosts)
	return f
}

// addresses asks for all kinds of addresses of a name. If the question for one kind fails, the whole lookup fails,
// since a list without that kind would miss engines.
func (a *asker) addresses(ctx context.Context, name string) found {
	answers := make([]answer, len(a.types))
	errs := make([]error, len(a.types))
	var wg sync.WaitGroup
	for i, t := range a.types {
		wg.Go(func() { answers[i], errs[i] = a.ask(ctx, name, t) })
	}
	wg.Wait()
	var f found
	positive, negative := maxTTL, maxTTL
	for i, got := range answers {
		switch {
		case errs[i] != nil:
			return found{err: errs[i]}
		case len(got.addrs) > 0:
			positive = min(positive, got.ttl)
		default:
			negative = min(negative, got.ttl)
		}
		for _, addr := range got.addrs {
			f.hosts = append(f.hosts, netip.AddrPortFrom(addr, a.port))
		}
	}
	if f.ttl = positive; len(f.hosts) == 0 {
		f.ttl = negative
	}
	return f
}

// services asks for a name's SRV records and for the addresses of their targets. It leaves out a target without
// addresses, which is just coming or going. If a lookup of a target fails, the whole lookup fails.
func (a *asker) services(ctx context.Context, name string) found {
	got, err := a.ask(ctx, name, wire.TypeSRV)
	if err != nil {
		return found{err: err}
	}
	f := found{ttl: got.ttl}
	asked := map[string]bool{}
	targets := map[string]answer{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	places := make(chan struct{}, maxAtOnce)
	for _, s := range got.services {
		if asked[s.target] {
			continue
		}
		asked[s.target] = true
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			at, err := a.target(ctx, s.target, got.extra[s.target])
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				f.err = err
				return
			}
			targets[s.target] = at
		})
	}
	wg.Wait()
	if f.err != nil {
		return found{err: f.err}
	}
	for _, s := range got.services {
		at := targets[s.target]
		if len(f.hosts)+len(at.addrs) > maxHosts {
			return found{err: errTooMany}
		}
		f.ttl = min(f.ttl, at.ttl)
		for _, addr := range at.addrs {
			f.hosts = append(f.hosts, netip.AddrPortFrom(addr, s.port))
		}
	}
	return f
}

// target returns the addresses of an SRV record's target, of the first kind that it has. It uses addresses that came
// with the record before it asks.
func (a *asker) target(ctx context.Context, name string, extra []extra) (answer, error) {
	var got answer
	for _, t := range a.types {
		got = answer{}
		for _, e := range extra {
			if e.kind == t {
				if len(got.addrs) == 0 || e.ttl < got.ttl {
					got.ttl = e.ttl
				}
				got.addrs = append(got.addrs, e.addr)
			}
		}
		if len(got.addrs) == 0 {
			var err error
			if got, err = a.ask(ctx, name, t); err != nil {
				return answer{}, err
			}
		}
		if len(got.addrs) > 0 {
			break
		}
	}
	return got, nil
}

// ask asks for one kind of records of an absolute name. It follows aliases that the server does not follow.
func (a *asker) ask(ctx context.Context, name string, kind uint16) (answer, error) {
	name = wire.CanonicalName(name)
	var seen []string
	ttl := maxTTL
	for range maxAliases {
		got, err := a.exchange(ctx, name, kind)
		if err != nil {
			return answer{}, err
		}
		ttl = min(ttl, got.ttl)
		if got.alias == "" {
			got.ttl = ttl
			return got, nil
		}
		if seen = append(seen, name); slices.Contains(seen, got.alias) {
			return answer{}, errAliases
		}
		name = got.alias
	}
	return answer{}, errAliases
}
