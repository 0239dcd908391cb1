// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"errors"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/discovery"
)

// pairing holds the rules of one picker, by which two engines can form a pair or one serves alone.
type pairing struct {
	// PairRules are the picker's own and then the connector's. Without a connector all else is zero.
	rules      *check.Rules
	serving    connector.Serving // which engines may serve alone
	decisive   []string          // the attributes that rules look at, in the order in which the rules are checked
	anyVersion bool
	late       bool // decode engines get requests when their prefill has ended
}

// newPairing reads the connector's traits. c may be nil.
func newPairing(c connector.KVConnector, serving connector.Serving, o *options) *pairing {
	p := &pairing{rules: &check.Rules{}, serving: serving, anyVersion: o.anyVersion}
	if c != nil {
		p.rules = check.Of(c)
		p.late = p.rules.Traits.Order == connector.PrefillThenDecode
	}
	p.rules.Traits.PairRules = slices.Concat(o.rules, p.rules.Traits.PairRules)
	p.decisive = []string{attr.Connector, attr.Network}
	for _, r := range p.rules.Traits.PairRules {
		p.decisive = append(p.decisive, r.Attribute)
	}
	return p
}

// unfit reports whether the connector cannot use an engine at all, so that each request to it would fail.
func (p *pairing) unfit(e *discovery.Endpoint) bool {
	return p.rules.CheckEndpoint(*e) != nil
}

// gap says why two engines cannot form a pair. Gaps are ordered: the greater, the more rules the engines fulfil.
type gap int

const (
	gapGroup gap = iota
	gapConnector
	gapModel
	gapVersion
	gapRule     // this and the following numbers: the rule of decisive[gap-gapRule]
	gapNone gap = 1 << 30
)

// gap compares a prefill and a decode engine of one group. A value that the source does not know ("") fits any.
func (p *pairing) gap(pre, dec *discovery.Endpoint) gap {
	d := *dec
	d.Group = pre.Group // the tables handle groups
	if p.anyVersion {
		d.Version = pre.Version
	}
	parted, ok := errors.AsType[*check.PairError](p.rules.Exchange(*pre, d))
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

// tell says why no pair can be formed. g is the gap of the nearest pair.
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

// class is all engines that are equal in everything the pairing rules look at. A fleet has few classes, so the picker
// compares classes, once per snapshot, and never single engines.
type class struct {
	key    classKey
	number uint64
	sample *discovery.Endpoint // any engine of the class
	legs   [2][]target         // its ready engines for each leg, one target per rank
	// for a class of the leg that is chosen first: the targets it can form a pair with, nil if there are none
	partners *list
}

// classKey identifies a class. attributes holds the values of the decisive attributes, each followed by a byte that
// occurs in no value; it is "" if there are none.
type classKey struct{ group, model, version, attributes string }

// attributes appends the values of an endpoint's decisive attributes, for its classKey.
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
