// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// round asks for all roles at once and updates the roles' lists. changed is true if there is a new list to publish; err
// is the reason for missing answers, if it must be reported now.
func (s *Source) round(ctx context.Context) (changed bool, err error) {
	asking, cancel := context.WithTimeout(ctx, roundLimit)
	defer cancel()
	answers := make([]found, len(s.roles))
	a, err := s.asker()
	if err != nil {
		for i := range answers {
			answers[i].err = err
		}
	} else {
		var wg sync.WaitGroup
		for i, r := range s.roles {
			wg.Go(func() { answers[i] = a.find(asking, r.name) })
		}
		wg.Wait()
	}
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	return s.take(answers, time.Now())
}

// take updates the state with a round's answers, one per role.
func (s *Source) take(answers []found, now time.Time) (changed bool, err error) {
	wait := s.opts.MaxTTL
	var reasons []string
	failed, known := false, true
	for i, r := range s.roles {
		f := answers[i]
		switch {
		case f.err != nil:
			failed = true
			reasons = append(reasons, fmt.Sprintf("%s: %v", r.role, f.err))
		case len(f.hosts) == 0 && len(r.hosts) > 0 && r.misses < s.opts.NotFound:
			r.misses++
			reasons = append(reasons, fmt.Sprintf("%s: the name has no records", r.role))
			wait = s.opts.MinTTL
		default:
			changed = changed || !r.known || !slices.Equal(r.hosts, f.hosts)
			r.known, r.hosts, r.misses = true, f.hosts, 0
			wait = min(wait, max(f.ttl, s.opts.MinTTL))
		}
		known = known && r.known
	}
	if failed {
		wait = min(wait, s.opts.MinTTL<<min(s.failures, 10), max(lastPause, s.opts.MinTTL))
		s.failures++
	} else {
		s.failures = 0
	}
	s.next = now.Add(wait + rand.N(wait/10+1)) //nolint:gosec // jitter, guards nothing
	return known && (changed || !s.published), s.tell(reasons, now)
}

// tell returns an error with the reasons, or nil if the same reasons were reported lately.
func (s *Source) tell(reasons []string, now time.Time) error {
	reason := strings.Join(reasons, "; ")
	if reason == "" {
		s.told = ""
		return nil
	}
	if reason == s.told || !s.toldAt.IsZero() && now.Sub(s.toldAt) < s.tellEvery {
		return nil
	}
	s.told, s.toldAt = reason, now
	stays := "there is no list yet"
	if s.published {
		stays = "the last list stays"
	}
	return fmt.Errorf("dns: %s (%s)", reason, stays)
}

// endpoints merges the hosts of all roles, sorted by address, since servers shuffle their answers.
func (s *Source) endpoints() []discovery.Endpoint {
	roles := map[netip.AddrPort]discovery.Role{}
	for _, r := range s.roles {
		for _, h := range r.hosts {
			roles[h] |= r.role
		}
	}
	hosts := make([]netip.AddrPort, 0, len(roles))
	for h := range roles {
		hosts = append(hosts, h)
	}
	slices.SortFunc(hosts, netip.AddrPort.Compare)
	list := make([]discovery.Endpoint, 0, len(hosts))
	for _, h := range hosts {
		e := discovery.Endpoint{
			ID: h.String(), URL: &url.URL{Scheme: s.opts.Scheme, Host: h.String()},
			Group: s.opts.Group, Zone: s.opts.Zone, Attributes: s.opts.Attributes,
		}
		if e.Role = roles[h] &^ discovery.RoleEncode; e.Role != 0 {
			list = append(list, e)
			e.ID += "/encode" // an engine that encodes and also serves a leg is two endpoints, since no role says both
		}
		if e.Role = roles[h] & discovery.RoleEncode; e.Role != 0 {
			list = append(list, e)
		}
	}
	return list
}
