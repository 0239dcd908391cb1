// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
)

const (
	connectorAttribute = "connector" // the names, or engines' class names, of those that an engine runs
	networkAttribute   = "kvNetwork" // the networks by which an engine's KV can be reached
	anywhere           = "http"      // the connector that transfers nothing, and so works with any engine
)

// pairing is who can meet whom with one connector.
type pairing struct {
	connector  string // that both engines must run; "" if it is not known, or does not matter
	rules      []Rule
	checkers   []connector.EndpointChecker
	anyVersion bool
}

// newPairing asks the connector for its rules. nil is a picker's caller that names none.
func newPairing(c connector.KVConnector, o *options) *pairing {
	p := &pairing{anyVersion: o.anyVersion, rules: append([]Rule{SharedValue(networkAttribute)}, o.rules...)}
	if c == nil {
		p.rules = append(p.rules, Rule{Attribute: connectorAttribute, Compatible: runOneOf})
		return p
	}
	t := c.Traits()
	if t.Name != anywhere {
		p.connector = t.Name
	}
	p.checkers = append(p.checkers, &t)
	if own, ok := connector.As[connector.EndpointChecker](c); ok {
		p.checkers = append(p.checkers, own)
	}
	p.rules = append(p.rules, t.PairRules...)
	return p
}

// unfit reports whether the connector could do nothing with an engine: each request to it would fail.
func (p *pairing) unfit(e *discovery.Endpoint) bool {
	return slices.ContainsFunc(p.checkers, func(c connector.EndpointChecker) bool { return c.CheckEndpoint(*e) != nil })
}

// runs reports whether an engine runs the connector of that name, as far as its attribute tells. A class name that stands for several
// connectors (LMCacheConnectorV1) is the one that it is without settings.
func runs(attribute, name string) bool {
	told := false
	for x := range strings.SplitSeq(attribute, ",") {
		if x = strings.TrimSpace(x); x == "" {
			continue
		}
		if told = true; x == name || connector.Resolve(x, nil) == name {
			return true
		}
	}
	return !told
}

// runOneOf reports whether two engines run one connector, whichever it is.
func runOneOf(prefill, decode string) bool {
	for x := range strings.SplitSeq(prefill, ",") {
		if x = strings.TrimSpace(x); x != "" && runs(decode, connector.Resolve(x, nil)) {
			return true
		}
	}
	return false
}

// gap is what keeps two engines from meeting. The greater it is, the nearer they are to a pair.
type gap int

const (
	gapGroup gap = iota
	gapConnector
	gapModel
	gapVersion
	gapRule     // and those after it: a pairing's rules
	gapNone gap = 1 << 30
)

// gap judges a prefill and a decode engine of one group. What a source does not know ("") forbids nothing.
func (p *pairing) gap(pre, dec *discovery.Endpoint) gap {
	switch {
	case p.connector != "" && !(runs(pre.Attribute(connectorAttribute), p.connector) && runs(dec.Attribute(connectorAttribute), p.connector)):
		return gapConnector
	case !sameOrUnknown(pre.Model, dec.Model):
		return gapModel
	case !p.anyVersion && !sameOrUnknown(pre.Version, dec.Version):
		return gapVersion
	}
	for i, r := range p.rules {
		if a, b := pre.Attribute(r.Attribute), dec.Attribute(r.Attribute); a != "" && b != "" && !r.Compatible(a, b) {
			return gapRule + gap(i)
		}
	}
	return gapNone
}

func sameOrUnknown(a, b string) bool { return a == b || a == "" || b == "" }

// tell says why nobody can meet; g is the smallest gap that there is.
func (p *pairing) tell(g gap) string {
	const none = "no prefill and decode engines that can exchange KV are ready: "
	switch g {
	case gapGroup:
		return "no prefill and decode engines of one group are ready"
	case gapConnector:
		return none + "they do not both run this connector"
	case gapModel:
		return none + "their models differ"
	case gapVersion:
		return none + "their versions differ"
	}
	if i := int(g - gapRule); i < len(p.rules) {
		return none + "by their attribute " + p.rules[i].Attribute
	}
	return "no pair is ready"
}

// class is the engines that are alike in all that decides who can meet whom. A fleet has few of them, so that
// compatibility is asked between classes, once per snapshot, and never between engines.
type class struct {
	key      classKey
	number   uint64
	sample   *discovery.Endpoint // any of them
	legs     [2][]target         // its ready engines of each leg, a target for each rank
	partners *list               // for those of the leg that is chosen first: whom they can meet, nil if there is nobody
}

// classKey is a class's identity. attributes are those that decide, each ended by a byte that stands in none; "" if there are none.
type classKey struct{ group, model, version, attributes string }

// attributes appends the values of an endpoint's attributes that decide, to tell classes apart.
func (p *pairing) attributes(b []byte, e *discovery.Endpoint) []byte {
	if len(e.Attributes) == 0 {
		return b
	}
	some := false
	add := func(name string) {
		v := e.Attribute(name)
		some = some || v != ""
		b = append(append(b, v...), 0)
	}
	if p.connector != "" {
		add(connectorAttribute)
	}
	for i := range p.rules {
		add(p.rules[i].Attribute)
	}
	if !some {
		return b[:0]
	}
	return b
}
