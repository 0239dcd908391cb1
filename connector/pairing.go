// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/discovery"
)

// The attributes of an engine's entry that decide which engines can exchange KV. Numbers are in digits, names as the engine's flags have
// them. A list need not tell them: what it does not tell, forbids nothing.
const (
	AttrConnector    = "connector"    // the connectors that the engine runs, by name or engine's class name, separated by commas
	AttrNetwork      = "kvNetwork"    // the networks by which its KV can be reached, separated by commas
	AttrTPSize       = "tpSize"       // tensor-parallel size
	AttrPPSize       = "ppSize"       // pipeline-parallel size
	AttrBlockSize    = "blockSize"    // tokens in a block of KV: vLLM's --block-size, SGLang's --page-size, TensorRT-LLM's tokens_per_block
	AttrKVCacheDtype = "kvCacheDtype" // the type that KV is kept in: --kv-cache-dtype, written alike for all engines
	AttrStore        = "store"        // the stores that the engine keeps KV in, by names of the list's own, separated by commas
)

// PairRule says by an attribute which prefill and decode engines can exchange KV. Compatible gets the attribute's values; pickers ask it
// only if both engines have the attribute: what a list does not tell, forbids nothing. It is called by several goroutines at once,
// must not block, and must answer the same each time.
type PairRule struct {
	Attribute  string
	Compatible func(prefill, decode string) bool
}

// SameValue lets engines meet whose attribute is the same, for example tpSize for a protocol that cannot reshape KV.
func SameValue(attribute string) PairRule {
	return PairRule{attribute, same}
}

// Multiple lets engines meet one of whose numbers divides the other: tpSize for protocols that split or join heads in whole parts.
func Multiple(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool { return divides(p, d) || divides(d, p) }}
}

// PrefillMultiple lets engines meet if prefill's number is a multiple of decode's: tpSize for protocols that join heads and never split them.
func PrefillMultiple(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool { return divides(d, p) }}
}

// DecodeMultiple lets engines meet if decode's number is a multiple of prefill's.
func DecodeMultiple(attribute string) PairRule {
	return PairRule{attribute, divides}
}

// SharedValue lets engines meet whose comma separated lists have an element in common, for example the KV networks that they are on.
func SharedValue(attribute string) PairRule {
	return PairRule{attribute, func(p, d string) bool {
		of := strings.Split(d, ",")
		for x := range strings.SplitSeq(p, ",") {
			if x = strings.TrimSpace(x); x != "" && slices.ContainsFunc(of, func(y string) bool { return strings.TrimSpace(y) == x }) {
				return true
			}
		}
		return false
	}}
}

// PairError says that two engines cannot exchange KV.
type PairError struct {
	Prefill, Decode string // their IDs
	By              string // what parts them: "group", "model", "version", or the attribute of a rule, as "attributes.tpSize"
}

// Error names the engines and what parts them, without its values.
func (e *PairError) Error() string {
	return fmt.Sprintf("engines %s and %s cannot exchange KV: their %s does not fit", e.Prefill, e.Decode, e.By)
}

// CheckPair tells why a prefill and a decode engine cannot exchange KV by a connector's protocol, as a picker judges it: an *[EndpointError]
// where an entry lacks what the connector needs ([CheckEndpoint]), else a *[PairError], see [Traits.CheckPair].
func CheckPair(c KVConnector, prefill, decode discovery.Endpoint) error {
	// What an engine can do besides does not matter: of this pair it is one side.
	prefill.Role, decode.Role = discovery.RolePrefill, discovery.RoleDecode
	for _, e := range []discovery.Endpoint{prefill, decode} {
		for _, fe := range config.FieldErrors(CheckEndpoint(c, e)) {
			return &EndpointError{Endpoint: e.ID, Attribute: strings.TrimPrefix(fe.Path, "attributes."), Problem: fe.Problem}
		}
	}
	t := c.Traits()
	return t.CheckPair(prefill, decode)
}

// CheckPair returns a *[PairError] unless two engines are of one group, run the connector, have one model, version and network, and fit
// the connector's rules. What an entry does not tell forbids nothing, but for the group, of which "" is one.
func (t *Traits) CheckPair(prefill, decode discovery.Endpoint) error {
	if by := t.parted(&prefill, &decode); by != "" {
		return &PairError{Prefill: prefill.ID, Decode: decode.ID, By: by}
	}
	return nil
}

var sameNetwork = SharedValue(AttrNetwork)

func (t *Traits) parted(p, d *discovery.Endpoint) (by string) {
	switch {
	case p.Group != d.Group:
		return "group"
	case !t.runBy(p.Attribute(AttrConnector), d.Attribute(AttrConnector)):
		return "attributes." + AttrConnector
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

// runBy reports whether both engines run the connector, as far as their attributes tell. The connector http works with any engine. Without a
// name, they must have one connector in common.
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

// runs reports whether an engine runs the connector of that name, as far as its attribute tells. A class name that stands for several
// connectors (LMCacheConnectorV1) is the one that it is without settings.
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

func same(p, d string) bool { return strings.TrimSpace(p) == strings.TrimSpace(d) }

// divides reports whether b is a multiple of a. An engine meets its like whatever its value is, even one that is no number: a slip that all
// entries share parts nobody.
func divides(a, b string) bool {
	if same(a, b) {
		return true
	}
	x, errX := strconv.ParseUint(strings.TrimSpace(a), 10, 32)
	y, errY := strconv.ParseUint(strings.TrimSpace(b), 10, 32)
	return errX == nil && errY == nil && x > 0 && y > 0 && y%x == 0
}
