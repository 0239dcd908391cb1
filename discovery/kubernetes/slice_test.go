// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/pdkit/pdkit/discovery"
)

// endpointSlice is a slice of the service "prefill" whose one port is 8100.
func endpointSlice(name string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: "prefill"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new("api"), Port: new(int32(8100))}},
		Endpoints:   endpoints,
	}
}

func changed(s *discoveryv1.EndpointSlice, change func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	change(s)
	return s
}

func inService(name string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s.Labels[discoveryv1.LabelServiceName] = name
	return s
}

func ofFamily(family discoveryv1.AddressType, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	s.AddressType = family
	return s
}

func withPorts(s *discoveryv1.EndpointSlice, ports ...discoveryv1.EndpointPort) *discoveryv1.EndpointSlice {
	s.Ports = ports
	return s
}

func slicePort(name string, port int32) discoveryv1.EndpointPort {
	return discoveryv1.EndpointPort{Name: &name, Port: &port}
}

// The conditions that the controller writes.
var (
	isReady       = discoveryv1.EndpointConditions{Ready: new(true), Serving: new(true), Terminating: new(false)}
	isUnready     = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(false)}
	isTerminating = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(true), Terminating: new(true)}
	isEnding      = discoveryv1.EndpointConditions{Ready: new(false), Serving: new(false), Terminating: new(true)}
)

// of is an endpoint of a pod, or one written by hand where that is "".
func of(pod, address string, conditions discoveryv1.EndpointConditions) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{address}, Conditions: conditions}
	if pod != "" {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: pod, UID: "1"}
	}
	return e
}

func TestSlicesBecomeEndpoints(t *testing.T) {
	prefill := Options{Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}
	with := func(o Options, change func(*Options)) Options { change(&o); return o }
	port := func(port string) Options { return with(prefill, func(o *Options) { o.Port = port }) }
	and := func(name string, role discovery.Role) Options {
		return Options{Services: []Service{prefill.Services[0], {Name: name, Role: role}}}
	}
	v6 := discoveryv1.AddressTypeIPv6
	p0 := func(c discoveryv1.EndpointConditions) discoveryv1.Endpoint { return of("p-0", "10.0.0.1", c) }
	ready, onV6 := p0(isReady), of("p-0", "fd00::1", isReady)
	but := func(e discoveryv1.Endpoint, change func(*discoveryv1.Endpoint)) discoveryv1.Endpoint {
		change(&e)
		return e
	}
	another := func(address string) discoveryv1.Endpoint { // a pod of the same name after the one before
		return but(of("p-0", address, isReady), func(e *discoveryv1.Endpoint) { e.TargetRef.UID = "2" })
	}
	one := func(endpoints ...discoveryv1.Endpoint) []any { return []any{endpointSlice("s1", endpoints...)} }
	ports := func(ports ...discoveryv1.EndpointPort) []any {
		return []any{withPorts(endpointSlice("s1", ready), ports...)}
	}
	const at = "default/p-0 http://10.0.0.1:8100 prefill"

	for name, c := range map[string]outcome{
		"none":                 {prefill, nil, "", ""},
		"ready":                {prefill, one(ready), at + " ready", ""},
		"unready":              {prefill, one(p0(isUnready)), at + " not-ready", ""},
		"terminating, serving": {prefill, one(p0(isTerminating)), at + " draining", ""},
		"terminating":          {prefill, one(p0(isEnding)), at + " draining", ""},
		"not serving, and called ready as the service publishes all": {prefill,
			one(p0(discoveryv1.EndpointConditions{Ready: new(true), Serving: new(false)})), at + " not-ready", ""},
		"terminating, and called ready as the service publishes all": {prefill,
			one(p0(discoveryv1.EndpointConditions{Ready: new(true), Terminating: new(true)})), at + " draining", ""},
		"no conditions mean ready": {prefill, one(p0(discoveryv1.EndpointConditions{})), at + " ready", ""},
		"zone and node": {prefill, one(but(ready, func(e *discoveryv1.Endpoint) {
			e.Zone, e.NodeName = new("z1"), new("n1")
		})), at + " ready zone=z1 node=n1", ""},
		"only the first address counts": {prefill, one(but(ready, func(e *discoveryv1.Endpoint) {
			e.Addresses = []string{"10.0.0.1", "10.0.0.9"}
		})), at + " ready", ""},

		"several slices": {prefill, []any{endpointSlice("s2", of("p-1", "10.0.0.2", isReady)),
			endpointSlice("s1", of("p-2", "10.0.0.3", isReady), ready)},
			at + " ready\ndefault/p-1 http://10.0.0.2:8100 prefill ready\n" +
				"default/p-2 http://10.0.0.3:8100 prefill ready", ""},
		"moved to another slice: the readier is right": {prefill, []any{endpointSlice("s1", p0(isUnready)),
			endpointSlice("s2", ready), endpointSlice("s3", p0(isTerminating))}, at + " ready", ""},
		"going away rather than not ready": {prefill,
			[]any{endpointSlice("s1", p0(isUnready)), endpointSlice("s2", p0(isTerminating))}, at + " draining", ""},
		"a pod of the same name after the one before": {prefill,
			[]any{endpointSlice("s1", p0(isTerminating)), endpointSlice("s2", another("10.0.0.2"))},
			"default/p-0 http://10.0.0.2:8100 prefill ready", ""},
		"even of the other family": {prefill,
			[]any{endpointSlice("s1", p0(isTerminating)), ofFamily(v6, endpointSlice("s2", another("fd00::2")))},
			"default/p-0 http://[fd00::2]:8100 prefill ready", ""},
		"two families are one engine, by IPv4": {prefill,
			[]any{ofFamily(v6, endpointSlice("s1", onV6)), endpointSlice("s2", p0(isUnready))}, at + " not-ready", ""},
		"in either order": {prefill,
			[]any{endpointSlice("s1", p0(isUnready)), ofFamily(v6, endpointSlice("s2", onV6))}, at + " not-ready", ""},
		"IPv6 alone": {prefill, []any{ofFamily(v6, endpointSlice("s1", onV6))},
			"default/p-0 http://[fd00::1]:8100 prefill ready", ""},

		"written by hand": {prefill, []any{endpointSlice("s1", of("", "10.0.0.1", isReady)),
			endpointSlice("s2", of("", "10.0.0.1", isUnready), of("", "10.0.0.2", isReady))},
			"default/prefill/10.0.0.1:8100 http://10.0.0.1:8100 prefill ready\ndefault/prefill/10.0.0.2:8100 " +
				"http://10.0.0.2:8100 prefill ready", ""},
		"names in place of addresses": {prefill,
			[]any{ofFamily("FQDN", endpointSlice("s1", of("", "gpu1.example", isReady)))},
			"default/prefill/gpu1.example:8100 http://gpu1.example:8100 prefill ready", ""},
		"what is behind it is no pod": {prefill,
			one(but(p0(isReady), func(e *discoveryv1.Endpoint) { e.TargetRef.Kind = "VM" })),
			"default/prefill/10.0.0.1:8100 http://10.0.0.1:8100 prefill ready", ""},
		"a cluster": {with(prefill, func(o *Options) { o.Cluster = "east" }),
			one(ready, of("", "10.0.0.2", isReady)),
			"east/default/p-0 http://10.0.0.1:8100 prefill ready group=east/\neast/default/prefill/10.0.0.2:8100 " +
				"http://10.0.0.2:8100 prefill ready group=east/", ""},
		"another service is left alone": {prefill, []any{inService("web", endpointSlice("s1", ready))}, "", ""},

		"a pod of two services is of both roles": {and("decode", discovery.RoleDecode),
			[]any{endpointSlice("s1", ready), inService("decode", endpointSlice("s2", p0(isUnready)))},
			"default/p-0 http://10.0.0.1:8100 both ready", ""},
		"and of one where they disagree on its port": {and("decode", discovery.RoleDecode),
			[]any{endpointSlice("s1", ready),
				inService("decode", withPorts(endpointSlice("s2", ready), slicePort("api", 8200)))},
			at + " ready", `pod "p-0": two services have different ports or addresses of it: the first one counts`},
		"encode and a leg": {and("encode", discovery.RoleEncode),
			[]any{endpointSlice("s1", ready), inService("encode", endpointSlice("s2", ready))},
			at + " ready\ndefault/p-0/encode http://10.0.0.1:8100 encode ready", ""},

		"a port by number": {port("9000"), one(ready), "default/p-0 http://10.0.0.1:9000 prefill ready", ""},
		"also where the service none": {port("9000"), ports(),
			"default/p-0 http://10.0.0.1:9000 prefill ready", ""},
		"a port by name": {port("api"), ports(slicePort("metrics", 9090), slicePort("api", 8300)),
			"default/p-0 http://10.0.0.1:8300 prefill ready", ""},
		"no port of that name": {port("api"), ports(slicePort("metrics", 9090)), "",
			`service "prefill": it has no port named "api"`},
		"several, one named http": {prefill, ports(slicePort("metrics", 9090), slicePort("http", 8300)),
			"default/p-0 http://10.0.0.1:8300 prefill ready", ""},
		"several, none named http": {prefill, ports(slicePort("metrics", 9090), slicePort("api", 8300)), "",
			`service "prefill": it has several ports: want one of them in Options.Port, or Options.Ports`},
		"no port": {prefill, ports(), "", `service "prefill": it has no port: want Options.Port`},
		"no number, UDP, no port": {prefill, ports(discoveryv1.EndpointPort{},
			discoveryv1.EndpointPort{Port: new(int32(53)), Protocol: new(corev1.ProtocolUDP)}, slicePort("x", 0)), "",
			`service "prefill": it has no port: want Options.Port`},
		"nobody there needs no port": {prefill, []any{withPorts(endpointSlice("s1"))}, "", ""},

		"attributes": {with(prefill, func(o *Options) {
			o.Attributes = map[string]string{"host": "$(POD_IP)", "x": "1"}
		}), []any{changed(endpointSlice("s1", ready), func(s *discoveryv1.EndpointSlice) {
			s.Annotations = map[string]string{"pdkit.dev/x": "2"}
		})}, at + " ready host:10.0.0.1 x:2", ""},
		"group is the service's label": {with(and("decode", discovery.RoleDecode), func(o *Options) {
			o.Selector.PDGroup = byRole
		}), []any{changed(endpointSlice("s1", ready), func(s *discoveryv1.EndpointSlice) { s.Labels["group"] = "a" })},
			at + " ready group=a", ""},

		"garbage": {prefill, []any{
			endpointSlice("s1", of("a", "fd00::1", isReady), ready, of("b", "x", isReady)),
			ofFamily(v6, endpointSlice("s2", of("c", "10.0.0.1", isReady))),
			ofFamily("FQDN", endpointSlice("s3", of("d", "a/b", isReady))),
			ofFamily("", endpointSlice("s4", of("e", "10.0.0.1", isReady))),
			endpointSlice("s5", discoveryv1.Endpoint{})},
			at + " ready", `service "prefill": an endpoint has no address`},
	} {
		t.Run(name, c.check)
	}
}

func TestPodsSayWhatTheirServiceDoesNot(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole},
		Services: []Service{{Name: "prefill"}}}
	part := func(conditions discoveryv1.EndpointConditions) *discoveryv1.EndpointSlice {
		return endpointSlice("s1", of("p-0", "10.0.0.9", conditions))
	}
	const at = "default/p-0 http://10.0.0.9:8100 prefill"
	for name, c := range map[string]struct {
		pod, slice  any
		want, fault string
	}{
		"role, group, annotations": {enginePod(onNode, labelled(zoneLabel, "z1"), annotated("pdkit.dev/a", "1")),
			part(isReady), at + " ready group=a zone=z1 node=n1 a:1", ""},
		"the slice says who is ready": {enginePod(unready), part(isReady), at + " ready group=a", ""},
		"and who is not":              {enginePod(), part(isUnready), at + " not-ready group=a", ""},
		"the pod goes away first":     {enginePod(deleted), part(isReady), at + " draining group=a", ""},
		"or the slice knows first":    {enginePod(), part(isTerminating), at + " draining group=a", ""},
		"of no role":                  {enginePod(labelled("role", "router")), part(isReady), "", ""},
		"not known yet":               {enginePod(named("p-1")), part(isReady), "", ""},
		"of a pod before it":          {enginePod(func(p *corev1.Pod) { p.UID = "2" }), part(isReady), "", ""},
		"it has ended":                {enginePod(inPhase(corev1.PodFailed)), part(isReady), "", ""},
		"not in a slice":              {enginePod(), endpointSlice("s1"), "", ""},
		"both": {enginePod(labelled("role", "decode")), part(isReady),
			"default/p-0 http://10.0.0.9:8100 decode ready group=a", ""},
		"encode, too": {enginePod(labelled("encode", "yes")), part(isReady),
			at + " ready group=a\ndefault/p-0/encode http://10.0.0.9:8100 encode " +
				"ready group=a", ""},
		"no pod is behind it": {enginePod(), endpointSlice("s1", of("", "10.0.0.9", isReady)), "",
			`service "prefill": an endpoint has no pod that could say its role: want Service.Role`},
		"a bad annotation": {enginePod(annotated("pdkit.dev/", "1")), part(isReady), "",
			`pod "p-0": an annotation of pdkit.dev/ names no attribute`},
	} {
		t.Run(name, outcome{o, []any{c.pod, c.slice}, c.want, c.fault}.check)
	}
}
