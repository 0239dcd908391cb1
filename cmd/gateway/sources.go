// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/discovery/kubernetes"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// source makes the source of the model's engines. It only reads a kubeconfig: it asks nobody and opens nothing. The
// source calls onError with trouble that does not end it.
func (m *modelServer) source(cfg *configuration, onError func(error)) (discovery.Source, error) {
	switch m.FoundBy {
	case "static":
		return newListing(m.Endpoints), nil
	case "file":
		return file.New(cfg.beside(m.Spec.Discovery.File.Path), nil)
	case "dns":
		d := m.Spec.Discovery.DNS
		return dns.New(&dns.Options{Prefill: d.Prefill, Decode: d.Decode, Encode: d.Encode, Port: d.Port,
			Resolver: d.Resolver})
	case "registration":
		r := m.Spec.Discovery.Registration
		return registration.New(&registration.Options{Listen: r.Listen, HTTP: r.HTTP,
			TokenFile: cfg.beside(cfg.gateway.RegistrationTokenFile)})
	default:
		return m.cluster(onError)
	}
}

// cluster makes the source of a model whose engines are pods.
func (m *modelServer) cluster(onError func(error)) (discovery.Source, error) {
	k, sel := m.Spec.Discovery.Kubernetes, m.Spec.WorkloadSelector
	o := &kubernetes.Options{Config: m.owner, Namespace: cmp.Or(k.Namespace, m.Namespace), OnError: onError,
		Selector: kubernetes.Selector{MatchLabels: sel.MatchLabels}, Ports: k.Ports}
	if k.Ports == nil {
		o.Port = strconv.Itoa(m.port())
	}
	if g := sel.PDGroup; g != nil {
		o.Selector.PDGroup = &kubernetes.PDGroup{GroupKey: g.GroupKey, PrefillLabels: g.PrefillLabels,
			DecodeLabels: g.DecodeLabels, EncodeLabels: g.EncodeLabels}
	}
	if k.Service != "" {
		o.Services = []kubernetes.Service{{Name: k.Service}}
		if !m.selects() {
			o.Services[0].Role = discovery.RoleBoth
		}
	} else if !m.selects() {
		return static.New() // -check has warned of it
	}
	if o.Config == nil {
		var err error
		if o.Config, err = kubernetes.Config(k.Kubeconfig); err != nil {
			return nil, fmt.Errorf("spec.discovery.kubernetes.kubeconfig: %w", err)
		}
	}
	return kubernetes.New(o)
}

// selects reports whether workloadSelector chooses any pods.
func (m *modelServer) selects() bool {
	sel := m.Spec.WorkloadSelector
	return len(sel.MatchLabels) > 0 || sel.PDGroup != nil
}

// port is where the engines that Kubernetes lists are asked, if they have one port.
func (m *modelServer) port() int {
	return cmp.Or(m.Spec.Discovery.Kubernetes.Port, m.Spec.WorkloadPort.Port, 8000)
}

// describeDNS says what is asked for, and whom.
func describeDNS(d modelserver.DNS) string {
	text := "SRV records"
	if d.Port > 0 {
		text = fmt.Sprintf("addresses for port %d", d.Port)
	}
	for _, n := range []struct{ role, name string }{{"prefill", d.Prefill}, {"decode", d.Decode},
		{"encode", d.Encode}} {
		if n.name != "" {
			text += ", " + n.role + " " + n.name
		}
	}
	if d.Resolver != "" {
		return text + ", from " + d.Resolver
	}
	return text + ", from the system's servers"
}

// describePods says which pods are asked for, and where.
func (m *modelServer) describePods() string {
	k := m.Spec.Discovery.Kubernetes
	text := fmt.Sprintf("pods of namespace %s", cmp.Or(k.Namespace, m.Namespace))
	if k.Service != "" {
		text = fmt.Sprintf("EndpointSlices of service %s/%s", cmp.Or(k.Namespace, m.Namespace), k.Service)
	}
	for _, key := range slices.Sorted(maps.Keys(m.Spec.WorkloadSelector.MatchLabels)) {
		text += fmt.Sprintf(", %s=%s", key, m.Spec.WorkloadSelector.MatchLabels[key])
	}
	if k.Ports != nil {
		return fmt.Sprintf("%s, ports %s", text, k.Ports)
	}
	return fmt.Sprintf("%s, port %d", text, m.port())
}
