// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// Connector is a connector that an object names.
type Connector struct {
	Spec        config.Spec
	Name        string                // as registered; "" if it is not known
	KVConnector connector.KVConnector // nil if it could not be opened
	Fallback    *Connector            // nil without one
}

// openedAt is a connector and the field that names it.
type openedAt struct {
	path string
	*Connector
}

// Timeouts are the limits in effect: the object's, else the connector's own, else the defaults.
func (c *Connector) Timeouts() config.Timeouts {
	t := c.traits()
	return c.Spec.Timeouts.Or(t.Timeouts).Resolve(t.Handoff.Lease)
}

// Retry is the retry policy in effect, found in the same way.
func (c *Connector) Retry() config.Retry { return c.Spec.Retry.Or(c.traits().Retry).Resolve() }

// traits are the connector's, the zero value of one that could not be opened.
func (c *Connector) traits() (t connector.Traits) {
	if c.KVConnector != nil {
		t = c.KVConnector.Traits()
	}
	return t
}

// Lease is how long the connector's handoff lives, 0 where it does not expire.
func (c *Connector) Lease() time.Duration { return c.traits().Handoff.Lease }

// GivesUp is how long the engines wait for a transfer before they give it up, 0 where that is not known: the protocol's
// TransferTimeout, else its lease.
func (c *Connector) GivesUp() time.Duration {
	return cmp.Or(c.traits().Handoff.TransferTimeout, c.Lease())
}

// open opens the connector that the spec at path names, and those that it falls back to.
func (m *ModelServer) open(path string, spec config.Spec) *Connector {
	c := &Connector{Spec: spec, Name: names.Resolve(spec.Type, spec.Config)}
	if why := names.Refusal(spec.Type); why != "" {
		m.fault(path+".type", fmt.Sprintf("%.64q %s", spec.Type, why), "write the connector that brings KV from P to D")
		c.Name = ""
	} else if !slices.Contains(names.Connectors(), c.Name) {
		m.fault(path+".type", fmt.Sprintf("%.64q is not a known connector", spec.Type), names.Suggest(spec.Type))
		c.Name = ""
	} else if opened, err := connector.Open(spec); err != nil {
		m.openFaults(path, err)
	} else {
		c.KVConnector = opened
		m.encode(c)
		m.opened = append(m.opened, openedAt{path, c})
	}
	if c.Name == "mooncake" {
		m.checkMooncake(path+".type", spec)
	}
	if spec.FallbackConnector != nil {
		c.Fallback = m.open(path+".fallbackConnector", *spec.FallbackConnector)
	}
	return c
}

// encode puts the encode stage before a connector.
func (m *ModelServer) encode(c *Connector) {
	if m.encoder == nil {
		return
	}
	wrapped, err := epd.Wrap(c.KVConnector, m.encoder)
	if err == nil {
		c.KVConnector = wrapped
	} else {
		m.faults = append(m.faults, config.Within("spec.encoder.config", err))
		m.encoder = nil // what is wrong with it is told once
	}
}

// check finds what does not fit a connector whose own settings are right: a fallback that cannot be, engines that lack
// an attribute.
func (m *ModelServer) check(path string, c *Connector) {
	if c.KVConnector.Traits().Serving.PairOnly && c.Spec.Fallback == config.FallbackDecode {
		m.fault(path+".fallback", "is decode, but a decode engine of "+c.Name+" cannot serve alone",
			"write fallback: error, or fall back to another connector")
	}
	m.checkTransfer(path+".timeouts.transfer", c)
	for i, e := range m.Endpoints {
		if m.isOthers(e, c) {
			continue
		}
		if err := check.Of(c.KVConnector).CheckEndpoint(e); err != nil {
			m.faults = append(m.faults, config.Within(fmt.Sprintf("%s[%d]", staticPath, i), err))
		}
	}
}

// checkTransfer tells of a limit that comes too late: after decode's, or after P has given up.
func (m *ModelServer) checkTransfer(path string, c *Connector) {
	limits, after := c.Timeouts(), c.GivesUp()
	switch {
	case limits.Transfer <= 0:
	case limits.Decode > 0 && limits.Transfer >= limits.Decode:
		m.note(true, path, fmt.Sprintf("is not shorter than decode, %s", limits.Decode), "write less, or remove it")
	case after <= 0 || limits.Transfer <= after:
	case c.Lease() > 0:
		m.note(false, path, fmt.Sprintf("is longer than P keeps KV that nobody reads, %s", after),
			"write at most that, unless decode engines renew P's lease for requests in their queue")
	default:
		m.note(false, path, fmt.Sprintf("is longer than the engines wait for a transfer, %s", after),
			"write at most that")
	}
}

// NoteIdle adds notes of the settings that have no effect in any engine. Only the caller knows the engines' launch
// settings: idle returns those of a connector that no engine has, with paths as in a Spec.
func (m *ModelServer) NoteIdle(idle func(c *Connector, engines []discovery.Endpoint) []config.FieldError) {
	engines := slices.DeleteFunc(slices.Clone(m.targets()),
		func(e discovery.Endpoint) bool { return e.Role == discovery.RoleEncode })
	for _, p := range m.opened {
		for _, f := range idle(p.Connector, engines) {
			m.note(true, p.path+"."+f.Path, f.Problem, f.Remedy)
		}
	}
}

// targets returns the engines for which settings are rendered to find those without effect: the static ones, or one of
// each role where something else lists the engines.
func (m *ModelServer) targets() []discovery.Endpoint {
	if len(m.Endpoints) > 0 {
		return m.Endpoints
	}
	var pair []discovery.Endpoint
	for _, role := range []discovery.Role{discovery.RolePrefill, discovery.RoleDecode} {
		pair = append(pair, discovery.Endpoint{ID: role.String(),
			URL: &url.URL{Scheme: "http", Host: role.String() + ".example:8000"}, Role: role})
	}
	return pair
}

// openFaults adds the faults that a connector finds in its settings, below the member that holds them.
func (m *ModelServer) openFaults(path string, err error) {
	word := path + ".config"
	if m.Has(path + ".parameters") {
		word = path + ".parameters"
	}
	for _, fe := range config.FieldErrors(err) {
		if _, ok := errors.AsType[*config.FieldError](err); !ok {
			fe = &config.FieldError{Problem: "is refused by the connector: " + fe.Problem,
				Remedy: "correct the connector's settings"}
		}
		m.faults = append(m.faults, fe.In(word))
	}
}

// checkMooncake warns of a name with two meanings: what the design documents call mooncake is a content store, which
// needs no bootstrap server.
func (m *ModelServer) checkMooncake(typePath string, spec config.Spec) {
	if spec.Type != "mooncake" || strings.Contains(string(spec.Config), `"bootstrapPort"`) {
		return
	}
	for _, e := range m.Endpoints {
		if e.Attribute("bootstrapURL") != "" || e.Attribute("bootstrapPort") != "" {
			return
		}
	}
	m.note(false, typePath, "mooncake transfers from engine to engine and has no bootstrap setting here",
		"for the shared store that the design documents call mooncake, write type: mooncake-store")
}
