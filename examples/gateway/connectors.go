// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a file may name
)

// planned are the connectors that a file may name, whether they are built already or not, with the engines' own class
// names for them.
var planned = map[string][]string{
	"http":            nil,
	"nixl":            {"NixlConnector"},
	"nixl-push":       {"NixlPushConnector"},
	"lmcache":         {"LMCacheConnectorV1", "LMCacheMPConnector"},
	"lmcache-pd":      nil,
	"mooncake":        {"MooncakeConnector"},
	"mooncake-store":  {"MooncakeStoreConnector"},
	"mooncake-ascend": {"MooncakeConnectorV1"},
	"ascend-layerwise": {
		"MooncakeLayerwiseConnector",
	},
	"sharedstorage": {"ExampleConnector", "SharedStorageConnector"},
	"pynccl":        {"PyNcclConnector"},
	"p2pnccl":       {"P2pNcclConnector"},
	"moriio":        {"MoRIIOConnector"},
	"offload-p2p":   {"OffloadingConnector"},
	"multi":         {"MultiConnector"},
	"sglang":        nil,
	"trtllm":        nil,
}

// needsPrefill are the protocols whose decode engines wait for a prefill engine's KV and cannot serve alone.
var needsPrefill = []string{"sglang", "moriio", "p2pnccl"}

// pdSwitches are the settings of LMCacheConnectorV1 that make it transfer from engine to engine in place of sharing a store.
var pdSwitches = []string{"enable_pd", "lmcache.enable_pd", "enable_nixl"}

// resolve returns the connector's name for a type, "" for one that nobody knows.
func resolve(spec connector.Spec) string {
	name := connector.Resolve(spec.Type, spec.Config)
	if slices.Contains(connector.Names(), name) {
		return name
	}
	if _, ok := planned[name]; !ok {
		name = ""
	}
	for n, classes := range planned {
		if slices.Contains(classes, spec.Type) {
			name = n
		}
	}
	if spec.Type == "LMCacheConnectorV1" && enablesPD(spec.Config) {
		return "lmcache-pd"
	}
	return name
}

func enablesPD(config json.RawMessage) bool {
	var m map[string]json.RawMessage
	if json.Unmarshal(config, &m) != nil {
		return false
	}
	return slices.ContainsFunc(pdSwitches, func(name string) bool { return string(m[name]) == "true" })
}

// knownTypes lists all that kvConnector.type may be.
func knownTypes() []string {
	types := connector.Names()
	for name, classes := range planned {
		types = append(append(types, name), classes...)
	}
	slices.Sort(types)
	return slices.Compact(types)
}

// open makes the connector that the spec at path names, and those it falls back to. Nothing is dialled or listened on.
func (l *loader) open(m *modelServer, path string, spec connector.Spec) opened {
	o := opened{spec: spec, name: resolve(spec)}
	typePath := path + ".type"
	switch {
	case o.name == "":
		l.add(m.doc, &connector.FieldError{Path: typePath, Problem: fmt.Sprintf("%q is not a known connector", shown(spec.Type)), Remedy: unknownType(spec.Type)})
	case !slices.Contains(connector.Names(), o.name):
		l.note(notThereYet, m.doc, typePath, "connector "+o.name, "")
	default:
		spec.Type = o.name
		if c, err := connector.Open(spec); err != nil {
			l.openFaults(m, path, err)
		} else {
			o.connector = c
		}
	}
	if o.name == "mooncake" {
		l.checkMooncake(m, typePath, o)
	}
	if spec.Fallback == connector.FallbackDecode && slices.Contains(needsPrefill, o.name) {
		l.add(m.doc, &connector.FieldError{Path: path + ".fallback", Problem: "is decode, but a decode engine of " + o.name + " cannot serve alone", Remedy: "write fallback: error, or fall back to another connector"})
	}
	if spec.FallbackConnector != nil {
		next := l.open(m, path+".fallbackConnector", *spec.FallbackConnector)
		o.fallback = &next
	}
	return o
}

// unknownType is the remedy for a type that is not known: the nearest name, and all of them.
func unknownType(typ string) string {
	known := knownTypes()
	list := "known are " + strings.Join(known, ", ")
	if near := connector.Nearest(typ, known); near != "" {
		return "did you mean " + near + "? " + list
	}
	return list
}

// shown bounds a name from the file for a message.
func shown(name string) string {
	if r := []rune(name); len(r) > 64 {
		return string(r[:64]) + "…"
	}
	return name
}

// openFaults places what a connector says of its settings.
func (l *loader) openFaults(m *modelServer, path string, err error) {
	word := path + ".config"
	if _, ok := m.doc.lines[path+".parameters"]; ok {
		word = path + ".parameters"
	}
	for _, fe := range connector.FieldErrors(err) {
		if _, ok := errors.AsType[*connector.FieldError](err); !ok {
			fe = &connector.FieldError{Problem: "is refused by the connector: " + fe.Problem, Remedy: "correct the connector's settings"}
		}
		if fe = fe.In(word); fe.Problem == notBuilt {
			l.note(notThereYet, m.doc, fe.Path, "this setting", fe.Remedy)
			continue
		}
		l.add(m.doc, fe)
	}
}

// notBuilt is what a connector says of a setting that it knows and does not carry out yet.
const notBuilt = "is not there yet"

// checkMooncake tells of a name that has changed its meaning: what the design documents call mooncake is a content
// store, and needs no bootstrap server.
func (l *loader) checkMooncake(m *modelServer, typePath string, o opened) {
	if o.spec.Type != "mooncake" || strings.Contains(string(o.spec.Config), `"bootstrapPort"`) {
		return
	}
	for _, e := range m.endpoints {
		if e.Attribute("bootstrapURL") != "" || e.Attribute("bootstrapPort") != "" {
			return
		}
	}
	l.note(warning, m.doc, typePath, "mooncake transfers from engine to engine and has no bootstrap setting here",
		"for the shared store that the design documents call mooncake, write type: mooncake-store")
}
