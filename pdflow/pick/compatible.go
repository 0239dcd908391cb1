// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"strings"

	"github.com/pdkit/pdkit/discovery"
)

// class is the engines that are alike in all that decides who can meet whom. A fleet has few of them, so that
// compatibility is asked between classes, once per snapshot, and never between engines.
type class struct {
	key      classKey
	values   []string    // of the rules' attributes
	legs     [2][]target // its ready engines of each leg, a target for each rank
	partners [2]*list    // for an engine of a leg: those of the other leg that it can meet, nil if there are none
}

// classKey is a class's identity. attributes are the rules' values, each ended by a byte that stands in none.
type classKey struct{ group, model, version, attributes string }

// classOf returns an endpoint's key.
func (o *options) classOf(e *discovery.Endpoint) (key classKey, values []string) {
	key = classKey{group: e.Group, model: e.Model}
	if !o.anyVersion {
		key.version = e.Version
	}
	if len(o.rules) == 0 {
		return key, nil
	}
	var b strings.Builder
	for _, r := range o.rules {
		v := e.Attribute(r.Attribute)
		values = append(values, v)
		b.WriteString(v)
		b.WriteByte(0)
	}
	key.attributes = b.String()
	return key, values
}

// compatible reports whether a prefill engine of class p and a decode engine of class d can meet. What a source does not know ("")
// forbids nothing, but for the group: "" is a group too.
func (o *options) compatible(p, d *class) bool {
	if p.key.group != d.key.group || !sameOrUnknown(p.key.model, d.key.model) || !sameOrUnknown(p.key.version, d.key.version) {
		return false
	}
	for i, r := range o.rules {
		if a, b := p.values[i], d.values[i]; a != "" && b != "" && !r.Compatible(a, b) {
			return false
		}
	}
	return true
}

func sameOrUnknown(a, b string) bool { return a == b || a == "" || b == "" }
