// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// PairError says that two engines cannot exchange KV.
type PairError struct {
	Prefill, Decode string // their IDs
	By              string // what does not fit: "group", "model", "version", or an attribute: "attributes.tpSize"
}

// Error names the engines and what does not fit, without values.
func (e *PairError) Error() string {
	return fmt.Sprintf("engines %s and %s cannot exchange KV: their %s does not fit", e.Prefill, e.Decode, e.By)
}

// CheckPair returns why a prefill and a decode engine cannot exchange KV by the connector's protocol, as a picker
// decides it. The error is an *[attr.Error] if an entry lacks what the connector needs ([Rules.CheckEndpoint]),
// otherwise a *[PairError], see [Rules.Exchange].
func (r *Rules) CheckPair(prefill, decode discovery.Endpoint) error {
	if r.Traits.Serving.PrefillPairOnly && decode.Role != discovery.RoleDecode {
		return &attr.Error{Endpoint: decode.ID, Attribute: "role", Problem: "is not decode alone"}
	}
	// An engine of role both takes only one side in this pair.
	prefill.Role, decode.Role = discovery.RolePrefill, discovery.RoleDecode
	for _, e := range []discovery.Endpoint{prefill, decode} {
		for _, fe := range config.FieldErrors(r.CheckEndpoint(e)) {
			name := strings.TrimPrefix(fe.Path, "attributes.")
			return &attr.Error{Endpoint: e.ID, Attribute: name, Problem: fe.Problem}
		}
	}
	return r.Exchange(prefill, decode)
}

// Exchange returns a *[PairError] unless two engines are of one group, run the connector, have the same model and
// version and a common network, and satisfy the connector's rules. An attribute that an entry leaves out forbids
// nothing; only the group counts also if it is "".
func (r *Rules) Exchange(prefill, decode discovery.Endpoint) error {
	if by := parted(&r.Traits, &prefill, &decode); by != "" {
		return &PairError{Prefill: prefill.ID, Decode: decode.ID, By: by}
	}
	return nil
}

var sameNetwork = attr.Shared(attr.Network)

func parted(t *connector.Traits, p, d *discovery.Endpoint) (by string) {
	switch {
	case p.Group != d.Group:
		return "group"
	case !runBy(t.Name, p.Attribute(attr.Connector), d.Attribute(attr.Connector)):
		return "attributes." + attr.Connector
	case !sameOrUnknown(p.Model, d.Model):
		return "model"
	case !sameOrUnknown(p.Version, d.Version):
		return "version"
	case !allows(&sameNetwork, p, d):
		return "attributes." + sameNetwork.Attribute
	}
	for i := range t.PairRules {
		if r := &t.PairRules[i]; !allows(r, p, d) {
			return "attributes." + r.Attribute
		}
	}
	return ""
}

func allows(r *attr.PairRule, p, d *discovery.Endpoint) bool {
	a, b := p.Attribute(r.Attribute), d.Attribute(r.Attribute)
	return a == "" || b == "" || r.Compatible(a, b)
}

func sameOrUnknown(a, b string) bool { return a == b || a == "" || b == "" }

// runBy reports whether both engines run the connector, as far as their attributes say. The connector http works with
// any engine. If name is "", the engines must have a connector in common.
func runBy(name, prefill, decode string) bool {
	if name == "http" {
		return true
	}
	if name != "" {
		return runs(prefill, name) && runs(decode, name)
	}
	told := false
	for x := range strings.SplitSeq(prefill, ",") {
		if x = strings.TrimSpace(x); x != "" {
			if told = true; runs(decode, names.Resolve(x, nil)) {
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
		if told = true; x == name || names.Resolve(x, nil) == name {
			return true
		}
	}
	return !told
}
