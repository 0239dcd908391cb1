// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	wire "github.com/miekg/dns"

	"github.com/pdkit/pdkit/discovery"
)

// Options say whom to ask for what. At least one name is needed; zero values of the others are the defaults.
type Options struct {
	// Prefill, Decode and Encode are the names of each role's engines, with or without a dot at the end. An address
	// found under both Prefill and Decode is one engine of role both.
	Prefill, Decode, Encode string

	// Port is the engines' port, and has A and AAAA records asked for. 0 has SRV records asked for, whose ports are
	// taken; their priorities and weights are not.
	Port int

	// Network is ip4 for IPv4 addresses alone, ip6 for IPv6, ip (default) for both. An engine that has an A and an AAAA
	// record under one name would then be listed twice: say which one to use. Of an SRV record's target the IPv4
	// addresses are taken, and the IPv6 ones if there are none.
	Network string

	// Resolver is HOST:PORT of the only server to ask, and names are taken as absolute. "" asks those of
	// /etc/resolv.conf, with its search list; the file is read again each time.
	Resolver string

	// of the engines' URLs: http (default) or https. Hosts are always IP addresses, in certificates too
	Scheme     string
	Group      string            // of all endpoints
	Zone       string            // of all endpoints
	Attributes map[string]string // of all endpoints; copied

	// MinTTL and MaxTTL bound the time from one round of questions to the next, which is otherwise the shortest time to
	// live in its answers, and up to a tenth more so that many gateways do not ask at once. Default 1 s and 30 s.
	MinTTL, MaxTTL time.Duration

	// NotFound is how many rounds in a row may say that a name does not exist, or has no records, before its list
	// becomes empty. Default 3; negative is none. A name that was never found is an empty list at once.
	NotFound int

	Timeout time.Duration // for one server to answer one question, which is asked twice; default 2 s
}

// Source asks for all roles in rounds, and publishes what a round has found as one list. Before the first list each
// role must have been answered for. A role that cannot be answered for (a server that is silent or fails, an answer
// that is no answer) keeps the list it has. Watch then returns the reason, once per outage and at most every 15 s, for
// the set's OnError; watched again, it publishes the last list and goes on asking, after 1 s first and every 5 s later
// (MinTTL and MaxTTL permitting). Reasons name roles, never names or addresses.
//
// Addresses that no engine can have (unspecified, multicast, link-local) are left out.
type Source struct {
	opts Options
	busy atomic.Bool

	// Where /etc/resolv.conf and the tests' pace are.
	conf, confPort string
	tellEvery      time.Duration

	// The rest belongs to the Watch that is under way, and outlives it.
	roles     []*role
	version   uint64
	published bool
	next      time.Time // of the next round
	failures  int       // rounds in a row
	told      string    // the last reason; "" once a round was good
	toldAt    time.Time
}

// role is what is known of one name.
type role struct {
	role   discovery.Role
	name   string
	known  bool
	hosts  []netip.AddrPort // sorted
	misses int              // rounds in a row without the name
}

const (
	defaultMinTTL   = time.Second
	defaultMaxTTL   = 30 * time.Second
	defaultTimeout  = 2 * time.Second
	defaultNotFound = 3
	lastPause       = 5 * time.Second  // between rounds while a server fails
	roundLimit      = 20 * time.Second // for all questions of one round
	tellEvery       = 15 * time.Second // more often would have the set slow the source down
)

var errBusy = errors.New("dns: the source is being watched already")

// New checks options and returns a source. It asks nothing before Watch.
func New(o *Options) (*Source, error) {
	if o == nil {
		o = &Options{}
	}
	s := &Source{opts: *o, conf: "/etc/resolv.conf", tellEvery: tellEvery}
	s.opts.Attributes = maps.Clone(o.Attributes)
	s.opts.Network = cmp.Or(o.Network, "ip")
	s.opts.Scheme = cmp.Or(o.Scheme, "http")
	s.opts.MinTTL = cmp.Or(max(o.MinTTL, 0), defaultMinTTL)
	s.opts.MaxTTL = max(cmp.Or(max(o.MaxTTL, 0), defaultMaxTTL), s.opts.MinTTL)
	s.opts.Timeout = cmp.Or(max(o.Timeout, 0), defaultTimeout)
	s.opts.NotFound = max(cmp.Or(o.NotFound, defaultNotFound), 0)
	for _, n := range []struct {
		field, name string
		role        discovery.Role
	}{{"Prefill", o.Prefill, discovery.RolePrefill}, {"Decode", o.Decode, discovery.RoleDecode},
		{"Encode", o.Encode, discovery.RoleEncode}} {
		if n.name == "" {
			continue
		}
		if err := CheckName(n.name); err != nil {
			return nil, fmt.Errorf("dns: %s %w", n.field, err)
		}
		s.roles = append(s.roles, &role{role: n.role, name: n.name})
	}
	switch {
	case len(s.roles) == 0:
		return nil, errors.New("dns: no name is given: want Prefill, Decode or Encode")
	case o.Port < 0 || o.Port > 65535:
		return nil, errors.New("dns: Port is not one of 0 to 65535")
	case s.opts.Network != "ip" && s.opts.Network != "ip4" && s.opts.Network != "ip6":
		return nil, errors.New("dns: Network is not one of ip, ip4, ip6")
	case s.opts.Scheme != "http" && s.opts.Scheme != "https":
		return nil, errors.New("dns: Scheme is not http or https")
	}
	if o.Resolver != "" {
		host, port, err := net.SplitHostPort(o.Resolver)
		if n, bad := strconv.Atoi(port); err != nil || host == "" || bad != nil || n < 1 || n > 65535 {
			return nil, errors.New("dns: Resolver is not HOST:PORT")
		}
	}
	return s, nil
}

// CheckName says why a name cannot be looked up: it is none of letters, digits, "-", "_" and dots, too long, or an
// address. The text continues a sentence that begins with the field's name, and does not hold the name.
func CheckName(name string) error {
	plain := strings.IndexFunc(name, func(c rune) bool {
		return c != '-' && c != '_' && c != '.' && (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z')
	}) < 0
	if _, err := netip.ParseAddr(name); err == nil {
		return errors.New("is an address, not a name")
	}
	if _, ok := wire.IsDomainName(name); !ok || !plain || name == "." {
		return errors.New("is not a domain name")
	}
	return nil
}

// Watch asks, and publishes whenever the answers have changed, until ctx ends. One Watch at a time: a second one
// returns an error at once. Any other error is why the answers are missing.
func (s *Source) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	if !s.busy.CompareAndSwap(false, true) {
		return errBusy
	}
	defer s.busy.Store(false)
	if s.published {
		s.publish(publish)
	}
	for {
		if !sleepUntil(ctx, s.next) {
			return nil
		}
		changed, err := s.round(ctx)
		if ctx.Err() != nil {
			return nil // the questions failed because it did
		}
		if changed {
			s.publish(publish)
		}
		if err != nil {
			return err
		}
	}
}

func (s *Source) publish(publish func(discovery.Snapshot)) {
	s.published = true
	s.version++
	publish(discovery.Snapshot{Version: s.version, Endpoints: s.endpoints()})
}

// sleepUntil waits and reports whether ctx still lives.
func sleepUntil(ctx context.Context, at time.Time) bool {
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return ctx.Err() == nil
	}
}
