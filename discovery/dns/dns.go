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

// Options are the settings of a [Source]. At least one name is needed; other zero values mean the defaults.
type Options struct {
	// Prefill, Decode and Encode are the names of each role's engines, with or without a dot at the end. An address
	// found under both Prefill and Decode is one engine of role both.
	Prefill, Decode, Encode string

	// Port is the engines' port. With a port the source asks for A and AAAA records. With 0 it asks for SRV records and
	// takes the ports from them; it ignores their priorities and weights.
	Port int

	// Network is ip4 for IPv4 addresses only, ip6 for IPv6 only, or ip (default) for both. With ip, an engine that has
	// both an A and an AAAA record is listed twice, so choose one for such engines. For the target of an SRV record, ip
	// takes the IPv4 addresses, and the IPv6 addresses only if there are no others.
	Network string

	// Resolver is HOST:PORT of the only DNS server to ask; names are then absolute. "" means the servers and the search
	// list of /etc/resolv.conf, which the source reads again for each round.
	Resolver string

	// of the engines' URLs: http (default) or https. A URL's host is always an IP address, and so is the name in a
	// certificate
	Scheme     string
	Group      string            // of all endpoints
	Zone       string            // of all endpoints
	Attributes map[string]string // of all endpoints; copied

	// MinTTL and MaxTTL bound the time between two rounds of questions. That time is the shortest time to live among
	// the answers, and up to a tenth more, so that many gateways do not ask at once. Default 1 s and 30 s.
	MinTTL, MaxTTL time.Duration

	// NotFound is how many rounds in a row may say that a name does not exist, or has no records, before its list
	// becomes empty. Default 3; negative means 0. A name that was never found gives an empty list at once.
	NotFound int

	// how long one server may take to answer one question; each question is asked twice; default 2 s
	Timeout time.Duration
}

// Source asks for all roles in rounds, and publishes the outcome of a round as one list. It publishes the first list
// when it has an answer for each role. A role without an answer (a server that is silent or fails, a message that makes
// no sense) keeps its list. Watch then returns the reason for the set's OnError, once per outage and at most every 15
// s. The next Watch publishes the last list and goes on asking, at first after 1 s and later every 5 s (within MinTTL
// and MaxTTL). Reasons name roles, never names or addresses.
//
// The source leaves out addresses that no engine can have (unspecified, multicast, link-local). A name with more than
// 10,000 engines counts as one without an answer.
type Source struct {
	opts Options
	busy atomic.Bool

	// Tests set other values for the place of /etc/resolv.conf and the port.
	conf, confPort string
	tellEvery      time.Duration

	// The following fields belong to the running Watch, and keep their values for the next.
	roles     []*role
	version   uint64
	published bool
	next      time.Time // of the next round
	failures  int       // rounds with a failure, in a row
	told      string    // the reason that was reported last; "" after a good round
	toldAt    time.Time
}

// role is the state of one role's name.
type role struct {
	role   discovery.Role
	name   string
	known  bool
	hosts  []netip.AddrPort // sorted
	misses int              // rounds in a row that did not find the name
}

const (
	defaultMinTTL   = time.Second
	defaultMaxTTL   = 30 * time.Second
	defaultTimeout  = 2 * time.Second
	defaultNotFound = 3
	lastPause       = 5 * time.Second  // between two rounds while a server fails
	roundLimit      = 20 * time.Second // for all questions of one round
	tellEvery       = 15 * time.Second // if Watch returned more often, the set would slow the source down
)

var errBusy = errors.New("dns: the source is being watched already")

// New checks the options and returns a source. It asks nothing before Watch.
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

// CheckName returns why a name cannot be looked up: it has other characters than letters, digits, "-", "_" and dots, it
// is too long, or it is an address. The text continues a sentence that begins with the field's name, and does not hold
// the name.
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

// Watch asks, and publishes a list whenever the answers have changed, until ctx ends. Only one Watch may run at a time;
// a second one returns an error at once. Any other error says why answers are missing.
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
			return nil // the questions failed because ctx ended
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

// sleepUntil waits until at, and reports whether ctx still lives.
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
