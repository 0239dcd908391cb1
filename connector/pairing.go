// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"fmt"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/compare"
)

// PairRule decides by an attribute which prefill and decode engines can exchange KV. Compatible gets the attribute's
// two values. Pickers call it only if both engines have the attribute: an attribute that is left out forbids nothing.
// Compatible is called by several goroutines at once, must not block, and must always return the same for the same
// values.
type PairRule struct {
	Attribute  string
	Compatible func(prefill, decode string) bool
}

// PairError says that two engines cannot exchange KV.
type PairError struct {
	Prefill, Decode string // their IDs
	By              string // what does not fit: "group", "model", "version", or an attribute: "attributes.tpSize"
}

// Error names the engines and what does not fit, without values.
func (e *PairError) Error() string {
	return fmt.Sprintf("engines %s and %s cannot exchange KV: their %s does not fit", e.Prefill, e.Decode, e.By)
}

// CheckPair returns why a prefill and a decode engine cannot exchange KV by a connector's protocol, as a picker decides
// it. The error is an *[EndpointError] if an entry lacks what the connector needs ([CheckEndpoint]), otherwise a
// *[PairError]; see [Traits.CheckPair].
func CheckPair(c KVConnector, prefill, decode discovery.Endpoint) error {
	t := c.Traits()
	if t.Serving.PrefillPairOnly && decode.Role != discovery.RoleDecode {
		return &EndpointError{Endpoint: decode.ID, Attribute: "role", Problem: "is not decode alone"}
	}
	// An engine of role both takes only one side in this pair.
	prefill.Role, decode.Role = discovery.RolePrefill, discovery.RoleDecode
	for _, e := range []discovery.Endpoint{prefill, decode} {
		for _, fe := range config.FieldErrors(CheckEndpoint(c, e)) {
			name := strings.TrimPrefix(fe.Path, "attributes.")
			return &EndpointError{Endpoint: e.ID, Attribute: name, Problem: fe.Problem}
		}
	}
	return t.CheckPair(prefill, decode)
}

// CheckPair returns a *[PairError] unless two engines are of one group, run the connector, have the same model and
// version and a common network, and satisfy the connector's rules. An attribute that an entry leaves out forbids
// nothing; only the group counts also if it is "".
func (t *Traits) CheckPair(prefill, decode discovery.Endpoint) error {
	if by := t.parted(&prefill, &decode); by != "" {
		return &PairError{Prefill: prefill.ID, Decode: decode.ID, By: by}
	}
	return nil
}

// These attributes count for every connector; package attr exports them.
const (
	attrConnector = "connector"
	attrNetwork   = "kvNetwork"
)

var sameNetwork = PairRule{Attribute: attrNetwork, Compatible: compare.Shared}

func (t *Traits) parted(p, d *discovery.Endpoint) (by string) {
	switch {
	case p.Group != d.Group:
		return "group"
	case !t.runBy(p.Attribute(attrConnector), d.Attribute(attrConnector)):
		return "attributes." + attrConnector
	case !sameOrUnknown(p.Model, d.Model):
		return "model"
	case !sameOrUnknown(p.Version, d.Version):
		return "version"
	case !sameNetwork.allows(p, d):
		return "attributes." + sameNetwork.Attribute
	}
	for i := range t.PairRules {
		if r := &t.PairRules[i]; !r.allows(p, d) {
			return "attributes." + r.Attribute
		}
	}
	return ""
}

func (r *PairRule) allows(p, d *discovery.Endpoint) bool {
	a, b := p.Attribute(r.Attribute), d.Attribute(r.Attribute)
	return a == "" || b == "" || r.Compatible(a, b)
}

func sameOrUnknown(a, b string) bool { return a == b || a == "" || b == "" }

// runBy reports whether both engines run the connector, as far as their attributes say. The connector http works with
// any engine. If name is "", the engines must have a connector in common.
func (t *Traits) runBy(prefill, decode string) bool {
	if t.Name == "http" {
		return true
	}
	if t.Name != "" {
		return runs(prefill, t.Name) && runs(decode, t.Name)
	}
	told := false
	for x := range strings.SplitSeq(prefill, ",") {
		if x = strings.TrimSpace(x); x != "" {
			if told = true; runs(decode, Resolve(x, nil)) {
				return true
			}
		}
	}
	return !told
}

// runs reports whether an engine runs the connector of that name, as far as its attribute says. A class name that
// stands for several connectors (LMCacheConnectorV1) means the one that it stands for without settings.
func runs(attribute, name string) bool {
	told := false
	for x := range strings.SplitSeq(attribute, ",") {
		if x = strings.TrimSpace(x); x == "" {
			continue
		}
		if told = true; x == name || Resolve(x, nil) == name {
			return true
		}
	}
	return !told
}
