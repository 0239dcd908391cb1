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
	list := make([]discovery.Endpoint, 0, len(s.pods))
	for _, r := range s.pods {
		if r.value.listed {
			list = appendEndpoints(list, zoned(r.value.endpoint, s.nodes))
		}
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
	sorted := slices.SortedFunc(maps.Values(found), func(a, b *sliceEndpoint) int {
		return cmp.Compare(a.endpoint.ID, b.endpoint.ID)
	})
	list := make([]discovery.Endpoint, 0, len(sorted))
	for _, e := range sorted {
		if joined, ok := m.joined(e, s.pods); ok {
			list = appendEndpoints(list, zoned(joined, s.nodes))
		}
	}
	return list
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
	case *e.endpoint.URL != *other.endpoint.URL:
		return e, errors.New("two services have different ports or addresses of it: the first one counts")
	}
	both := *e
	both.endpoint.Role |= other.endpoint.Role
	if readiness(other.endpoint.Phase) > readiness(e.endpoint.Phase) {
		both.endpoint.Phase = other.endpoint.Phase
	}
	return &both, nil
}

// joined adds what the pod of a slice's endpoint says, for services that need it.
func (m *maker) joined(e *sliceEndpoint, pods rows[*pod]) (discovery.Endpoint, bool) {
	joined := e.endpoint
	if joined.Role != 0 {
		return joined, true
	}
	p := pods.get(e.pod)
	if p == nil || !p.listed || e.uid != "" && p.uid != e.uid {
		return joined, false // the selector does not match it, or it is not known yet, or gone already
	}
	of := p.endpoint
	of.URL, of.Phase = joined.URL, joined.Phase
	if p.endpoint.Phase == discovery.PhaseDraining {
		of.Phase = discovery.PhaseDraining // the slice will say so later
	}
	of.Node, of.Zone = cmp.Or(joined.Node, of.Node), cmp.Or(joined.Zone, of.Zone)
	return of, true
}
