// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a file may name
	"github.com/pdkit/pdkit/discovery"
)

// open makes the connector that the spec at path names, and those it falls back to. Nothing is dialled or listened on.
func (l *loader) open(m *modelServer, path string, spec connector.Spec) opened {
	o := opened{spec: spec, name: connector.Resolve(spec.Type, spec.Config)}
	typePath := path + ".type"
	if !slices.Contains(connector.Names(), o.name) {
		l.add(m.doc, &connector.FieldError{Path: typePath, Problem: fmt.Sprintf("%q is not a known connector", shown(spec.Type)), Remedy: unknownType(spec.Type)})
		o.name = ""
	} else if c, err := connector.Open(spec); err != nil {
		l.openFaults(m, path, err)
	} else {
		o.connector = c
		l.checkConnector(m, path, o)
	}
	if o.name == "mooncake" {
		l.checkMooncake(m, typePath, o)
	}
	if spec.FallbackConnector != nil {
		next := l.open(m, path+".fallbackConnector", *spec.FallbackConnector)
		o.fallback = &next
	}
	return o
}

// checkConnector tells what does not fit a connector that is well configured in itself: the fallback, the engines' entries, and settings
// that no engine has.
func (l *loader) checkConnector(m *modelServer, path string, o opened) {
	if only, ok := connector.As[connector.PairOnly](o.connector); ok && only.PairOnly() && o.spec.Fallback == connector.FallbackDecode {
		l.add(m.doc, &connector.FieldError{Path: path + ".fallback", Problem: "is decode, but a decode engine of " + o.name + " cannot serve alone", Remedy: "write fallback: error, or fall back to another connector"})
	}
	if c, ok := connector.As[connector.EndpointChecker](o.connector); ok {
		for i, e := range m.endpoints {
			for _, fe := range connector.FieldErrors(c.CheckEndpoint(e)) {
				l.add(m.doc, fe.In(fmt.Sprintf("%s[%d]", staticPath, i)))
			}
		}
	}
	l.checkEffects(m, path, o)
}

// checkEffects tells the settings that no engine has. One that P alone or D alone reads has an effect.
func (l *loader) checkEffects(m *modelServer, path string, o opened) {
	r, ok := connector.As[connector.Renderer](o.connector)
	if !ok {
		return
	}
	engines := slices.DeleteFunc(slices.Clone(o.targets(m)), func(e discovery.Endpoint) bool { return e.Role == discovery.RoleEncode })
	var idle []connector.Note
	used := map[string]bool{}
	for i, e := range engines {
		set, err := r.Render(connector.Target{Endpoint: e, Index: i, Engines: engines, Model: m.model(), Resources: o.spec.Resources})
		if err != nil {
			continue // no engine of today can be launched so, which pdctl render tells; the gateway serves those that run
		}
		without := map[string]bool{}
		for _, n := range set.Notes {
			if n.NoEffect {
				without[n.Path] = true
				idle = append(idle, n)
			}
		}
		for _, n := range set.Notes {
			used[n.Path] = used[n.Path] || !without[n.Path]
		}
	}
	for _, n := range idle {
		if !used[n.Path] {
			used[n.Path] = true
			l.note(withoutEffect, m.doc, path+"."+n.Path, n.Text, "")
		}
	}
}

// targets are the engines whose settings tell what has an effect: those listed, or one of each role where a cluster lists them.
func (o opened) targets(m *modelServer) []discovery.Endpoint {
	if len(m.endpoints) > 0 {
		return m.endpoints
	}
	var pair []discovery.Endpoint
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		pair = append(pair, discovery.Endpoint{ID: role.String(), URL: &url.URL{Scheme: "http", Host: role.String() + ".example:8000"}, Role: role})
	}
	return pair
}

// unknownType is the remedy for a type that is not known: the nearest name, and all of them.
func unknownType(typ string) string {
	known := append(connector.Names(), connector.Classes()...)
	slices.Sort(known)
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
		l.add(m.doc, fe.In(word))
	}
}

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
