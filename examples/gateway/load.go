// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

const (
	kindGateway     = "Gateway"
	kindModelServer = "ModelServer"
)

// apiVersions are what each kind is read as.
var apiVersions = map[string][]string{
	kindGateway:     {"pdkit.dev/v1alpha1"},
	kindModelServer: {"networking.matrixinfer.ai/v1alpha1", "networking.serving.volcano.sh/v1alpha1"},
}

// load reads and checks a configuration file. The error is of type faults, and says all that is wrong.
func load(file string) (*config, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, faults{{file, 1, &connector.FieldError{Path: "file", Problem: "cannot be read", Remedy: "name a file that exists and may be read with -config"}}}
	}
	return parse(file, data)
}

// parse reads and checks a configuration.
func parse(file string, data []byte) (*config, error) {
	docs, fs := readYAML(file, data)
	l := &loader{cfg: &config{file: file, gateway: defaultGateway()}, faults: fs}
	for _, d := range docs {
		l.document(d)
	}
	l.checkUnique()
	l.checkListeners()
	if len(l.cfg.models) == 0 && len(l.faults) == 0 {
		l.faults = append(l.faults, fault{file, 1, &connector.FieldError{Path: "file", Problem: "has no ModelServer", Remedy: "write one for each model that is to be served"}})
	}
	if len(l.faults) > 0 {
		return nil, l.faults.sorted()
	}
	return l.cfg, nil
}

// loader collects the documents of one file.
type loader struct {
	cfg     *config
	gateway *document
	faults  faults
}

func (l *loader) add(d *document, errs ...*connector.FieldError) {
	for _, fe := range errs {
		l.faults = append(l.faults, d.fault(fe))
	}
}

func (l *loader) note(kind noteKind, d *document, path, problem, remedy string) {
	l.cfg.notes = append(l.cfg.notes, note{kind, d.fault(&connector.FieldError{Path: path, Problem: problem, Remedy: remedy})})
}

func (l *loader) document(d *document) {
	kind, ok := l.kind(d)
	if !ok {
		return
	}
	if kind == kindGateway {
		if l.gateway != nil {
			l.add(d, &connector.FieldError{Path: "kind", Problem: fmt.Sprintf("is a second Gateway, the first is on line %d", l.gateway.line), Remedy: "keep one of the two"})
			return
		}
		l.gateway = d
		o := object[gatewaySpec]{Spec: defaultGateway()}
		l.add(d, connector.FieldErrors(connector.DecodeConfig(d.json, &o))...)
		l.checkGateway(d, o.Spec)
		l.cfg.gateway = o.Spec
		return
	}
	var o object[modelServerSpec]
	l.add(d, connector.FieldErrors(connector.DecodeConfig(d.json, &o))...)
	m := &modelServer{doc: d, spec: o.Spec, name: l.name(d, o.Metadata)}
	if d.has("spec") {
		l.checkModel(m)
	} else {
		l.add(d, &connector.FieldError{Path: "spec", Problem: missing, Remedy: "write spec: {model: NAME, kvConnector: {type: NAME}}"})
	}
	l.cfg.models = append(l.cfg.models, m)
}

// kind reads a document's kind and checks its apiVersion.
func (l *loader) kind(d *document) (string, bool) {
	var head struct{ APIVersion, Kind json.RawMessage }
	if json.Unmarshal(d.json, &head) != nil {
		return "", false
	}
	var kind, version string
	kinds := []string{kindGateway, kindModelServer}
	switch {
	case head.Kind == nil:
		l.add(d, &connector.FieldError{Path: "kind", Problem: missing, Remedy: "write kind: Gateway or kind: ModelServer"})
		return "", false
	case json.Unmarshal(head.Kind, &kind) != nil || !slices.Contains(kinds, kind):
		l.add(d, &connector.FieldError{Path: "kind", Problem: "is not a known kind", Remedy: nearestOf(kind, kinds)})
		return "", false
	}
	known := apiVersions[kind]
	switch {
	case head.APIVersion == nil:
		l.add(d, &connector.FieldError{Path: "apiVersion", Problem: missing, Remedy: "write apiVersion: " + known[0]})
	case json.Unmarshal(head.APIVersion, &version) != nil || !slices.Contains(known, version):
		l.add(d, &connector.FieldError{Path: "apiVersion", Problem: "is not known for kind " + kind, Remedy: "write " + strings.Join(known, " or ")})
	}
	return kind, true
}

// name returns NAMESPACE/NAME of a ModelServer.
func (l *loader) name(d *document, metadata json.RawMessage) string {
	if metadata == nil {
		return ""
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(metadata, &m) != nil {
		l.add(d, &connector.FieldError{Path: "metadata", Problem: "is not an object", Remedy: "write metadata: {name: NAME}"})
		return ""
	}
	read := func(key, otherwise string) string {
		s := otherwise
		if raw := m[key]; raw != nil && json.Unmarshal(raw, &s) != nil {
			l.add(d, &connector.FieldError{Path: "metadata." + key, Problem: "is not a string", Remedy: "put it in quotes"})
		}
		return s
	}
	namespace, name := read("namespace", "default"), read("name", "")
	if name == "" {
		return ""
	}
	return namespace + "/" + name
}

// checkUnique finds ModelServers that stand in each other's way.
func (l *loader) checkUnique() {
	names, models := map[string]int{}, map[string]int{}
	for _, m := range l.cfg.models {
		if first, taken := names[m.name]; taken && m.name != "" {
			l.add(m.doc, &connector.FieldError{Path: "metadata.name", Problem: fmt.Sprintf("is the name of another ModelServer too, on line %d", first), Remedy: "give each its own name or namespace"})
		} else {
			names[m.name] = m.doc.lineOf("metadata.name")
		}
		model := m.model()
		if first, taken := models[model]; taken {
			l.add(m.doc, &connector.FieldError{Path: "spec.model", Problem: fmt.Sprintf("is served by another ModelServer too, on line %d", first), Remedy: "give each its own model; one share of a model's requests is a rollout"})
		} else {
			models[model] = m.doc.lineOf("spec.model")
		}
	}
}

// model returns the model that requests name, "*" for all.
func (m *modelServer) model() string {
	if m.spec.Model == "" {
		return "*"
	}
	return m.spec.Model
}

// label names the ModelServer to its operator.
func (m *modelServer) label() string {
	if m.name == "" {
		return fmt.Sprintf("model %q", m.model())
	}
	return fmt.Sprintf("model %q (%s)", m.model(), m.name)
}

func nearestOf(name string, known []string) string {
	if near := connector.Nearest(name, known); near != "" {
		return "did you mean " + near + "?"
	}
	return "known are " + strings.Join(known, ", ")
}
