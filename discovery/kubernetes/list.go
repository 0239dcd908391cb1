// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/pdkit/pdkit/discovery"
)

// stock is a snapshot of the tables.
type stock struct {
	pods   rows[*pod]
	slices rows[*slice]
	nodes  rows[string]
}

// endpoints makes the list of endpoints from a stock, sorted by ID. It adds faults to f.
func (m *maker) endpoints(s stock, f *faults) []discovery.Endpoint {
	for _, r := range s.pods {
		if r.value.fault != "" {
			f.note("pod/"+r.name, r.value.fault)
		}
	}
	for _, r := range s.slices {
		if r.value.fault != "" {
			f.note("service/"+r.value.service, r.value.fault)
		}
	}
	if len(m.roles) > 0 {
		return m.ofServices(s, f)
	}
	list, g, ranks := make([]discovery.Endpoint, 0, len(s.pods)), lwsGroupsOf(s.pods), false
	for _, r := range s.pods {
		ranks = ranks || r.value.ranks
		for _, e := range r.value.endpoints {
			if !r.value.ranks {
				e = g.complete(e, r.value.worker)
			}
			list = appendEndpoints(list, zoned(e, s.nodes))
		}
	}
	return byID(list, ranks)
}

// byID sorts a list in which ports follow the names of pods: the list is by these names already.
func byID(list []discovery.Endpoint, ranks bool) []discovery.Endpoint {
	if ranks {
		slices.SortFunc(list, func(a, b discovery.Endpoint) int { return cmp.Compare(a.ID, b.ID) })
	}
	return list
}

func zoned(e discovery.Endpoint, nodes rows[string]) discovery.Endpoint {
	if e.Zone == "" && e.Node != "" {
		e.Zone = nodes.get(e.Node)
	}
	return e
}

// ofServices makes the list from the slices of all services.
func (m *maker) ofServices(s stock, f *faults) []discovery.Endpoint {
	found := map[string]*sliceEndpoint{}
	for i, service := range m.o.Services {
		own := ofService(service.Name, s.slices)
		if i == 0 {
			found = own
			continue
		}
		for id, e := range own {
			was, seen := found[id]
			if !seen {
				found[id] = e
				continue
			}
			both, err := was.and(e)
			if err != nil {
				f.note("twice/"+id, quoted("pod", e.pod, err))
			}
			found[id] = both
		}
	}
	entries := slices.SortedFunc(maps.Values(found), func(a, b *sliceEndpoint) int {
		return cmp.Compare(a.endpoint.ID, b.endpoint.ID)
	})
	list, g, ranks := make([]discovery.Endpoint, 0, len(entries)), lwsGroupsOf(s.pods), false
	var joined []discovery.Endpoint
	for _, e := range entries {
		if e.endpoint.Role != 0 {
			list = appendEndpoints(list, zoned(e.endpoint, s.nodes))
			continue
		}
		var err error
		joined, err = m.joined(joined[:0], e, s.pods, g)
		ranks = ranks || len(joined) > 0 && joined[0].ID != e.endpoint.ID
		if err != nil {
			f.note("pod/"+e.pod, quoted("pod", e.pod, err))
		}
		for _, engine := range joined {
			list = appendEndpoints(list, zoned(engine, s.nodes))
		}
	}
	return byID(list, ranks)
}

// ofService merges the slices of one service, by ID.
func ofService(name string, slices rows[*slice]) map[string]*sliceEndpoint {
	total := 0
	for _, r := range slices {
		if r.value.service == name {
			total += len(r.value.endpoints)
		}
	}
	own := make(map[string]*sliceEndpoint, total)
	for _, r := range slices {
		if r.value.service != name {
			continue
		}
		for i := range r.value.endpoints {
			e := &r.value.endpoints[i]
			if was, seen := own[e.endpoint.ID]; !seen || e.betterThan(was) {
				own[e.endpoint.ID] = e
			}
		}
	}
	return own
}

// betterThan chooses between two entries for the same engine in slices of one service. A pod with two address families
// is one engine, and its IPv4 entry counts. Otherwise the readier entry counts: the other one is out of date, because
// the engine was moved to another slice or a pod of the same name was there before.
func (e *sliceEndpoint) betterThan(was *sliceEndpoint) bool {
	if e.uid == was.uid && e.family != was.family {
		return e.family == discoveryv1.AddressTypeIPv4 || was.family != discoveryv1.AddressTypeIPv4 &&
			e.family == discoveryv1.AddressTypeIPv6
	}
	return readiness(e.endpoint.Phase) > readiness(was.endpoint.Phase)
}

func readiness(p discovery.Phase) int {
	switch p {
	case discovery.PhaseReady:
		return 2
	case discovery.PhaseDraining:
		return 1
	default:
		return 0
	}
}

// and merges the entries of an engine behind two services. The result has both roles.
func (e *sliceEndpoint) and(other *sliceEndpoint) (*sliceEndpoint, error) {
	switch {
	case e.uid != other.uid:
		if other.betterThan(e) {
			return other, nil
		}
		return e, nil
	case *e.endpoint.URL != *other.endpoint.URL || !slices.Equal(e.ports.numbers, other.ports.numbers):
		return e, errors.New("two services have different ports or addresses of it: the first one counts")
	}
	both := *e
	both.endpoint.Role |= other.endpoint.Role
	if readiness(other.endpoint.Phase) > readiness(e.endpoint.Phase) {
		both.endpoint.Phase = other.endpoint.Phase
	}
	return &both, nil
}

// joined appends the engines of a slice's entry whose pod says what they are.
func (m *maker) joined(list []discovery.Endpoint, e *sliceEndpoint, pods rows[*pod],
	g lwsGroups) ([]discovery.Endpoint, error) {
	p := pods.get(e.pod)
	if p == nil || len(p.endpoints) == 0 || e.uid != "" && p.uid != e.uid {
		return list, nil // the selector does not match it, or it is not known yet, or gone already
	}
	of := p.endpoints[0]
	if of.Phase != discovery.PhaseDraining { // otherwise the slice will say so later
		of.Phase = e.endpoint.Phase
	}
	of.Node, of.Zone = cmp.Or(e.endpoint.Node, of.Node), cmp.Or(e.endpoint.Zone, of.Zone)
	at := p.noted.of(e.ports)
	if of.URL = e.endpoint.URL; !at.ranks {
		of = g.complete(of, p.worker)
	}
	return m.spread(list, of, of.Host(), at, p.worker)
}
