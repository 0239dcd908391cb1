// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// pairing is who can meet whom with one connector.
type pairing struct {
	// with the picker's own rules before the connector's; zero if the caller names no connector
	traits     connector.Traits
	checkers   []connector.EndpointChecker
	decisive   []string // the attributes that decide, in the order in which they are judged
	anyVersion bool
}

// newPairing asks the connector what it declares. nil is a picker's caller that names none.
func newPairing(c connector.KVConnector, o *options) *pairing {
	p := &pairing{anyVersion: o.anyVersion}
	if c != nil {
		p.traits = c.Traits()
		p.checkers = append(p.checkers, &p.traits)
		if own, ok := connector.As[connector.EndpointChecker](c); ok {
			p.checkers = append(p.checkers, own)
		}
	}
	p.traits.PairRules = slices.Concat(o.rules, p.traits.PairRules)
	p.decisive = []string{attr.Connector, attr.Network}
	for _, r := range p.traits.PairRules {
		p.decisive = append(p.decisive, r.Attribute)
	}
	return p
}

// unfit reports whether the connector could do nothing with an engine: each request to it would fail.
func (p *pairing) unfit(e *discovery.Endpoint) bool {
	return slices.ContainsFunc(p.checkers, func(c connector.EndpointChecker) bool { return c.CheckEndpoint(*e) != nil })
}

// gap is what keeps two engines from meeting. The greater it is, the nearer they are to a pair.
type gap int

const (
	gapGroup gap = iota
	gapConnector
	gapModel
	gapVersion
	gapRule     // and those after it: the attributes that decide
	gapNone gap = 1 << 30
)

// gap judges a prefill and a decode engine of one group. What a source does not know ("") forbids nothing.
func (p *pairing) gap(pre, dec *discovery.Endpoint) gap {
	d := *dec
	d.Group = pre.Group // tables compare groups by themselves
	if p.anyVersion {
		d.Version = pre.Version
	}
	parted, ok := errors.AsType[*connector.PairError](p.traits.CheckPair(*pre, d))
	if !ok {
		return gapNone
	}
	attribute, isAttribute := strings.CutPrefix(parted.By, "attributes.")
	switch {
	case attribute == attr.Connector:
		return gapConnector
	case isAttribute:
		return gapRule + gap(slices.Index(p.decisive, attribute))
	case parted.By == "model":
		return gapModel
	}
	return gapVersion
}

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
	if i := int(g - gapRule); i < len(p.decisive) {
		return none + "by their attribute " + p.decisive[i]
	}
	return "no pair is ready"
}

// class is the engines that are alike in all that decides who can meet whom. A fleet has few of them, so that
// compatibility is asked between classes, once per snapshot, and never between engines.
type class struct {
	key    classKey
	number uint64
	sample *discovery.Endpoint // any of them
	legs   [2][]target         // its ready engines of each leg, a target for each rank
	// for those of the leg that is chosen first: whom they can meet, nil if there is nobody
	partners *list
}

// classKey is a class's identity. attributes are those that decide, each ended by a byte that stands in none; "" if
// there are none.
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
	for _, name := range p.decisive {
		add(name)
	}
	if !some {
		return b[:0]
	}
	return b
}
