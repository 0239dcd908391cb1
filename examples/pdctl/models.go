// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// modelServer is what pdctl reads of a ModelServer. The gateway is strict about all of it (gateway -check); here only
// the connector is, so that objects of a cluster can be used as they are.
type modelServer struct {
	name      string // metadata.name
	model     string
	spec      connector.Spec
	encoder   *epd.Options                 // nil without an encode stage
	endpoints []discovery.Endpoint         // static ones and those of a file
	labels    map[string]map[string]string // of pods, by role
	port      int
	notes     []launch.Note
}

// readModels reads the ModelServers of a file.
func readModels(file string, in io.Reader) ([]modelServer, error) {
	data, err := readFile(file, in)
	if err != nil {
		return nil, err
	}
	docs, err := readYAML(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var list []modelServer
	for _, doc := range docs {
		if textAt(doc, "kind") != "ModelServer" {
			continue
		}
		m, err := readModel(doc, filepath.Dir(file))
		if err != nil {
			return nil, fmt.Errorf("%s: ModelServer %s: %w", file, m.name, err)
		}
		list = append(list, m)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%s: has no ModelServer", file)
	}
	return list, nil
}

// only chooses the ModelServer named, or the only one.
func only(list []modelServer, name string) (modelServer, error) {
	var names []string
	for _, m := range list {
		if m.name == name && name != "" || name == "" && len(list) == 1 {
			return m, nil
		}
		names = append(names, m.name)
	}
	return modelServer{}, fmt.Errorf("the file has the ModelServers %s: choose one with --server", strings.Join(names, ", "))
}

func readModel(doc map[string]any, folder string) (modelServer, error) {
	m := modelServer{name: cmp.Or(textAt(doc, "metadata", "name"), textAt(doc, "spec", "model"), "model"), model: textAt(doc, "spec", "model")}
	if raw := at(doc, "spec", "kvConnector"); raw != nil {
		text, err := asJSON(raw)
		if err != nil {
			return m, fmt.Errorf("spec.kvConnector %w", err)
		}
		if m.spec, err = connector.ParseSpec(text); err != nil {
			return m, within("spec.kvConnector", err)
		}
	}
	if doc := mapAt(doc, "spec", "encoder"); doc != nil {
		raw, err := asJSON(doc["config"])
		if err != nil {
			return m, fmt.Errorf("spec.encoder.config %w", err)
		}
		m.encoder = &epd.Options{}
		if err := config.Decode(raw, m.encoder); err != nil {
			return m, within("spec.encoder.config", err)
		}
		if t := textAt(doc, "type"); t != "" {
			m.encoder.Type = t
		}
	}
	ports := []string{textAt(doc, "spec", "discovery", "kubernetes", "port"), textAt(doc, "spec", "workloadPort", "port"), "8000"}
	m.port, _ = strconv.Atoi(ports[slices.IndexFunc(ports, func(p string) bool { return p != "" && p != "0" })])
	m.labels = labelsOf(doc)
	list := listAt(doc, "spec", "discovery", "static", "endpoints")
	if file := textAt(doc, "spec", "discovery", "file", "path"); file != "" {
		if !filepath.IsAbs(file) {
			file = filepath.Join(folder, file)
		}
		data, err := readFile(file, nil)
		if err != nil {
			return m, err
		}
		docs, err := readYAML(data)
		if err != nil || len(docs) != 1 {
			return m, fmt.Errorf("%s: is not one mapping with endpoints", file)
		}
		list = listAt(docs[0], "endpoints")
	}
	for i, item := range list {
		e, err := endpoint(textAt(item, "url"), textAt(item, "role"), textsAt(item, "attributes"))
		if err != nil {
			return m, fmt.Errorf("endpoint %d: %w", i, err)
		}
		e.Group, e.Zone = textAt(item, "group"), textAt(item, "zone")
		m.endpoints = append(m.endpoints, e)
	}
	if at(doc, "spec", "rollout") != nil {
		m.notes = append(m.notes, launch.Note{Path: "spec.rollout", Text: "the settings are those of spec.kvConnector; engines that serve both need a MultiConnector"})
	}
	if m.spec.FallbackConnector != nil {
		m.notes = append(m.notes, launch.Note{Path: "kvConnector.fallbackConnector", Text: "the settings are those of the first connector; engines that serve both need a MultiConnector"})
	}
	return m, nil
}

// within names the field around a connector's own.
func within(path string, err error) error {
	var all []error
	for _, fe := range config.FieldErrors(err) {
		all = append(all, fe.In(path))
	}
	return errors.Join(all...)
}

// labelsOf are the labels by which a ModelServer finds its pods, by role.
func labelsOf(doc map[string]any) map[string]map[string]string {
	all := map[string]map[string]string{}
	for role, key := range map[string]string{"prefill": "prefillLabels", "decode": "decodeLabels"} {
		l := textsAt(doc, "spec", "workloadSelector", "matchLabels")
		if group := textAt(doc, "spec", "workloadSelector", "pdGroup", "groupKey"); group != "" {
			l[group] = "0"
		}
		maps.Copy(l, textsAt(doc, "spec", "workloadSelector", "pdGroup", key))
		all[role] = l
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

// given reads an engine of the command line: its URL, and attributes as KEY=VALUE after it.
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
	e, err := endpoint(fields[0], role, attributes)
	if err != nil {
		return e, fmt.Errorf("--%s: %w", role, err)
	}
	return e, nil
}

// readFile reads a file, or standard input for "-".
func readFile(name string, in io.Reader) ([]byte, error) {
	if name == "-" && in != nil {
		return io.ReadAll(io.LimitReader(in, maxFileBytes))
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s: is larger than %d MiB", name, maxFileBytes>>20)
	}
	return data, err
}
