// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/config/yamlfile"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// modelServer is a ModelServer from a file, or one made of the command line.
type modelServer struct {
	*modelserver.ModelServer // nil without a file

	name      string // metadata.name, or the model's
	model     string
	spec      config.Spec
	endpoints []discovery.Endpoint // static ones and those of a file
}

// readModels reads the ModelServers of a file as the gateway does. It skips documents of other kinds.
func readModels(name string, in io.Reader) ([]modelServer, error) {
	data, err := readFile(name, in)
	if err != nil {
		return nil, err
	}
	docs, faults := yamlfile.Read(name, data)
	var list []modelServer
	for _, doc := range docs {
		if gjson.GetBytes(doc.JSON, "kind").String() != modelserver.Kind {
			continue
		}
		m, err := modelserver.Read(doc.JSON)
		faults = append(faults, doc.Faults(err)...)
		model := m.Spec.Model
		if len(m.Spec.ModelNames) > 0 {
			model = m.ServedModel() // engines are launched for it, and asked for it
		}
		list = append(list, modelServer{ModelServer: m, name: cmp.Or(m.Name, m.Spec.Model, "model"), model: model,
			spec: m.Spec.KVConnector, endpoints: m.Endpoints})
	}
	if len(faults) > 0 {
		return nil, faults.Sorted()
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: has no ModelServer", name)
	}
	for i := range list {
		if err := list[i].readEndpoints(filepath.Dir(name)); err != nil {
			return nil, fmt.Errorf("%s: ModelServer %s: %w", name, list[i].name, err)
		}
	}
	return list, nil
}

// readEndpoints reads the file of engines that a ModelServer names. A relative path starts at folder.
func (m *modelServer) readEndpoints(folder string) (err error) {
	path := m.Spec.Discovery.File.Path
	if m.FoundBy != "file" {
		return nil
	}
	if !filepath.IsAbs(path) {
		path = filepath.Join(folder, path)
	}
	if m.endpoints, err = file.Load(path); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// readModel reads the ModelServer with the name, or the only one of a file.
func readModel(file, name string, in io.Reader) (modelServer, error) {
	list, err := readModels(file, in)
	if err != nil {
		return modelServer{}, err
	}
	return only(list, name)
}

// only returns the ModelServer with the name, or the only one.
func only(list []modelServer, name string) (modelServer, error) {
	var names []string
	for _, m := range list {
		if m.name == name && name != "" || name == "" && len(list) == 1 {
			return m, nil
		}
		names = append(names, m.name)
	}
	return modelServer{},
		fmt.Errorf("the file has the ModelServers %s: choose one with --server", strings.Join(names, ", "))
}

// notes names the connectors whose settings are not rendered.
func (m *modelServer) notes() (notes []launch.Note) {
	const text = "the settings are those of spec.kvConnector; engines that serve both need a MultiConnector"
	if m.Rollout != nil {
		notes = append(notes, launch.Note{Path: "spec.rollout", Text: text})
	}
	if m.spec.FallbackConnector != nil {
		notes = append(notes, launch.Note{Path: "spec.kvConnector.fallbackConnector", Text: text})
	}
	return notes
}

// port is the port of engines whose addresses the file does not have.
func (m *modelServer) port() int {
	return cmp.Or(m.Spec.Discovery.Kubernetes.Port, m.Spec.WorkloadPort.Port, 8000)
}

// labels are the labels by which the ModelServer finds its pods of a role.
func (m *modelServer) labels(role discovery.Role) map[string]string {
	sel := m.Spec.WorkloadSelector
	all := maps.Clone(sel.MatchLabels)
	if all == nil {
		all = map[string]string{}
	}
	if sel.PDGroup == nil {
		return all
	}
	if key := sel.PDGroup.GroupKey; key != "" {
		all[key] = "0"
	}
	switch role {
	case discovery.RolePrefill:
		maps.Copy(all, sel.PDGroup.PrefillLabels)
	case discovery.RoleDecode:
		maps.Copy(all, sel.PDGroup.DecodeLabels)
	case discovery.RoleEncode:
		maps.Copy(all, sel.PDGroup.EncodeLabels)
	}
	return all
}

func endpoint(url, role string, attributes map[string]string) (discovery.Endpoint, error) {
	r, err := discovery.ParseRole(role)
	if err != nil {
		return discovery.Endpoint{}, err
	}
	e, err := discovery.New(url, r)
	if err != nil {
		return e, fmt.Errorf("url: %w", err)
	}
	e.Attributes = attributes
	return e, nil
}

// given reads an engine from the command line: its URL, and then attributes as KEY=VALUE.
func given(text, role string) (discovery.Endpoint, error) {
	fields := strings.Fields(text)
	if len(fields) == 0 {
		return discovery.Endpoint{}, fmt.Errorf("--%s is empty", role)
	}
	attributes := map[string]string{}
	for _, f := range fields[1:] {
		key, value, ok := strings.Cut(f, "=")
		if !ok {
			return discovery.Endpoint{}, fmt.Errorf("--%s: %q is not KEY=VALUE", role, f)
		}
		attributes[key] = value
	}
	base, err := baseURL("--"+role, fields[0])
	if err != nil {
		return discovery.Endpoint{}, err
	}
	e, err := endpoint(base, role, attributes)
	if err != nil {
		return e, fmt.Errorf("--%s: %w", role, err)
	}
	return e, nil
}

// readFile reads a file, or standard input for "-".
func readFile(name string, in io.Reader) ([]byte, error) {
	if name == "-" && in != nil {
		return io.ReadAll(io.LimitReader(in, yamlfile.MaxBytes))
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, yamlfile.MaxBytes+1))
	if len(data) > yamlfile.MaxBytes {
		return nil, fmt.Errorf("%s: is larger than %d MiB", name, yamlfile.MaxBytes>>20)
	}
	return data, err
}
