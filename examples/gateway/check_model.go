// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
)

// checkDiscovery finds the one way that a ModelServer's engines are found.
func (l *loader) checkDiscovery(m *modelServer) {
	const at = "spec.discovery"
	if raw := gjson.GetBytes(m.doc.json, at); raw.Exists() {
		for _, fe := range config.FieldErrors(config.Decode(json.RawMessage(raw.Raw), &m.discovery)) {
			l.add(m.doc, fe.In(at))
		}
	}
	kinds := m.discoveryKinds()
	if len(kinds) != 1 {
		problem := "has no member"
		if len(kinds) > 1 {
			problem = "has " + strings.Join(kinds, " and ")
		}
		l.add(m.doc, &config.FieldError{Path: at, Problem: problem, Remedy: "write exactly one of static, file, dns, kubernetes, registration"})
	}
	for _, kind := range kinds {
		if kind != "kubernetes" && m.doc.has("spec.workloadSelector") {
			l.note(withoutEffect, m.doc, "spec.workloadSelector", "it chooses pods, and discovery is "+kind, "")
		}
		l.checkKind(m, kind, at+"."+kind)
	}
}

func (l *loader) checkKind(m *modelServer, kind, at string) {
	d := m.discovery
	switch kind {
	case "static":
		l.checkStatic(m, d.Static.Endpoints)
	case "file":
		if d.File.Path == "" {
			l.add(m.doc, &config.FieldError{Path: at + ".path", Problem: missing, Remedy: "write the path of a file with endpoints"})
		}
	case "dns":
		l.checkDNS(m, at)
	case "kubernetes":
		l.add(m.doc, checkPort(at+".port", d.Kubernetes.Port)...)
		if !m.doc.has("spec.workloadSelector") && d.Kubernetes.Service == "" {
			l.note(warning, m.doc, "spec.workloadSelector", "is left out, so no pod can be chosen", "write its matchLabels and pdGroup")
		}
	case "registration":
		l.checkRegistration(m, at)
	}
}

// discoveryKinds lists the members of discovery; left out, it is kubernetes. One without settings (kubernetes:) counts.
func (m *modelServer) discoveryKinds() []string {
	if !m.doc.has("spec.discovery") {
		return []string{"kubernetes"}
	}
	var kinds []string
	for _, k := range []string{"static", "file", "dns", "kubernetes", "registration"} {
		if _, given := m.doc.lines["spec.discovery."+k]; given {
			kinds = append(kinds, k)
		}
	}
	return kinds
}

func (l *loader) checkDNS(m *modelServer, at string) {
	d := m.discovery.DNS
	if d.Prefill == "" && d.Decode == "" {
		l.add(m.doc, &config.FieldError{Path: at, Problem: "has no name to look up", Remedy: "write prefill and decode"})
	}
	for _, n := range []struct{ field, name string }{{"prefill", d.Prefill}, {"decode", d.Decode}, {"encode", d.Encode}} {
		if n.name == "" {
			continue
		}
		if err := dns.CheckName(n.name); err != nil {
			l.add(m.doc, &config.FieldError{Path: at + "." + n.field, Problem: err.Error(), Remedy: "write a name, like prefill.example"})
		}
	}
	l.add(m.doc, checkPort(at+".port", d.Port)...)
	if d.Resolver != "" {
		errs := checkAddress(at+".resolver", d.Resolver)
		if host, port, _ := net.SplitHostPort(d.Resolver); len(errs) == 0 && (host == "" || port == "0") {
			errs = []*config.FieldError{{Path: at + ".resolver", Problem: "is not a server's address", Remedy: "write HOST:PORT, like 127.0.0.1:53"}}
		}
		l.add(m.doc, errs...)
	}
}

func (l *loader) checkRegistration(m *modelServer, at string) {
	r := m.discovery.Registration
	if r.Listen == "" && r.HTTP == "" {
		l.add(m.doc, &config.FieldError{Path: at, Problem: "has no address", Remedy: "write listen (ZeroMQ), http, or both"})
	}
	if r.Listen != "" {
		l.add(m.doc, checkAddress(at+".listen", r.Listen)...)
	}
	if r.HTTP != "" {
		l.add(m.doc, checkAddress(at+".http", r.HTTP)...)
	}
}

func checkPort(path string, port int) []*config.FieldError {
	if port < 0 || port > 65535 {
		return []*config.FieldError{{Path: path, Problem: "is not a port", Remedy: "write 1 to 65535"}}
	}
	return nil
}

const staticPath = "spec.discovery.static.endpoints"

// checkStatic makes the endpoints of a static list.
func (l *loader) checkStatic(m *modelServer, list []endpointSpec) {
	if len(list) == 0 {
		l.add(m.doc, &config.FieldError{Path: staticPath, Problem: "has no endpoint", Remedy: "write one {url, role} for each engine"})
		return
	}
	seen := map[string]int{}
	for i, spec := range list {
		at := fmt.Sprintf("%s[%d]", staticPath, i)
		e, errs := makeEndpoint(at, spec)
		l.add(m.doc, errs...)
		if len(errs) > 0 {
			continue
		}
		key := sameEngine(e.URL)
		if first, twice := seen[key]; twice {
			l.add(m.doc, &config.FieldError{Path: at + ".url", Problem: fmt.Sprintf("is listed twice, first on line %d", first), Remedy: "list each engine once; one that serves both legs has role: both"})
			continue
		}
		seen[key] = m.doc.lineOf(at + ".url")
		m.endpoints = append(m.endpoints, e)
	}
	if len(m.endpoints) == len(list) {
		l.checkGroups(m)
	}
}

func makeEndpoint(at string, spec endpointSpec) (e discovery.Endpoint, errs []*config.FieldError) {
	var role discovery.Role
	switch spec.Role {
	case "":
		errs = append(errs, &config.FieldError{Path: at + ".role", Problem: missing, Remedy: "write prefill, decode, both or encode"})
	default:
		var err error
		if role, err = discovery.ParseRole(spec.Role); err != nil {
			errs = append(errs, &config.FieldError{Path: at + ".role", Problem: "is not a role", Remedy: nearestOf(spec.Role, []string{"prefill", "decode", "both", "encode"})})
		}
	}
	if spec.URL == "" {
		return e, append(errs, &config.FieldError{Path: at + ".url", Problem: missing, Remedy: "write http://HOST:PORT"})
	}
	if e, err := discovery.New(spec.URL, role); err != nil {
		what, _, _ := strings.Cut(err.Error(), ": want")
		errs = append(errs, &config.FieldError{Path: at + ".url", Problem: "is not an engine's address (" + what + ")", Remedy: "write http://HOST:PORT"})
	} else if len(errs) == 0 {
		e.Group, e.Zone, e.Attributes = spec.Group, spec.Zone, spec.Attributes
		return e, nil
	}
	return e, errs
}

// sameEngine is equal for URLs that lead to one engine.
func sameEngine(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port) + u.Path
}

// checkGroups tells of groups in which no pair can be made.
func (l *loader) checkGroups(m *modelServer) {
	groups := map[string]discovery.Role{}
	var all discovery.Role
	for _, e := range m.endpoints {
		groups[e.Group] |= e.Role
		all |= e.Role
	}
	if all == discovery.RoleEncode {
		l.note(warning, m.doc, staticPath, "no engine is there for prefill and decode", "write endpoints of these roles, or of role both")
	}
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		in := "group " + g
		if g == "" {
			in = "the engines without a group"
		}
		switch role := groups[g]; {
		case role.Has(discovery.RoleBoth) || role == discovery.RoleEncode:
		case role.Has(discovery.RolePrefill):
			l.note(warning, m.doc, staticPath, in+": prefill engines without a decode engine", "P and D are paired inside one group only")
		default:
			l.note(warning, m.doc, staticPath, in+": decode engines without a prefill engine", "P and D are paired inside one group only")
		}
	}
}
