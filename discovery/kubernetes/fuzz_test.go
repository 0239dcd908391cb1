// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
)

// From any response of an API server the source makes only valid endpoints with unique IDs.
func FuzzObjectsBecomeValidEndpoints(f *testing.F) {
	for how := range byte(16) {
		f.Add(how, "", "p-1", "10.0.0.2", "Running", "prefill", "http-0", int32(8100), "pdkit.dev/ports", "8000-8001",
			"IPv4", "10.0.0.2", byte(0x60))
		f.Add(how, "", "p-0", "10.0.0.1", "Running", "prefill", "http", int32(8100), "pdkit.dev/a", "$(POD_IP):1",
			"IPv4", "10.0.0.1", byte(0))
		f.Add(how, "api", "p-1", "fd00::1", "Failed", "decode", "api", int32(-1), "pdkit.dev/", "$(", "IPv6", "fd00::1",
			byte(0xff))
		f.Add(how, "9", "", "x", "", "", "", int32(70000), "pdkit.dev/model", "$(NODE_NAME", "FQDN", "a.example",
			byte(0x55))
	}
	f.Fuzz(
		func(t *testing.T, how byte, port, name, ip, phase, role, portName string, portNumber int32, key, value, family,
			address string, bits byte) {
			bit := func(i int) bool { return bits>>i&1 != 0 }
			o := Options{
				Config: &rest.Config{}, Port: port, Selector: Selector{MatchLabels: map[string]string{"app": "llm"}},
				Attributes: map[string]string{"a": "$(POD_NAME)"}, Nodes: true,
			}
			if how&1 != 0 {
				o.Selector.PDGroup = byRole
			}
			if how&2 != 0 {
				o.Services = []Service{{Name: "prefill"}, {Name: "decode"}}
				if how&4 != 0 {
					o.Services[0].Role, o.Services[1].Role = discovery.RolePrefill, discovery.RoleDecode
				}
			}
			if how&8 != 0 {
				o.Ports = []int{8000, 8001}
			}
			o = o.clone()
			if o.check() != nil {
				return
			}
			m := newMaker(&o)
			nothing := func() {}
			pods, parts := m.podTable(nothing, nothing), m.sliceTable(nothing, nothing)
			odd := enginePod(named(name), atIP(ip), inPhase(corev1.PodPhase(phase)), labelled("role", role),
				withPort(portName, portNumber), annotated(key, value))
			if bit(0) {
				odd.Labels["encode"] = "yes"
			}
			require.NoError(t, pods.Add(odd))
			require.NoError(t, pods.Add(enginePod()))
			conditions := discoveryv1.EndpointConditions{}
			if bit(1) {
				conditions = discoveryv1.EndpointConditions{Ready: new(bit(2)), Serving: new(bit(3)),
					Terminating: new(bit(4))}
			}
			target := ""
			if bit(5) {
				target = name
			}
			s := ofFamily(discoveryv1.AddressType(family),
				endpointSlice("s1", of(target, address, conditions), of("p-0", "10.0.0.1", isReady),
					of("", address, isReady)))
			if bit(6) {
				withPorts(s, slicePort(portName, portNumber))
			}
			s.Annotations = map[string]string{key: value}
			require.NoError(t, parts.Add(s))
			require.NoError(t, parts.Add(inService("decode", endpointSlice("s2", of(target, "10.0.0.1", conditions)))))

			var faults faults
			seen := map[string]bool{}
			for _, e := range m.endpoints(stock{pods: pods.snapshot(), slices: parts.snapshot()}, &faults) {
				require.NoError(t, e.Validate())
				if !strings.ContainsAny(name, "/:") { // which no real server has
					require.False(t, seen[e.ID], "%s is listed twice", e.ID)
				}
				seen[e.ID] = true
			}
			_ = faults.news()
		})
}
