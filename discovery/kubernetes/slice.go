// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/pdkit/pdkit/discovery"
)

// slice holds what is kept of an EndpointSlice.
type slice struct {
	service   string
	endpoints []sliceEndpoint
	fault     string // why endpoints of it are not listed
}

// sliceEndpoint is an engine in one slice. If the pod behind it decides its role, it is 0, and there is one for all
// ports.
type sliceEndpoint struct {
	pod      string // "" in a slice that was written by hand
	uid      types.UID
	family   discoveryv1.AddressType
	ports    ports // if the role is 0
	endpoint discovery.Endpoint
}

func sameSlice(a, b *slice) bool {
	return a.service == b.service && a.fault == b.fault &&
		slices.EqualFunc(a.endpoints, b.endpoints, func(a, b sliceEndpoint) bool {
			return a.pod == b.pod && a.uid == b.uid && a.family == b.family && a.ports.ranks == b.ports.ranks &&
				slices.Equal(a.ports.numbers, b.ports.numbers) && sameEndpoint(&a.endpoint, &b.endpoint)
		})
}

// sliceTable returns a table of EndpointSlices. The functions are those of [table].
func (m *maker) sliceTable(changed, listed func()) *table[*slice] {
	return &table[*slice]{convert: m.slice, same: sameSlice, changed: changed, listed: listed}
}

// slice converts an EndpointSlice.
func (m *maker) slice(object any) (*slice, bool) {
	s, ok := object.(*discoveryv1.EndpointSlice)
	if !ok {
		return nil, false
	}
	v := &slice{service: s.Labels[discoveryv1.LabelServiceName]}
	role, known := m.roles[v.service]
	if !known || len(s.Endpoints) == 0 {
		return v, true // an empty slice may have no port yet
	}
	at, err := m.slicePorts(s.Ports)
	if err != nil {
		v.fault = quoted("service", v.service, err)
		return v, true
	}
	v.endpoints = make([]sliceEndpoint, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		if v.endpoints, err = m.sliceEndpoints(v.endpoints, s, &s.Endpoints[i], at, role); err != nil {
			v.fault = quoted("service", v.service, err)
		}
	}
	return v, true
}

// sliceEndpoints appends what an entry of a slice is.
func (m *maker) sliceEndpoints(list []sliceEndpoint, s *discoveryv1.EndpointSlice, from *discoveryv1.Endpoint,
	at ports, role discovery.Role) ([]sliceEndpoint, error) {
	if len(from.Addresses) == 0 {
		return list, errors.New("an endpoint has no address")
	}
	host, err := hostOf(from.Addresses[0], s.AddressType) // the API says to ignore the others
	if err != nil {
		return list, err
	}
	v := sliceEndpoint{family: s.AddressType, endpoint: discovery.Endpoint{
		Role: role, Phase: slicePhase(from.Conditions), Zone: value(from.Zone),
		Node: value(from.NodeName),
	}}
	if t := from.TargetRef; t != nil && t.Kind == "Pod" && t.Name != "" &&
		(t.Namespace == "" || t.Namespace == m.o.Namespace) {
		v.pod, v.uid = t.Name, t.UID
		v.endpoint.ID = m.ids + t.Name
	}
	if role == 0 {
		if v.pod == "" {
			return list, errors.New("an endpoint has no pod that could say its role: want Service.Role")
		}
		v.endpoint.URL, v.ports = m.url(host, at.numbers[0]), at
		return append(list, v), nil
	}
	v.endpoint.Group = m.group(s.Labels) // a slice has its service's labels
	err = m.annotate(&v.endpoint, s.Annotations, variables{host, v.pod, v.endpoint.Node})
	var n *portNotes
	if err == nil {
		n, err = portNotesOf(s.Annotations)
	}
	if err != nil {
		return list, err
	}
	engines, err := m.spread(nil, v.endpoint, host, n.of(at), nil)
	for _, e := range engines {
		if v.endpoint = e; v.pod == "" {
			v.endpoint.ID = m.ids + s.Labels[discoveryv1.LabelServiceName] + "/" + e.URL.Host
		}
		list = append(list, v)
	}
	return list, err
}

func hostOf(address string, family discoveryv1.AddressType) (string, error) {
	switch family {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
		if ip, err := netip.ParseAddr(address); err == nil && ip.Zone() == "" &&
			ip.Is4() == (family == discoveryv1.AddressTypeIPv4) {
			return ip.String(), nil
		}
	case discoveryv1.AddressTypeFQDN:
		if len(validation.IsDNS1123Subdomain(address)) == 0 {
			return address, nil
		}
	}
	return "", errors.New("an endpoint's address is none of its family")
}

// slicePhase returns the phase that conditions describe. A missing condition means: ready is true, serving is the same
// as ready, terminating is false. In a service with publishNotReadyAddresses all are ready, and serving says which are.
func slicePhase(c discoveryv1.EndpointConditions) discovery.Phase {
	switch {
	case c.Terminating != nil && *c.Terminating:
		return discovery.PhaseDraining
	case c.Serving != nil && !*c.Serving:
		return discovery.PhaseNotReady
	case c.Ready == nil || *c.Ready:
		return discovery.PhaseReady
	}
	return discovery.PhaseNotReady
}

// slicePorts finds the engines' ports among the ports of a slice: the one of the wanted name, else those whose names
// are this name and a number (http-0, http-1), which are the ports of ranks. If no name is wanted, the only port will
// do, and so will several whose names differ only in their numbers.
func (m *maker) slicePorts(all []discoveryv1.EndpointPort) (ports, error) {
	switch {
	case len(m.o.Ports) > 0:
		return ports{m.o.Ports, true}, nil
	case m.port != 0:
		return onePort(m.port), nil
	}
	wanted := cmp.Or(m.portName, defaultPortName)
	found, byBase := []int{}, map[string][]numbered{}
	for _, p := range all {
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 || p.Protocol != nil && !tcp(*p.Protocol) {
			continue
		}
		name, port := value(p.Name), int(*p.Port)
		if name == wanted {
			return onePort(port), nil
		}
		found = append(found, port)
		base := strings.TrimRight(name, "0123456789")
		if n, err := strconv.ParseUint(name[len(base):], 10, 16); err == nil {
			base = strings.TrimSuffix(base, "-")
			byBase[base] = append(byBase[base], numbered{int(n), port})
		}
	}
	ranks := byBase[wanted]
	if m.portName == "" && len(byBase) == 1 && len(ranks) == 0 {
		for _, ranks = range byBase {
			if len(ranks) < len(found) { // the others are something else
				ranks = nil
			}
		}
	}
	switch {
	case len(ranks) > 1:
		return inOrder(ranks), nil
	case m.portName != "":
		return ports{}, fmt.Errorf("it has no port named %q", m.portName)
	case len(found) == 0:
		return ports{}, errors.New("it has no port: want Options.Port")
	case len(found) > 1:
		return ports{}, errors.New("it has several ports: want one of them in Options.Port, or Options.Ports")
	}
	return onePort(found[0]), nil
}

// numbered is a port with the number in its name.
type numbered struct{ number, port int }

func inOrder(ranks []numbered) ports {
	slices.SortFunc(ranks, func(a, b numbered) int { return cmp.Compare(a.number, b.number) })
	p := ports{ranks: true}
	for _, r := range ranks {
		p.numbers = append(p.numbers, r.port)
	}
	return p
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
