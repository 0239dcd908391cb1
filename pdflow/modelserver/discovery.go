// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"maps"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

// Discovery says how engines are found, where they are not the pods of the workloadSelector. An object has exactly one
// of the members: [ModelServer.FoundBy] says which. Who looks engines up or listens for them checks names and
// addresses.
type Discovery struct {
	Static       Static       `json:"static"`
	File         File         `json:"file"`
	DNS          DNS          `json:"dns"`
	Kubernetes   Kubernetes   `json:"kubernetes"`
	Registration Registration `json:"registration"`
}

// Static is a list of engines that never changes.
type Static struct {
	Endpoints []static.Entry `json:"endpoints"`
}

// File is a file with a list of engines, which is watched.
type File struct {
	// Path names a YAML or JSON file: a mapping with the one key endpoints, shaped as static.endpoints. A relative path
	// starts at the configuration's folder.
	Path string `json:"path"`
}

// DNS are names whose addresses or SRV records are the engines.
type DNS struct {
	Prefill  string `json:"prefill"`  // the name of the prefill engines
	Decode   string `json:"decode"`   // that of the decode engines; the same name twice is engines of role both
	Encode   string `json:"encode"`   // that of the encode engines
	Port     int    `json:"port"`     // the engines' port; 0 asks for SRV records, which tell it
	Resolver string `json:"resolver"` // the name server, HOST:PORT
}

// Kubernetes are pods, or the endpoints of a service.
type Kubernetes struct {
	Kubeconfig string `json:"kubeconfig"` // a file; "" is the cluster that the program itself runs in
	Namespace  string `json:"namespace"`  // of the pods or the service
	Service    string `json:"service"`    // a service whose EndpointSlices list the engines; "" lists pods
	Port       int    `json:"port"`       // the engines' port
	// the ports of each pod, one for each data-parallel rank: [8000-8007], in place of port
	Ports config.Ports `json:"ports"`
}

// Registration are addresses at which engines announce themselves.
type Registration struct {
	Listen string `json:"listen"` // for ZeroMQ messages of P2pNcclConnector and MoRIIOConnector, HOST:PORT
	HTTP   string `json:"http"`   // for an HTTP API that suits all engines, HOST:PORT
}

const (
	discoveryPath = "spec.discovery"
	staticPath    = discoveryPath + ".static.endpoints"
)

// kinds are the members of Discovery.
var kinds = []string{"static", "file", "dns", "kubernetes", "registration"}

// readDiscovery finds the one way in which engines are found, and makes the endpoints of a static list.
func (m *ModelServer) readDiscovery() {
	given := []string{"kubernetes"}
	if m.Has(discoveryPath) {
		// A member without settings (kubernetes:) is null, and counts.
		given = slices.DeleteFunc(slices.Clone(kinds),
			func(k string) bool { return !gjson.GetBytes(m.object, discoveryPath+"."+k).Exists() })
	}
	if len(given) != 1 {
		problem := "has no member"
		if len(given) > 1 {
			problem = "has " + strings.Join(given, " and ")
		}
		m.fault(discoveryPath, problem, "write exactly one of "+strings.Join(kinds, ", "))
	}
	if len(given) > 0 {
		m.FoundBy = given[0]
	}
	for _, kind := range given {
		m.checkKind(kind)
	}
}

func (m *ModelServer) checkKind(kind string) {
	d, selects := m.Spec.Discovery, m.Has("spec.workloadSelector")
	if kind != "kubernetes" && selects {
		m.note(true, "spec.workloadSelector", "it chooses pods, and discovery is "+kind, "")
	}
	switch kind {
	case "static":
		m.readStatic(d.Static.Endpoints)
	case "file":
		if d.File.Path == "" {
			m.fault(discoveryPath+".file.path", missing, "write the path of a file with endpoints")
		}
	case "dns":
		m.checkPort(discoveryPath+".dns.port", d.DNS.Port)
	case "kubernetes":
		m.checkPort(discoveryPath+".kubernetes.port", d.Kubernetes.Port)
		if d.Kubernetes.Port != 0 && d.Kubernetes.Ports != nil {
			m.fault(discoveryPath+".kubernetes.ports", "is given besides port", "write one of them")
		}
		if !selects && d.Kubernetes.Service == "" {
			m.note(false, "spec.workloadSelector", "is left out, so no pod can be chosen",
				"write its matchLabels and pdGroup")
		}
	}
}

func (m *ModelServer) checkPort(path string, port int) {
	if port < 0 || port > 65535 {
		m.fault(path, "is not a port", "write 1 to 65535")
	}
}

// readStatic makes the endpoints of a static list.
func (m *ModelServer) readStatic(entries []static.Entry) {
	if len(entries) == 0 {
		m.fault(staticPath, "has no endpoint", "write one {url, role} for each engine")
		return
	}
	var err error
	m.Endpoints, err = static.Endpoints(entries)
	m.faults = append(m.faults, config.Within(staticPath, err))
	if err == nil {
		m.checkGroups()
	}
}

// checkGroups notes groups in which no pair can be made.
func (m *ModelServer) checkGroups() {
	groups := map[string]discovery.Role{}
	var all discovery.Role
	for _, e := range m.Endpoints {
		groups[e.Group] |= e.Role
		all |= e.Role
	}
	if all == discovery.RoleEncode {
		m.note(false, staticPath, "no engine is there for prefill and decode",
			"write endpoints of these roles, or of role both")
	}
	const remedy = "P and D are paired inside one group only"
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		in := "group " + g
		if g == "" {
			in = "the engines without a group"
		}
		switch role := groups[g]; {
		case role.Has(discovery.RoleBoth) || role == discovery.RoleEncode:
		case role.Has(discovery.RolePrefill):
			m.note(false, staticPath, in+": prefill engines without a decode engine", remedy)
		default:
			m.note(false, staticPath, in+": decode engines without a prefill engine", remedy)
		}
	}
}
