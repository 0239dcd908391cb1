// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
)

// bootstrapped is the first release that certainly has the bootstrap server (vllm#31034).
var bootstrapped = Version{Minor: 16}

// renderMooncake gives the launch settings of one engine: its kv_transfer_config, the port of P's bootstrap server and,
// if AbortTimeout is set, the time after which orphaned transfers end. Names as in vLLM 0.32.0
// (docs/features/mooncake_connector_usage.md).
func renderMooncake(k connector.KVConnector, o *mooncake.Options, t Target) (Settings, error) {
	c, ok := connector.As[*mooncake.Connector](k)
	if !ok {
		return Settings{}, ErrNoSettings
	}
	s := vllm(&KVTransfer{
		Connector: "MooncakeConnector", Role: KVRole(t.Endpoint.Role), Extra: mooncakeExtra(o, t),
		LoadFailurePolicy: "fail", // the default since 2026-02 (vllm#34896), and what the failure tables count on
	})
	s.noteIf(t.Version.Before(bootstrapped.Major, bootstrapped.Minor), "version",
		"engines from before vllm#31034 (early 2026) have no bootstrap server and speak another protocol, which hands "+
			"off as NIXL does: use a newer one")
	if t.CPU {
		// As recorded on a CPU: vLLM's connector asks for an accelerator's index, so it needs a module that returns 0.
		s.KVTransfer.ModulePath = "mooncake_cpu"
		s.set("MC_FORCE_TCP", "true")
		s.note("", "on a CPU, vLLM's MooncakeConnector needs a module mooncake_cpu on PYTHONPATH that sets "+
			"torch.accelerator.current_device_index to a function that returns 0 and imports MooncakeConnector")
	}
	var err error
	if t.Endpoint.Role.Has(discovery.RolePrefill) && o.BootstrapServerAddress == "" {
		var port int
		port, err = bootstrapPort(c, t.Endpoint)
		s.set("VLLM_MOONCAKE_BOOTSTRAP_PORT", strconv.Itoa(port))
		s.noteIf(bootstrapClash(c, t, port), "attributes.bootstrapPort",
			"another prefill engine on this host has the same bootstrap port; give each its own")
	}
	s.idleIf(o.BootstrapPort != 0 && (o.BootstrapServerAddress != "" || t.Endpoint.Attribute("bootstrapURL") != "" ||
		t.Endpoint.Attribute("bootstrapPort") != ""), "config.bootstrapPort",
		"the engine's attribute, or bootstrap_server_address, is more special")
	if d := time.Duration(o.AbortTimeout); d != 0 {
		s.set("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", strconv.Itoa(int(d/time.Second)))
	} else {
		s.note("config.abortTimeout", "is left at the engines' 480 s: for so long a decode whose prefill failed holds "+
			"sender tasks of the prefill engine. Set it a little above your longest prefill")
	}
	s.noLimits(t.Resources, "Mooncake's transfer goes from engine to engine, and keeps nothing of its own")
	return s, err
}

func mooncakeExtra(o *mooncake.Options, t Target) map[string]any {
	protocol := o.Protocol
	if protocol == "" && t.CPU {
		protocol = "tcp"
	}
	return orNil(addMembers(map[string]any{}, []member{
		{"num_workers", o.NumWorkers, o.NumWorkers > 0},
		{"mooncake_protocol", protocol, protocol != ""},
		{"device_name", o.DeviceName, o.DeviceName != ""},
		{"bootstrap_server_address", o.BootstrapServerAddress, o.BootstrapServerAddress != ""},
		{"prefill_side_swa_replay", true, o.PrefillSideSWAReplay},
	}))
}

// bootstrapPort is the port on which P must listen so that [mooncake.Connector.Prepare] finds it.
func bootstrapPort(c *mooncake.Connector, p discovery.Endpoint) (int, error) {
	base, err := c.BootstrapURL(p)
	if err != nil {
		return 0, fmt.Errorf("mooncake: %w", err)
	}
	u, err := url.Parse(base)
	if err != nil {
		return 0, fmt.Errorf("mooncake: %w",
			&attr.Error{Endpoint: p.ID, Attribute: "bootstrapURL", Problem: "is not a URL"})
	}
	return strconv.Atoi(portOfURL(u))
}

// bootstrapClash reports whether the bootstrap server of another prefill engine on the same host would use a port.
func bootstrapClash(c *mooncake.Connector, t Target, port int) bool {
	return slices.ContainsFunc(t.Engines, func(other discovery.Endpoint) bool {
		if other.ID == t.Endpoint.ID || !other.Role.Has(discovery.RolePrefill) || other.Host() != t.Endpoint.Host() {
			return false
		}
		p, err := bootstrapPort(c, other)
		return err == nil && p == port
	})
}
