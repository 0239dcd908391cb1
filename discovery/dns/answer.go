// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"time"

	wire "github.com/miekg/dns"
)

// answer is what one DNS message says about one question.
type answer struct {
	addrs    []netip.Addr       // for A and AAAA
	services []service          // for SRV
	extra    map[string][]extra // addresses that came with the SRV records, by target
	ttl      time.Duration      // how long the answer may be used
	alias    string             // the name to ask for next, if the message ends with an alias
}

// service is one SRV record that names a host.
type service struct {
	target string // absolute, in lower case
	port   uint16
}

type extra struct {
	kind uint16 // of record
	addr netip.Addr
	ttl  time.Duration
}

// maxTTL stands for no limit; Options.MaxTTL is the limit.
const maxTTL = math.MaxUint32 * time.Second

// read takes from a message the records of class IN that belong to the question. Their owner is name, in lower case, or
// a name that name is an alias of. It ignores all other records.
func read(m *wire.Msg, name string, kind uint16) (answer, error) {
	if m.Rcode != wire.RcodeSuccess && m.Rcode != wire.RcodeNameError {
		if text, known := wire.RcodeToString[m.Rcode]; known {
			return answer{}, fmt.Errorf("the server answered %s", text)
		}
		return answer{}, errors.New("the server answered with an unknown code")
	}
	a := answer{ttl: maxTTL}
	owner := a.follow(m, name)
	if owner == "" {
		return answer{}, errAliases
	}
	for _, rr := range m.Answer {
		h := rr.Header()
		if h.Class != wire.ClassINET || h.Rrtype != kind || wire.CanonicalName(h.Name) != owner {
			continue
		}
		if s, ok := rr.(*wire.SRV); ok {
			a.ttl = min(a.ttl, ttlOf(h))
			if s.Port > 0 && s.Target != "." { // "." means that there is no such service (RFC 2782)
				a.services = append(a.services, service{wire.CanonicalName(s.Target), s.Port})
			}
			continue
		}
		if addr, ok := addressOf(rr); ok {
			a.ttl = min(a.ttl, ttlOf(h))
			a.addrs = append(a.addrs, addr)
		}
	}
	switch {
	case len(a.addrs) > 0:
	case len(a.services) > 0:
		a.readExtra(m)
	case owner != name && m.Rcode == wire.RcodeSuccess:
		a.alias = owner
	case m.Rcode == wire.RcodeSuccess && refers(m):
		return answer{}, errReferral
	default:
		a.ttl = min(a.ttl, negativeTTL(m))
	}
	return a, nil
}

// follow follows the message's aliases of name and returns the last name, or "" if they form a loop.
func (a *answer) follow(m *wire.Msg, name string) string {
	aliases := map[string]*wire.CNAME{}
	for _, rr := range m.Answer {
		if c, ok := rr.(*wire.CNAME); ok && c.Hdr.Class == wire.ClassINET {
			aliases[wire.CanonicalName(c.Hdr.Name)] = c
		}
	}
	for range len(aliases) + 1 {
		c := aliases[name]
		if c == nil {
			return name
		}
		a.ttl = min(a.ttl, ttlOf(&c.Hdr))
		name = wire.CanonicalName(c.Target)
	}
	return ""
}

// readExtra keeps the addresses that the server sent for the targets.
func (a *answer) readExtra(m *wire.Msg) {
	a.extra = map[string][]extra{}
	for _, s := range a.services {
		a.extra[s.target] = nil
	}
	for _, rr := range m.Extra {
		h := rr.Header()
		owner := wire.CanonicalName(h.Name)
		if _, asked := a.extra[owner]; !asked || h.Class != wire.ClassINET {
			continue
		}
		if addr, ok := addressOf(rr); ok {
			a.extra[owner] = append(a.extra[owner], extra{h.Rrtype, addr, ttlOf(h)})
		}
	}
}

// addressOf returns the address of an A or AAAA record. ok is false for addresses that no engine can have.
func addressOf(rr wire.RR) (netip.Addr, bool) {
	var ip net.IP
	switch r := rr.(type) {
	case *wire.A:
		ip = r.A
	case *wire.AAAA:
		ip = r.AAAA
	}
	addr, ok := netip.AddrFromSlice(ip)
	addr = addr.Unmap()
	usable := ok && !addr.IsUnspecified() && !addr.IsMulticast() && !addr.IsLinkLocalUnicast() &&
		addr != netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return addr, usable
}

// ttlOf returns a record's time to live. A value beyond 31 bits counts as 0 (RFC 2181, 8).
func ttlOf(h *wire.RR_Header) time.Duration {
	if h.Ttl > math.MaxInt32 {
		return 0
	}
	return time.Duration(h.Ttl) * time.Second
}

// refers reports whether a message without records refers to another server. Such a message does not mean that there
// are no records (RFC 2308, 2.2).
func refers(m *wire.Msg) bool {
	found := false
	for _, rr := range m.Ns {
		if rr.Header().Rrtype == wire.TypeSOA {
			return false
		}
		found = found || rr.Header().Rrtype == wire.TypeNS
	}
	return found
}

// negativeTTL returns how long the absence of records may be remembered (RFC 2308, 5).
func negativeTTL(m *wire.Msg) time.Duration {
	for _, rr := range m.Ns {
		if soa, ok := rr.(*wire.SOA); ok {
			return min(ttlOf(&soa.Hdr), time.Duration(soa.Minttl)*time.Second)
		}
	}
	return 0
}
