// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	_ "github.com/pdkit/pdkit/connector/all" // the connectors whose rules about sizes and class names are asked for

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// Severity says how bad a finding is.
type Severity string

// The severities.
const (
	Error   Severity = "error"   // requests fail, hang, or are computed twice
	Warning Severity = "warning" // it works, but hides faults or depends on luck
)

// Finding is one thing that does not fit together.
type Finding struct {
	Severity Severity
	Code     string   // stable: tp-differs, hash-seed-missing
	Engines  []string // the names of the engines it is about
	Text     string   // what is wrong and what it causes
	Remedy   string   // what to change
}

// Check compares the engines of one deployment with each other and, if spec is not nil, with the gateway's connector in
// front of them. The engines of several models may be given at once: Check compares those that serve the same model
// name. The findings are in a fixed order, errors first. Each protocol's connector says which sizes fit
// ([connector.Traits]) if it is registered: import package connector/all.
func Check(engines []Engine, spec *config.Spec) []Finding {
	var found []Finding
	for _, g := range models(engines) {
		g.gateway(spec)
		for _, r := range rules {
			for _, h := range together(r.hits(g)) {
				found = append(found, h.finding(r))
			}
		}
	}
	slices.SortStableFunc(found, func(a, b Finding) int {
		if a.Severity != b.Severity {
			return cmp.Compare(a.Severity, b.Severity) // error before warning
		}
		return 0
	})
	return found
}

// rule is one thing that Check looks for. It says by one of bad, equal, clash and find what is wrong.
type rule struct {
	code     string
	severity Severity
	text     string // what is wrong and what it causes
	remedy   string

	when  func(*model) bool    // nil: always
	among func(*model) []side  // whom it looks at; nil: all engines
	apart bool                 // it holds only where those run on several machines
	bad   func(side) bool      // is wrong for one of them, whatever the others have
	equal func(side) string    // must be the same for all of them
	clash func(a, b side) bool // is wrong for two of them
	find  func(g *model) []hit // finds what the other forms cannot
}

// hit is one place where a rule found something. Its text, remedy and severity, if set, replace the rule's.
type hit struct {
	engines  []*Engine
	text     string
	remedy   string
	severity Severity
}

// hits are the places where a rule finds something.
func (r rule) hits(g *model) (hits []hit) {
	if r.when != nil && !r.when(g) {
		return nil
	}
	if r.find != nil {
		hits = r.find(g)
		for i := range hits {
			hits[i].text = cmp.Or(hits[i].text, r.text)
		}
		return hits
	}
	all := (*model).all
	if r.among != nil {
		all = r.among
	}
	list := all(g)
	if r.apart && !apart(enginesOf(list)) {
		return nil
	}
	for i, a := range list {
		if r.bad != nil && r.bad(a) {
			hits = append(hits, hit{engines: []*Engine{a.Engine}, text: r.text})
		}
		for _, b := range list[i+1:] {
			if r.clash != nil && r.clash(a, b) {
				hits = append(hits, hit{engines: []*Engine{a.Engine, b.Engine}, text: r.text})
			}
		}
	}
	if r.equal != nil && differ(list, r.equal) {
		hits = append(hits, hit{engines: enginesOf(list), text: r.text})
	}
	return hits
}

// together merges the hits that say the same of one engine each.
func together(hits []hit) []hit {
	var list []hit
	for _, h := range hits {
		i := slices.IndexFunc(list, func(k hit) bool {
			return len(h.engines) == 1 && h.text == k.text && h.remedy == k.remedy && h.severity == k.severity
		})
		if i < 0 {
			list = append(list, h)
			continue
		}
		list[i].engines = append(list[i].engines, h.engines...)
	}
	for i, h := range list {
		if len(h.engines) > 1 &&
			slices.ContainsFunc(hits, func(k hit) bool { return len(k.engines) == 1 && k.text == h.text }) {
			list[i].text = "each " + h.text
		}
	}
	return list
}

func (h hit) finding(r rule) Finding {
	f := Finding{Severity: cmp.Or(h.severity, r.severity), Code: r.code, Text: h.text,
		Remedy: cmp.Or(h.remedy, r.remedy)}
	for _, e := range h.engines {
		f.Engines = append(f.Engines, e.Name)
	}
	return f
}

// model has the engines that serve one model, and the gateway in front of them.
type model struct {
	engines []*Engine // the engines that hold KV
	encodes []*Engine // the engines of an encode stage
	spec    *config.Spec
	typ     string         // the gateway's connector, or "" if there is no gateway
	config  map[string]any // its settings
}

// gateway sets the connector's name and settings.
func (g *model) gateway(spec *config.Spec) {
	g.config = map[string]any{}
	if spec == nil {
		return
	}
	g.spec = spec
	if len(spec.Config) > 0 {
		v, err := decodeJSON(spec.Config)
		if m, ok := v.(map[string]any); ok && err == nil {
			g.config = m
		}
	}
	g.typ = gatewayName(spec.Type, g.config)
}

// gatewayName returns the gateway's connector for a type and its settings. The type may be an engine's class name.
func gatewayName(typ string, config map[string]any) string {
	raw, err := json.Marshal(config)
	if err != nil {
		raw = nil
	}
	return names.Resolve(typ, raw)
}

// models groups engines by the name that requests use, if each name then has both sides. Otherwise it compares all
// engines: the fault is a name that differs.
func models(engines []Engine) []*model {
	groups := map[string]*model{}
	all := &model{}
	for i := range engines {
		e := &engines[i]
		if e.Role == discovery.RoleEncode {
			all.encodes = append(all.encodes, e)
			continue
		}
		all.engines = append(all.engines, e)
		name := e.Model
		if len(e.Served) > 0 {
			name = e.Served[0]
		}
		if groups[name] == nil {
			groups[name] = &model{}
		}
		groups[name].engines = append(groups[name].engines, e)
	}
	if len(all.engines) == 0 {
		return []*model{all}
	}
	for _, g := range groups {
		if len(groups) > 1 && (len(g.producers()) == 0 || len(g.consumers()) == 0) {
			return []*model{all}
		}
	}
	var list []*model
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		groups[name].encodes = all.encodes
		list = append(list, groups[name])
	}
	return list
}

func (g *model) role(r discovery.Role) []*Engine {
	var list []*Engine
	for _, e := range g.engines {
		if e.Role.Has(r) {
			list = append(list, e)
		}
	}
	return list
}

func (g *model) producers() []*Engine { return g.role(discovery.RolePrefill) }
func (g *model) consumers() []*Engine { return g.role(discovery.RoleDecode) }

// pair reports whether there are two engines that could hand over KV.
func (g *model) pair() bool {
	return len(g.producers()) > 0 && len(g.consumers()) > 0 && len(g.engines) > 1
}

// side is one connector of one engine.
type side struct {
	*Engine
	t *Transfer
}

// all are the engines that hold KV.
func (g *model) all() []side {
	list := make([]side, len(g.engines))
	for i, e := range g.engines {
		list[i] = side{e, e.Transfer}
	}
	return list
}

// with returns the connectors whose class is one of classes.
func (g *model) with(classes ...string) []side {
	var list []side
	for _, e := range g.engines {
		for _, t := range e.Transfer.Leaves() {
			if slices.Contains(classes, t.Class) {
				list = append(list, side{e, t})
			}
		}
	}
	return list
}

// speaking is with, for a rule.
func speaking(classes ...string) func(*model) []side {
	return func(g *model) []side { return g.with(classes...) }
}

// only are those of a rule's sides for which keep returns true.
func only(all func(*model) []side, keep func(side) bool) func(*model) []side {
	return func(g *model) []side {
		return slices.DeleteFunc(all(g), func(s side) bool { return !keep(s) })
	}
}

// program are the engines of a kind.
func program(name string) func(*model) []side {
	return only((*model).all, func(s side) bool { return s.Program == name })
}

// behind reports whether the gateway's connector is the one of a name.
func behind(typ string) func(*model) bool {
	return func(g *model) bool { return g.typ == typ }
}

func enginesOf(sides []side) []*Engine {
	var list []*Engine
	for _, s := range sides {
		if !slices.Contains(list, s.Engine) {
			list = append(list, s.Engine)
		}
	}
	return list
}

// differ reports whether value is not the same for all elements.
func differ[T any](list []T, value func(T) string) bool {
	for _, item := range list {
		if value(item) != value(list[0]) {
			return true
		}
	}
	return false
}

// apart reports whether some of the engines certainly run on different machines.
func apart(list []*Engine) bool {
	known := ""
	for _, e := range list {
		switch {
		case e.Node == "":
		case known == "":
			known = e.Node
		case known != e.Node:
			return true
		}
	}
	return false
}

// alone returns one hit for each element of which bad is true. Its text needs what the rule's text cannot have.
func alone(list []side, text string, bad func(side) bool) []hit {
	return rule{text: text, among: func(*model) []side { return list }, bad: bad}.hits(nil)
}

// asOne returns one hit for all of a list, if there are any.
func asOne(list []side) []hit {
	if len(list) == 0 {
		return nil
	}
	return []hit{{engines: enginesOf(list)}}
}

// samePort reports whether two engines of one machine need the same port. ports returns the first port that an engine
// takes and how many it takes from there on.
func samePort(ports func(side) (first, n int)) func(a, b side) bool {
	return func(a, b side) bool {
		if a.Engine == b.Engine || a.Node == "" || a.Node != b.Node {
			return false
		}
		from, n := ports(a)
		other, m := ports(b)
		return from < other+m && other < from+n
	}
}

func isLoopback(host string) bool {
	host = strings.ToLower(strings.Trim(host, "[]"))
	return host == "" || host == "localhost" || strings.HasPrefix(host, "127.") || host == "::1"
}

// jsonText writes a setting for comparison.
func jsonText(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	return string(raw)
}
