// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/discovery/kubernetes"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/transport"
)

// unusable returns what is wrong with the files that a well-formed configuration names, and the roles that no engine
// has. -check ends with these faults, of type yamlfile.Faults. A start does not look for them: a list of engines may be
// written later, and TLS files end the start by themselves.
func (c *configuration) unusable() error {
	l, g := &loader{cfg: c}, c.gateway
	if t := g.TLS; t != nil {
		l.checkPair(c.doc, c.beside(t.CertFile), c.beside(t.KeyFile))
		l.checkAuthorities(c.doc, "spec.tls.clientCAFile", c.beside(t.ClientCAFile))
	}
	if g.RegistrationTokenFile != "" {
		_, err := registration.New(&registration.Options{HTTP: "127.0.0.1:0", // New does not listen
			TokenFile: c.beside(g.RegistrationTokenFile)})
		if err != nil {
			l.unreadable(c.doc, "spec.registrationTokenFile", err)
		}
	}
	if s := g.ModelServers; s != nil {
		l.checkKubeconfig(c.doc, "spec.modelServers.kubeconfig", s.Kubeconfig)
	}
	for _, m := range c.models {
		l.checkPair(m.doc, m.Spec.TLS.CertFile, m.Spec.TLS.KeyFile)
		l.checkAuthorities(m.doc, "spec.tls.caFile", m.Spec.TLS.CAFile)
		l.checkRoles(m)
	}
	if len(l.faults) > 0 {
		return l.faults.Sorted()
	}
	return nil
}

func (l *loader) unreadable(d *yamlfile.Document, path string, err error) {
	l.fault(d, path, "is of no use: "+err.Error(), "correct the file or its path")
}

// checkPair checks a certificate and its key, if they are given.
func (l *loader) checkPair(d *yamlfile.Document, certFile, keyFile string) {
	if certFile == "" || keyFile == "" { // one without the other is a fault already
		return
	}
	config, err := transport.ServerTLSFiles(certFile, keyFile, "")
	if err != nil {
		l.unreadable(d, "spec.tls", err)
	} else if end := config.Certificates[0].Leaf.NotAfter; time.Now().After(end) {
		l.fault(d, "spec.tls.certFile", "has expired at "+end.UTC().Format(time.RFC3339), "renew the certificate")
	}
}

// checkAuthorities checks a file with certificates of authorities, if it is given.
func (l *loader) checkAuthorities(d *yamlfile.Document, path, caFile string) {
	if _, err := transport.TLSFiles(caFile, "", "", ""); err != nil {
		l.unreadable(d, path, err)
	}
}

// checkKubeconfig checks a kubeconfig, if it is given. Without one the cluster is the one that the gateway will run in.
func (l *loader) checkKubeconfig(d *yamlfile.Document, path, file string) {
	if file == "" {
		return
	}
	if _, err := kubernetes.Config(file); err != nil {
		l.unreadable(d, path, err)
	}
}

// checkRoles checks that prefill and decode engines can be found. That an encode engine is missing is a warning, since
// requests without media are served.
func (l *loader) checkRoles(m *modelServer) {
	found, at := m.Spec.Discovery, "spec.discovery."+m.FoundBy
	var engines []discovery.Endpoint
	var roles discovery.Role
	ask := func(asked bool, role discovery.Role) {
		if asked {
			roles |= role
		}
	}
	switch m.FoundBy {
	case "registration": // engines tell their roles
		return
	case "static":
		at, engines = at+".endpoints", m.Endpoints
	case "file":
		var err error
		at += ".path"
		if engines, err = file.Load(l.cfg.beside(found.File.Path)); err != nil {
			l.unreadable(m.doc, at, err)
			return
		}
	case "dns":
		ask(found.DNS.Prefill != "", discovery.RolePrefill)
		ask(found.DNS.Decode != "", discovery.RoleDecode)
	case "kubernetes":
		l.checkKubeconfig(m.doc, at+".kubeconfig", found.Kubernetes.Kubeconfig)
		g := m.Spec.WorkloadSelector.PDGroup
		if g == nil {
			roles = discovery.RoleBoth
			break
		}
		at = "spec.workloadSelector.pdGroup"
		ask(len(g.PrefillLabels) > 0, discovery.RolePrefill)
		ask(len(g.DecodeLabels) > 0, discovery.RoleDecode)
	}
	for _, e := range engines {
		roles |= e.Role
	}
	const remedy = "name one: requests need both roles"
	if !roles.Has(discovery.RolePrefill) && !m.decodeServesAlone() {
		l.fault(m.doc, at, "has no prefill engine", remedy)
	}
	if !roles.Has(discovery.RoleDecode) {
		l.fault(m.doc, at, "has no decode engine", remedy)
	}
}

// decodeServesAlone reports whether decode engines serve requests while no prefill engine is there.
func (m *modelServer) decodeServesAlone() bool {
	for c := m.Main; c != nil; c = c.Fallback {
		if c.Spec.Fallback == config.FallbackDecode {
			return true
		}
	}
	return false
}
