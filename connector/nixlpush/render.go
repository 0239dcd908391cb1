// SPDX-License-Identifier: Apache-2.0

package nixlpush

import (
	"errors"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/nixlengine"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// Render gives the launch settings of an engine. A prefill engine gets the engine id and the side channel from its
// endpoint attributes, since the gateway tells them to decode engines before the prefill engine has answered.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	if t.Version.Before(0, 23) {
		return launch.Settings{},
			errors.New("vLLM " + t.Version.String() + " has no NixlPushConnector: it came in 2026-06 (vllm#35264)")
	}
	if err := c.CheckEndpoint(t.Endpoint); err != nil {
		return launch.Settings{}, err
	}
	config := nixlengine.Config{Class: "NixlPushConnector", Lease: c.Traits().Handoff.Lease}
	prefills := t.Endpoint.Role.Has(discovery.RolePrefill)
	if prefills {
		config.EngineID = strings.TrimSpace(t.Endpoint.Attribute(attrEngineID))
	}
	s, err := nixlengine.Settings(t, config)
	if err != nil {
		return s, err
	}
	if t.CPU {
		s.Env = append(s.Env, launch.EnvVar{Name: "UCX_TLS", Value: "tcp"})
	}
	if device := nixlengine.Loopback(t); device != "" {
		s.Env = append(s.Env, launch.EnvVar{Name: "UCX_NET_DEVICES", Value: device})
	}
	if !prefills {
		return s, nil
	}
	// The gateway tells decode engines these sizes, so the engine must be launched with them.
	for _, size := range []struct{ attribute, argument string }{
		{attrTPSize, "--tensor-parallel-size"}, {attrPPSize, "--pipeline-parallel-size"},
		{attrDPSize, "--data-parallel-size"},
	} {
		n, err := attr.Int(t.Endpoint, size.attribute, 1, 1, maxRanks)
		if err != nil {
			return s, err
		}
		if n > 1 {
			s.Args = append(s.Args, size.argument, strconv.Itoa(n))
		}
	}
	if config.EngineID != "" {
		s.Notes = append(s.Notes, launch.Note{Path: "attributes." + attrEngineID,
			Text: "the engine keeps this id when it restarts, and decode engines keep what they learnt under it: " +
				"restart them with it"})
	}
	return s, nil
}
