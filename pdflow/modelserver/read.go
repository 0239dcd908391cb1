// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/discovery"
)

// ModelServer is an object that has been read, with its connectors open. Nothing has been dialled or listened on. It
// does not change any more, and becomes flows once: connectors belong to the flows that use them.
type ModelServer struct {
	Namespace, Name string // Name is "" without one, Namespace is default without one
	Spec            Spec
	Notes           []Note
	Main            *Connector
	Rollout         *Connector // nil without one

	// the one member of discovery: static, file, dns, kubernetes (the default), registration
	FoundBy   string
	Endpoints []discovery.Endpoint // of a static list

	object  []byte
	encoder *epd.Options // nil without an encode stage
	opened  []openedAt   // the connectors that could be opened, in the order of their paths
	faults  []error
}

// Note says what is odd about a well-formed object. Its field is as in faults.
type Note struct {
	NoEffect bool // the setting has none; otherwise it is a warning
	*config.FieldError
}

const missing = "is missing"

// Read reads a ModelServer strictly. Faults are an unknown field, a wrong type or value, a connector that refuses its
// settings, and an engine of a static list that lacks what a connector needs. The error holds all of them at once: see
// [config.FieldErrors]. Their paths begin at the object's root, and no value of a setting is in them. With faults the
// ModelServer holds what could be read, and has no flows.
func Read(raw []byte) (*ModelServer, error) {
	m := &ModelServer{object: raw, Namespace: "default", FoundBy: "kubernetes"}
	var o object
	m.faults = append(m.faults, config.Decode(raw, &o))
	m.Spec = o.Spec
	m.head(&o)
	if !m.Has("spec") {
		m.fault("spec", missing, "write spec: {model: NAME, kvConnector: {type: NAME}}")
		return m, errors.Join(m.faults...)
	}
	m.readDiscovery()
	if len(m.Spec.TrafficPolicy) > 0 {
		m.note(true, "spec.trafficPolicy", "retries and timeouts are those of kvConnector", "")
	}
	m.checkPort("spec.workloadPort.port", m.Spec.WorkloadPort.Port)
	if t := m.Spec.TLS; (t.CertFile == "") != (t.KeyFile == "") {
		m.fault("spec.tls", "has one of certFile and keyFile", "write both, or neither")
	} else if t != (TLS{}) && len(m.Endpoints) > 0 && !slices.ContainsFunc(m.Endpoints,
		func(e discovery.Endpoint) bool { return e.URL.Scheme == "https" }) {
		m.note(true, "spec.tls", "no engine of the list has an https URL", "")
	}
	if m.Has("spec.encoder") {
		m.readEncoder()
	}
	m.checkAttestation()
	m.checkKVEvents()
	m.Main = m.open("spec.kvConnector", m.Spec.KVConnector)
	if m.Has("spec.rollout") {
		m.readRollout()
	}
	m.checkModelNames()
	m.checkRescue()
	m.checkKeepAlive()
	m.checkUsage()
	m.checkAdmission()
	m.checkDecision()
	m.keepApart()
	for _, p := range m.opened {
		m.check(p.path, p.Connector)
	}
	return m, errors.Join(m.faults...)
}

// Model returns the model that requests name, "*" for all.
func (m *ModelServer) Model() string {
	if m.Spec.Model == "" {
		return "*"
	}
	return m.Spec.Model
}

// Has reports whether a field is given, and not null. A part with a fault inside is given too.
func (m *ModelServer) Has(path string) bool {
	r := gjson.GetBytes(m.object, path)
	return r.Exists() && r.Type != gjson.Null
}

func (m *ModelServer) fault(path, problem, remedy string) {
	m.faults = append(m.faults, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
}

func (m *ModelServer) note(noEffect bool, path, problem, remedy string) {
	m.Notes = append(m.Notes, Note{noEffect, &config.FieldError{Path: path, Problem: problem, Remedy: remedy}})
}

// head checks all but the spec: kind, apiVersion, metadata.
func (m *ModelServer) head(o *object) {
	var kind, version string
	switch {
	case o.Kind == nil:
		m.fault("kind", missing, "write kind: "+Kind)
	case json.Unmarshal(o.Kind, &kind) != nil || kind != Kind:
		m.fault("kind", "is not a known kind", "write kind: "+Kind)
	}
	switch {
	case o.APIVersion == nil:
		m.fault("apiVersion", missing, "write apiVersion: "+APIVersions()[0])
	case json.Unmarshal(o.APIVersion, &version) != nil || !slices.Contains(APIVersions(), version):
		m.fault("apiVersion", "is not known for kind "+Kind, "write "+strings.Join(APIVersions(), " or "))
	}
	if o.Metadata == nil {
		return
	}
	var meta map[string]json.RawMessage
	if json.Unmarshal(o.Metadata, &meta) != nil {
		m.fault("metadata", "is not an object", "write metadata: {name: NAME}")
		return
	}
	read := func(key, otherwise string) string {
		s := otherwise
		if raw := meta[key]; raw != nil && json.Unmarshal(raw, &s) != nil {
			m.fault("metadata."+key, "is not a string", "put it in quotes")
		}
		return s
	}
	m.Namespace, m.Name = read("namespace", m.Namespace), read("name", "")
}

func (m *ModelServer) readRollout() {
	const at = "spec.rollout"
	switch w := m.Spec.Rollout.Weight; {
	case w == nil:
		m.fault(at+".weight", missing, "write the share of requests in percent, 0 to 100")
	case *w < 0 || *w > 100:
		m.fault(at+".weight", "is not a percentage", "write 0 to 100")
	}
	if !m.Has(at + ".kvConnector") {
		m.fault(at+".kvConnector", missing, "write the connector to roll out: {type: NAME}")
		return
	}
	m.Rollout = m.open(at+".kvConnector", m.Spec.Rollout.KVConnector)
}

// readEncoder reads the encode stage, which open puts before each connector.
func (m *ModelServer) readEncoder() {
	const at = "spec.encoder"
	e := m.Spec.Encoder
	switch {
	case e.Type == "":
		m.fault(at+".type", missing, "write example or nixl")
		return
	case !slices.Contains(epd.Types(), e.Type):
		m.fault(at+".type", "is not a known encoder", config.Suggest(e.Type, epd.Types()))
		return
	}
	m.encoder = &epd.Options{}
	m.faults = append(m.faults, config.Within(at+".config", config.Decode(e.Config, m.encoder)))
	m.encoder.Type = e.Type
	encodes := func(e discovery.Endpoint) bool { return e.Role.Has(discovery.RoleEncode) }
	if len(m.Endpoints) > 0 && !slices.ContainsFunc(m.Endpoints, encodes) {
		m.note(false, at, "has no endpoint of role encode",
			"add one under discovery.static.endpoints, or remove encoder")
	}
}
