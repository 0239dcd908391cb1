// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/pdkit/pdkit/discovery"
)

const zoneLabel = corev1.LabelTopologyZone

// pod holds what is kept of a pod.
type pod struct {
	uid types.UID
	// Its engines, if it has an address: one for each of its ports. If a service's slices list the engines, it is one
	// endpoint without a URL, and noted is what its annotations say of ports.
	endpoints []discovery.Endpoint
	noted     *portNotes
	worker    *worker // nil if it belongs to no LeaderWorkerSet
	fault     string  // why it is not listed although its labels match
	ranks     bool    // each endpoint is that of one port
}

func samePod(a, b *pod) bool {
	return a.uid == b.uid && a.fault == b.fault && a.ranks == b.ranks &&
		sameWorker(a.worker, b.worker) && samePortNotes(a.noted, b.noted) && sameEndpoints(a.endpoints, b.endpoints)
}

// podTable returns a table of pods. The functions are those of [table].
func (m *maker) podTable(changed, listed func()) *table[*pod] {
	return &table[*pod]{convert: m.pod, same: samePod, changed: changed, listed: listed}
}

// pod converts a pod.
func (m *maker) pod(object any) (*pod, bool) {
	p, ok := object.(*corev1.Pod)
	if !ok {
		return nil, false
	}
	v := &pod{uid: p.UID, worker: workerOf(p)}
	role := m.role(p.Labels)
	if role == 0 || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed ||
		p.Status.PodIP == "" && !m.join {
		return v, true
	}
	e := discovery.Endpoint{
		ID: m.ids + p.Name, Role: role, Phase: podPhase(p), Group: m.group(p.Labels), Zone: p.Labels[zoneLabel],
		Node: p.Spec.NodeName,
	}
	err := m.annotate(&e, p.Annotations, variables{p.Status.PodIP, p.Name, p.Spec.NodeName})
	if err == nil {
		v.noted, err = portNotesOf(p.Annotations)
	}
	if err == nil && m.join {
		v.endpoints = []discovery.Endpoint{e}
	} else if err == nil {
		err = m.address(v, e, p)
	}
	if err != nil {
		v.fault = quoted("pod", p.Name, err)
	}
	return v, true
}

// podHost returns a pod's address, or "" if it has none.
func podHost(p *corev1.Pod) string {
	ip, err := netip.ParseAddr(p.Status.PodIP)
	if err != nil || ip.Zone() != "" {
		return ""
	}
	return ip.String()
}

// address makes the pod's endpoints of what they have in common.
func (m *maker) address(v *pod, e discovery.Endpoint, p *corev1.Pod) error {
	host := podHost(p)
	if host == "" {
		return errors.New("its address is none")
	}
	at := ports{m.o.Ports, true}
	if len(m.o.Ports) == 0 && (v.noted == nil || v.noted.own == nil) {
		port, err := m.podPort(p)
		if err != nil {
			return err
		}
		at = onePort(port)
	}
	at = v.noted.of(at)
	var err error
	v.noted, v.ranks = nil, at.ranks
	v.endpoints, err = m.spread(nil, e, host, at, v.worker)
	return err
}

// podPhase returns the phase of a pod that has not ended.
func podPhase(p *corev1.Pod) discovery.Phase {
	if p.DeletionTimestamp != nil {
		return discovery.PhaseDraining
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.Status.Phase == corev1.PodRunning {
			return discovery.PhaseReady
		}
	}
	return discovery.PhaseNotReady
}

// podPort finds the engine's port, also in sidecars: a proxy before the engine is one, and may be an init container
// that goes on running.
func (m *maker) podPort(p *corev1.Pod) (int, error) {
	if m.port != 0 {
		return m.port, nil
	}
	name := m.portName
	if name == "" {
		name = defaultPortName
	}
	for _, c := range p.Spec.Containers {
		if port := containerPort(c, name); port != 0 {
			return port, nil
		}
	}
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
			continue
		}
		if port := containerPort(c, name); port != 0 {
			return port, nil
		}
	}
	if m.portName == "" {
		return defaultPort, nil
	}
	return 0, fmt.Errorf("no port of its containers is named %q", m.portName)
}

func containerPort(c corev1.Container, name string) int {
	for _, p := range c.Ports {
		if p.Name == name && tcp(p.Protocol) && p.ContainerPort >= 1 && p.ContainerPort <= 65535 {
			return int(p.ContainerPort)
		}
	}
	return 0
}

func tcp(p corev1.Protocol) bool { return p == "" || p == corev1.ProtocolTCP }
