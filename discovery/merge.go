// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"maps"
	"net/url"
)

// merge builds base and index from all parts, and drops the health verdicts of endpoints that left. It returns the
// faults of the named source's endpoints, or "". The caller holds s.mu.
func (s *Set) merge(source int) string {
	total := 0
	for _, p := range s.parts {
		total += len(p.endpoints)
	}
	marked := make(map[string]*url.URL, len(s.probed))
	for id := range s.probed {
		marked[id] = s.base[s.index[id]].URL
	}
	base := make([]Endpoint, 0, total)
	clear(s.index)
	var faults faultList
	for i, p := range s.parts {
		begin := len(base)
		for j := range p.endpoints { // by pointer: an Endpoint is 120 bytes
			e := &p.endpoints[j]
			err := e.Validate()
			if at, taken := s.index[e.ID]; err == nil && taken {
				if at < begin {
					continue // an earlier source lists it
				}
				err = fmt.Errorf("endpoint %q is listed twice", e.ID)
			}
			if err != nil {
				if i == source {
					faults.add(err)
				}
				continue
			}
			s.index[e.ID] = len(base)
			base = append(base, *e)
		}
	}
	s.base = base
	for id, was := range marked {
		if at, ok := s.index[id]; !ok || !sameURL(base[at].URL, was) {
			delete(s.unhealthy, id)
			delete(s.probed, id)
		}
	}
	return faults.String()
}

// faultList keeps the first fault and counts the others, so that a source with thousands of bad entries gives one line.
type faultList struct {
	first error
	more  int
}

func (f *faultList) add(err error) {
	if f.first == nil {
		f.first = err
	} else {
		f.more++
	}
}

func (f *faultList) String() string {
	switch {
	case f.first == nil:
		return ""
	case f.more == 0:
		return fmt.Sprintf("left out: %v", f.first)
	}
	return fmt.Sprintf("left out: %v, and %d more", f.first, f.more)
}

// sameList reports whether two lists are equal. A source that polls often publishes equal lists, and readers must not
// lose what they derived from a snapshot because of that.
func sameList(a, b []Endpoint) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !same(&a[i], &b[i]) {
			return false
		}
	}
	return true
}

func same(a, b *Endpoint) bool {
	return a.ID == b.ID && a.Role == b.Role && a.Phase == b.Phase && a.Group == b.Group && a.Zone == b.Zone &&
		a.Node == b.Node && a.Model == b.Model && a.Version == b.Version && sameURL(a.URL, b.URL) &&
		maps.Equal(a.Attributes, b.Attributes)
}

func sameURL(a, b *url.URL) bool { return a == b || a != nil && b != nil && *a == *b }
