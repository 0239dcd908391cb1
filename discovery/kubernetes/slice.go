// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"

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

// sliceEndpoint is an engine in one slice. Its role is 0 if the pod behind it decides.
type sliceEndpoint struct {
	pod      string // "" in a slice that was written by hand
	uid      types.UID
	family   discoveryv1.AddressType
	endpoint discovery.Endpoint
}

func sameSlice(a, b *slice) bool {
	return a.service == b.service && a.fault == b.fault &&
		slices.EqualFunc(a.endpoints, b.endpoints, func(a, b sliceEndpoint) bool {
			return a.pod == b.pod && a.uid == b.uid && a.family == b.family && sameEndpoint(&a.endpoint, &b.endpoint)
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
	port, err := m.slicePort(s.Ports)
	if err != nil {
		v.fault = quoted("service", v.service, err)
		return v, true
	}
	v.endpoints = make([]sliceEndpoint, 0, len(s.Endpoints))
	for i := range s.Endpoints {
		e, err := m.sliceEndpoint(s, &s.Endpoints[i], port, role)
		if err != nil {
			v.fault = quoted("service", v.service, err)
			continue
		}
		v.endpoints = append(v.endpoints, e)
	}
	return v, true
}

func (m *maker) sliceEndpoint(s *discoveryv1.EndpointSlice, from *discoveryv1.Endpoint, port int,
	role discovery.Role) (sliceEndpoint, error) {
	if len(from.Addresses) == 0 {
		return sliceEndpoint{}, errors.New("an endpoint has no address")
	}
	host, err := hostOf(from.Addresses[0], s.AddressType) // the API says to ignore the others
	if err != nil {
		return sliceEndpoint{}, err
	}
	v := sliceEndpoint{family: s.AddressType, endpoint: discovery.Endpoint{
		URL: m.url(host, port), Role: role, Phase: slicePhase(from.Conditions), Zone: value(from.Zone),
		Node: value(from.NodeName),
	}}
	if t := from.TargetRef; t != nil && t.Kind == "Pod" && t.Name != "" &&
		(t.Namespace == "" || t.Namespace == m.o.Namespace) {
		v.pod, v.uid = t.Name, t.UID
		v.endpoint.ID = m.ids + t.Name
	} else {
		v.endpoint.ID = m.ids + s.Labels[discoveryv1.LabelServiceName] + "/" +
			net.JoinHostPort(host, strconv.Itoa(port))
	}
	switch {
	case role != 0:
		v.endpoint.Group = m.group(s.Labels) // a slice has its service's labels
		return v, m.annotate(&v.endpoint, s.Annotations, variables{host, v.pod, v.endpoint.Node})
	case v.pod == "":
		return sliceEndpoint{}, errors.New("an endpoint has no pod that could say its role: want Service.Role")
	}
	return v, nil
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

// slicePort finds the engines' port among the ports of a slice.
func (m *maker) slicePort(ports []discoveryv1.EndpointPort) (int, error) {
	if m.port != 0 {
		return m.port, nil
	}
	var found []int
	for _, p := range ports {
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 || p.Protocol != nil && !tcp(*p.Protocol) {
			continue
		}
		if value(p.Name) == cmp.Or(m.portName, defaultPortName) {
			return int(*p.Port), nil
		}
		found = append(found, int(*p.Port))
	}
	switch {
	case m.portName != "":
		return 0, fmt.Errorf("it has no port named %q", m.portName)
	case len(found) == 0:
		return 0, errors.New("it has no port: want Options.Port")
	case len(found) > 1:
		return 0, errors.New("it has several ports: want one of them in Options.Port")
	}
	return found[0], nil
}

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
