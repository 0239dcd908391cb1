// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"slices"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// apart is a connector beside one that is PrefillPairOnly: their flows share a list of engines, and a prefill leg of
// this connector would end a prefill engine of the other. So this one takes only prefill engines whose attribute
// connector says that they do not run the other.
type apart struct {
	connector.KVConnector
	others []string // the names of those that are PrefillPairOnly
}

// Unwrap lets the connector's abilities be found.
func (a *apart) Unwrap() connector.KVConnector { return a.KVConnector }

// Traits lets no engine that can prefill serve alone, since it may be the other connector's.
func (a *apart) Traits() connector.Traits {
	t := a.KVConnector.Traits()
	t.Serving.PrefillPairOnly = true
	return t
}

// CheckEndpoint refuses prefill engines that are, or may be, the other connector's.
func (a *apart) CheckEndpoint(e discovery.Endpoint) error {
	if e.Role.Has(discovery.RolePrefill) {
		runs := e.Attribute(attr.Connector)
		problem := ""
		if strings.TrimSpace(runs) == "" {
			problem = "is missing"
		} else if slices.ContainsFunc(a.others, func(name string) bool { return namesConnector(runs, name) }) {
			problem = "names another connector"
		}
		if problem != "" {
			return &config.FieldError{Path: "attributes." + attr.Connector, Problem: problem + ": a request of " +
				a.KVConnector.Traits().Name + " would end a prefill engine of " + strings.Join(a.others, ", "),
				Remedy: "write which connector the engine runs, or give each connector a ModelServer of its own"}
		}
	}
	if own, ok := connector.As[connector.EndpointChecker](a.KVConnector); ok {
		return own.CheckEndpoint(e)
	}
	return nil
}

// keepApart wraps the connectors beside those that are PrefillPairOnly.
func (m *ModelServer) keepApart() {
	var others []string
	for _, o := range m.opened {
		if o.traits().Serving.PrefillPairOnly {
			others = append(others, o.Name)
		}
	}
	for _, o := range m.opened {
		if len(others) > 0 && !o.traits().Serving.PrefillPairOnly {
			o.KVConnector = &apart{o.KVConnector, others}
		}
	}
}

// isOthers reports whether an engine says that it runs another connector of this object, and not this one.
func (m *ModelServer) isOthers(e discovery.Endpoint, c *Connector) bool {
	runs := e.Attribute(attr.Connector)
	return !namesConnector(runs, c.Name) &&
		slices.ContainsFunc(m.opened, func(o openedAt) bool { return namesConnector(runs, o.Name) })
}

// namesConnector reports whether an attribute connector names a connector, by its name or its class.
func namesConnector(attribute, name string) bool {
	for x := range strings.SplitSeq(attribute, ",") {
		if x = strings.TrimSpace(x); x == name || x != "" && names.Resolve(x, nil) == name {
			return true
		}
	}
	return false
}
