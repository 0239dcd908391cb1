// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"

	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// checkDiscovery checks the names and addresses that the gateway itself asks or listens at. What else discovery says,
// the library has checked.
func (l *loader) checkDiscovery(m *modelServer) {
	const dnsPath, registrationPath = "spec.discovery.dns", "spec.discovery.registration"
	if m.FoundBy == "dns" || m.Has(dnsPath) {
		l.checkDNS(m.doc, dnsPath, m.Spec.Discovery.DNS)
	}
	if m.FoundBy == "registration" || m.Has(registrationPath) {
		l.checkRegistration(m.doc, registrationPath, m.Spec.Discovery.Registration)
	}
}

func (l *loader) checkDNS(doc *yamlfile.Document, at string, d modelserver.DNS) {
	if d.Prefill == "" && d.Decode == "" {
		l.fault(doc, at, "has no name to look up", "write prefill and decode")
	}
	for _, n := range []struct{ field, name string }{{"prefill", d.Prefill}, {"decode", d.Decode},
		{"encode", d.Encode}} {
		if n.name == "" {
			continue
		}
		if err := dns.CheckName(n.name); err != nil {
			l.fault(doc, at+"."+n.field, err.Error(), "write a name, like prefill.example")
		}
	}
	if d.Resolver != "" {
		err := checkAddress(at+".resolver", d.Resolver)
		l.add(doc, err)
		if host, port, _ := net.SplitHostPort(d.Resolver); err == nil && (host == "" || port == "0") {
			l.fault(doc, at+".resolver", "is not a server's address", "write HOST:PORT, like 127.0.0.1:53")
		}
	}
}

func (l *loader) checkRegistration(doc *yamlfile.Document, at string, r modelserver.Registration) {
	if r.Listen == "" && r.HTTP == "" {
		l.fault(doc, at, "has no address", "write listen (ZeroMQ), http, or both")
	}
	if r.Listen != "" {
		l.add(doc, checkAddress(at+".listen", r.Listen))
	}
	if r.HTTP != "" {
		l.add(doc, checkAddress(at+".http", r.HTTP))
	}
}
