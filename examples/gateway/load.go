// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a file may name
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

const (
	kindGateway    = "Gateway"
	gatewayVersion = "pdkit.dev/v1alpha1"
)

// load reads and checks a configuration file. The error is of type faults, and says all that is wrong.
func load(file string) (*configuration, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, faults{{file, 1, &config.FieldError{Path: "file", Problem: "cannot be read", Remedy: "name a file that exists and may be read with -config"}}}
	}
	return parse(file, data)
}

// parse reads and checks a configuration.
func parse(file string, data []byte) (*configuration, error) {
	docs, fs := readYAML(file, data)
	l := &loader{cfg: &configuration{file: file, gateway: defaultGateway()}, faults: fs}
	for _, d := range docs {
		l.document(d)
	}
	l.checkUnique()
	l.checkListeners()
	if len(l.cfg.models) == 0 && l.cfg.gateway.ModelServers == nil && len(l.faults) == 0 {
		l.faults = append(l.faults, fault{file, 1, &config.FieldError{Path: "file", Problem: "has no ModelServer", Remedy: "write one for each model that is to be served"}})
	}
	if len(l.faults) > 0 {
		return nil, l.faults.sorted()
	}
	return l.cfg, nil
}

// loader collects the documents of one file.
type loader struct {
	cfg     *configuration
	gateway *document
	faults  faults
}

func (l *loader) add(d *document, errs ...*config.FieldError) {
	for _, fe := range errs {
		l.faults = append(l.faults, d.fault(fe))
	}
}

func (l *loader) note(kind noteKind, d *document, path, problem, remedy string) {
	l.cfg.notes = append(l.cfg.notes, note{kind, d.fault(&config.FieldError{Path: path, Problem: problem, Remedy: remedy})})
}

func (l *loader) document(d *document) {
	kind, ok := l.kind(d)
	if !ok {
		return
	}
	if kind == kindGateway {
		if l.gateway != nil {
			l.add(d, &config.FieldError{Path: "kind", Problem: fmt.Sprintf("is a second Gateway, the first is on line %d", l.gateway.line), Remedy: "keep one of the two"})
			return
		}
		l.gateway = d
		o := gatewayObject{Spec: defaultGateway()}
		l.add(d, config.FieldErrors(config.Decode(d.json, &o))...)
		l.checkGateway(d, o.Spec)
		l.cfg.gateway = o.Spec
		return
	}
	l.cfg.models = append(l.cfg.models, l.modelServer(d))
}

// modelServer reads a ModelServer, which the library does but for how engines are found.
func (l *loader) modelServer(d *document) *modelServer {
	m := &modelServer{doc: d}
	if d.has("spec") {
		l.checkDiscovery(m)
	}
	var err error
	m.ModelServer, err = modelserver.Read(d.json, modelserver.WithEndpoints(staticPath, m.endpoints...))
	l.add(d, config.FieldErrors(err)...)
	for _, n := range m.Notes {
		kind := warning
		if n.NoEffect {
			kind = withoutEffect
		}
		l.note(kind, d, n.Path, n.Problem, n.Remedy)
	}
	return m
}

// kind reads a document's kind and checks a Gateway's apiVersion.
func (l *loader) kind(d *document) (string, bool) {
	var head struct{ APIVersion, Kind json.RawMessage }
	if json.Unmarshal(d.json, &head) != nil {
		return "", false
	}
	var kind, version string
	kinds := []string{kindGateway, modelserver.Kind}
	switch {
	case head.Kind == nil:
		l.add(d, &config.FieldError{Path: "kind", Problem: missing, Remedy: "write kind: Gateway or kind: ModelServer"})
		return "", false
	case json.Unmarshal(head.Kind, &kind) != nil || !slices.Contains(kinds, kind):
		l.add(d, &config.FieldError{Path: "kind", Problem: "is not a known kind", Remedy: nearestOf(kind, kinds)})
		return "", false
	}
	if kind == modelserver.Kind {
		return kind, true // whose version the library checks
	}
	switch {
	case head.APIVersion == nil:
		l.add(d, &config.FieldError{Path: "apiVersion", Problem: missing, Remedy: "write apiVersion: " + gatewayVersion})
	case json.Unmarshal(head.APIVersion, &version) != nil || version != gatewayVersion:
		l.add(d, &config.FieldError{Path: "apiVersion", Problem: "is not known for kind " + kind, Remedy: "write " + gatewayVersion})
	}
	return kind, true
}

// checkUnique finds ModelServers that stand in each other's way.
func (l *loader) checkUnique() {
	names, models := map[string]int{}, map[string]int{}
	for _, m := range l.cfg.models {
		name := m.fullName()
		if first, taken := names[name]; taken && name != "" {
			l.add(m.doc, &config.FieldError{Path: "metadata.name", Problem: fmt.Sprintf("is the name of another ModelServer too, on line %d", first), Remedy: "give each its own name or namespace"})
		} else {
			names[name] = m.doc.lineOf("metadata.name")
		}
		if first, taken := models[m.Model()]; taken {
			l.add(m.doc, &config.FieldError{Path: "spec.model", Problem: fmt.Sprintf("is served by another ModelServer too, on line %d", first), Remedy: "give each its own model; one share of a model's requests is a rollout"})
		} else {
			models[m.Model()] = m.doc.lineOf("spec.model")
		}
	}
}

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

func nearestOf(name string, known []string) string {
	if near := config.Nearest(name, known); near != "" {
		return "did you mean " + near + "?"
	}
	return "known are " + strings.Join(known, ", ")
}
