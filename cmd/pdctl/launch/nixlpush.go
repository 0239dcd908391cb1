// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// renderNixlPush gives the launch settings of an engine. A prefill engine gets the engine id and the side channel from
// its endpoint attributes, since the gateway tells them to decode engines before the prefill engine has answered.
func renderNixlPush(c connector.KVConnector, _ json.RawMessage, t Target) (Settings, error) {
	if t.Version.Before(0, 23) {
		return Settings{},
			errors.New("vLLM " + t.Version.String() + " has no NixlPushConnector: it came in 2026-06 (vllm#35264)")
	}
	if err := checkEndpoint(c, t.Endpoint); err != nil {
		return Settings{}, err
	}
	engine := nixlEngine{class: "NixlPushConnector", lease: c.Traits().Handoff.Lease}
	prefills := t.Endpoint.Role.Has(discovery.RolePrefill)
	if prefills {
		engine.engineID = strings.TrimSpace(t.Endpoint.Attribute("engineID"))
	}
	s, err := engine.settings(t)
	if err != nil {
		return s, err
	}
	if t.CPU {
		s.set("UCX_TLS", "tcp")
	}
	if device := loopbackDevice(t); device != "" {
		s.set("UCX_NET_DEVICES", device)
	}
	if !prefills {
		return s, nil
	}
	// The gateway tells decode engines these sizes, so the engine must be launched with them.
	for _, size := range []struct{ attribute, argument string }{
		{attr.TPSize, "--tensor-parallel-size"}, {attr.PPSize, "--pipeline-parallel-size"},
	} {
		n, err := attr.Int(t.Endpoint, size.attribute, 1, 1, 65535)
		if err != nil {
			return s, err
		}
		s.setSize(size.argument, n)
	}
	ranks, err := attr.RanksOf(t.Endpoint)
	if err != nil {
		return s, err
	}
	s.setRanks(ranks)
	s.noteIf(engine.engineID != "", "attributes.engineID", "the engine keeps this id when it restarts, and decode "+
		"engines keep what they learnt under it: restart them with it")
	return s, nil
}
