// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/discovery/static"
)

// builtKinds are the ways of discovery that source makes.
var builtKinds = []string{"static", "file", "dns", "registration"}

// source makes what finds the model's engines. It reads, asks and opens nothing yet.
func (m *modelServer) source(configFile string) (discovery.Source, error) {
	switch kind := m.discoveryKinds()[0]; kind {
	case "static":
		return static.New(m.endpoints...)
	case "file":
		return file.New(m.endpointsFile(configFile), nil)
	case "dns":
		d := m.spec.Discovery.DNS
		return dns.New(&dns.Options{Prefill: d.Prefill, Decode: d.Decode, Encode: d.Encode, Port: d.Port, Resolver: d.Resolver})
	case "registration":
		return m.spec.Discovery.Registration.source()
	default:
		return nil, fmt.Errorf("discovery %s is not there yet", kind)
	}
}

// endpointsFile is where the list of discovery.file lies: beside the configuration, unless its path is absolute.
func (m *modelServer) endpointsFile(configFile string) string {
	path := m.spec.Discovery.File.Path
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(filepath.Dir(configFile), path)
}

// describe says what is asked for, and whom.
func (d dnsSpec) describe() string {
	text := "SRV records"
	if d.Port > 0 {
		text = fmt.Sprintf("addresses for port %d", d.Port)
	}
	for _, n := range []struct{ role, name string }{{"prefill", d.Prefill}, {"decode", d.Decode}, {"encode", d.Encode}} {
		if n.name != "" {
			text += ", " + n.role + " " + n.name
		}
	}
	if d.Resolver != "" {
		return text + ", from " + d.Resolver
	}
	return text + ", from the system's servers"
}
