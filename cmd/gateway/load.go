// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a file may name
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

const (
	kindGateway    = "Gateway"
	gatewayVersion = "pdkit.dev/v1alpha1"
)

// load reads a configuration file. The error is of type yamlfile.Faults, or what read returns.
func load(file string, read func(data []byte) (*configuration, error)) (*configuration, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, wholeFile(file, "cannot be read", "name a file that exists and may be read with -config")
	}
	return read(data)
}

// wholeFile is a fault of a file as a whole.
func wholeFile(file, problem, remedy string) yamlfile.Faults {
	return yamlfile.Faults{{File: file, Line: 1,
		FieldError: &config.FieldError{Path: "file", Problem: problem, Remedy: remedy}}}
}

// parse reads and checks a configuration. The error is of type yamlfile.Faults and holds all that is wrong.
func parse(file string, data []byte) (*configuration, error) {
	docs, faults := yamlfile.Read(file, data)
	l := &loader{cfg: &configuration{file: file, content: data, gateway: defaultGateway()}, faults: faults}
	for _, d := range docs {
		l.document(d)
	}
	l.checkUnique()
	l.checkListeners()
	switch {
	case len(l.faults) > 0:
		return nil, l.faults.Sorted()
	case len(l.cfg.models) == 0 && l.cfg.gateway.ModelServers == nil:
		return nil, wholeFile(file, "has no ModelServer", "write one for each model that is to be served")
	}
	return l.cfg, nil
}

// loader collects the documents of one file.
type loader struct {
	cfg     *configuration
	gateway *yamlfile.Document
	faults  yamlfile.Faults
}

// add adds the faults of err, each at its line of the document.
func (l *loader) add(d *yamlfile.Document, err error) { l.faults = append(l.faults, d.Faults(err)...) }

func (l *loader) fault(d *yamlfile.Document, path, problem, remedy string) {
	l.add(d, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
}

func (l *loader) document(d *yamlfile.Document) {
	kind, ok := l.kind(d)
	switch {
	case !ok:
	case kind == modelserver.Kind:
		l.cfg.models = append(l.cfg.models, l.modelServer(d))
	case l.gateway != nil:
		l.fault(d, "kind", fmt.Sprintf("is a second Gateway, the first is on line %d", l.gateway.Line),
			"keep one of the two")
	default:
		l.gateway, l.cfg.doc = d, d
		o := gatewayObject{Spec: defaultGateway()}
		l.add(d, config.Decode(d.JSON, &o))
		l.checkGateway(d, o.Spec)
		l.cfg.gateway = o.Spec
	}
}

// modelServer reads a ModelServer.
func (l *loader) modelServer(d *yamlfile.Document) *modelServer {
	m := &modelServer{doc: d}
	var err error
	m.ModelServer, err = modelserver.Read(d.JSON)
	l.add(d, err)
	m.NoteIdle(func(c *modelserver.Connector, engines []discovery.Endpoint) (idle []config.FieldError) {
		for _, n := range launch.Idle(c.KVConnector,
			launch.Deployment{Spec: c.Spec, Endpoints: engines, Model: m.ServedModel()}) {
			idle = append(idle, config.FieldError{Path: n.Path, Problem: n.Text})
		}
		return idle
	})
	l.checkDiscovery(m)
	for _, path := range []*string{&m.Spec.TLS.CAFile, &m.Spec.TLS.CertFile, &m.Spec.TLS.KeyFile} {
		*path = l.cfg.beside(*path)
	}
	for _, n := range m.Notes {
		kind := warning
		if n.NoEffect {
			kind = withoutEffect
		}
		l.cfg.notes = append(l.cfg.notes, note{kind, d.Fault(n.FieldError)})
	}
	return m
}

// kind reads a document's kind and checks a Gateway's apiVersion.
func (l *loader) kind(d *yamlfile.Document) (string, bool) {
	var head struct{ APIVersion, Kind json.RawMessage }
	if json.Unmarshal(d.JSON, &head) != nil {
		return "", false
	}
	var kind, version string
	kinds := []string{kindGateway, modelserver.Kind}
	switch {
	case head.Kind == nil:
		l.fault(d, "kind", "is missing", "write kind: Gateway or kind: ModelServer")
		return "", false
	case json.Unmarshal(head.Kind, &kind) != nil || !slices.Contains(kinds, kind):
		l.fault(d, "kind", "is not a known kind", config.Suggest(kind, kinds))
		return "", false
	}
	if kind == modelserver.Kind {
		return kind, true // whose version the library checks
	}
	switch {
	case head.APIVersion == nil:
		l.fault(d, "apiVersion", "is missing", "write apiVersion: "+gatewayVersion)
	case json.Unmarshal(head.APIVersion, &version) != nil || version != gatewayVersion:
		l.fault(d, "apiVersion", "is not known for kind "+kind, "write "+gatewayVersion)
	}
	return kind, true
}

// checkUnique finds ModelServers with the same name, or models of the same name.
func (l *loader) checkUnique() {
	names, models := map[string]int{}, map[string]int{}
	for _, m := range l.cfg.models {
		name := m.fullName()
		if first, taken := names[name]; taken && name != "" {
			l.fault(m.doc, "metadata.name", fmt.Sprintf("is the name of another ModelServer too, on line %d", first),
				"give each its own name or namespace")
		} else {
			names[name] = m.doc.LineOf("metadata.name")
		}
		if first, taken := models[m.Model()]; taken {
			l.fault(m.doc, "spec.model", fmt.Sprintf("is served by another ModelServer too, on line %d", first),
				"give each its own model; one share of a model's requests is a rollout")
		} else {
			models[m.Model()] = m.doc.LineOf("spec.model")
		}
	}
	l.checkModelNames(models)
}

// checkModelNames finds names of models that another ModelServer has, too: as its model, as a name or as an adapter's.
// models are the lines of those of spec.model.
func (l *loader) checkModelNames(models map[string]int) {
	named := map[string]int{}
	for _, m := range l.cfg.models {
		for _, name := range m.further() {
			path := config.FieldPath("spec.modelNames", name)
			line, taken := models[name]
			if !taken {
				line, taken = named[name]
			}
			for _, other := range l.cfg.models {
				if !taken && other != m && slices.Contains(other.Spec.Adapters, name) {
					line, taken = other.doc.LineOf("spec.adapters"), true
				}
			}
			if taken {
				l.fault(m.doc, path, fmt.Sprintf("is a name of another ModelServer too, on line %d", line),
					"give each its own names")
			} else {
				named[name] = m.doc.LineOf(path)
			}
		}
	}
}

// further are the names, sorted, by which requests may ask for the model and its adapters beside its own.
func (m *modelServer) further() []string {
	names := slices.Sorted(maps.Keys(m.Spec.ModelNames))
	return slices.DeleteFunc(names, func(name string) bool { return name == "*" || name == m.Model() })
}

// called are all names by which requests may ask for the model and its adapters, but for those of engines' lists.
func (m *modelServer) called() []string { return append([]string{m.Model()}, m.further()...) }

// fullName returns NAMESPACE/NAME, "" without a name.
func (m *modelServer) fullName() string {
	if m.Name == "" {
		return ""
	}
	return m.Namespace + "/" + m.Name
}

// label names the ModelServer to its operator.
func (m *modelServer) label() string {
	if m.Name == "" {
		return fmt.Sprintf("model %q", m.Model())
	}
	return fmt.Sprintf("model %q (%s)", m.Model(), m.fullName())
}
