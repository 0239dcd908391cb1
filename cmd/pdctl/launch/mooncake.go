// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"net/url"
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
	s := Settings{Engine: "vllm", Args: []string{"--enable-prompt-tokens-details"},
		KVTransfer: &KVTransfer{
			Connector: "MooncakeConnector", Role: KVRole(t.Endpoint.Role), Extra: mooncakeExtra(o, t),
			LoadFailurePolicy: "fail", // the default since 2026-02 (vllm#34896), and what the failure tables count on
		}}
	if t.Version.Before(bootstrapped.Major, bootstrapped.Minor) {
		s.Notes = append(s.Notes,
			Note{Path: "version",
				Text: "engines from before vllm#31034 (early 2026) have no bootstrap server and speak another " +
					"protocol, which hands off as NIXL does: use a newer one"})
	}
	if t.CPU {
		// As recorded on a CPU: vLLM's connector asks for an accelerator's index, so it needs a module that returns 0.
		s.KVTransfer.ModulePath = "mooncake_cpu"
		s.Env = append(s.Env, EnvVar{Name: "MC_FORCE_TCP", Value: "true"})
		s.Notes = append(s.Notes,
			Note{Text: "on a CPU, vLLM's MooncakeConnector needs a module mooncake_cpu on PYTHONPATH " +
				"that sets " +
				"torch.accelerator.current_device_index to a function that returns 0 and imports MooncakeConnector"})
	}
	var errs []error
	if t.Endpoint.Role.Has(discovery.RolePrefill) && o.BootstrapServerAddress == "" {
		port, err := bootstrapPort(c, t.Endpoint)
		errs = append(errs, err)
		s.Env = append(s.Env, EnvVar{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: strconv.Itoa(port)})
		s.Notes = append(s.Notes, bootstrapClash(c, t, port)...)
	}
	if o.BootstrapPort != 0 &&
		(o.BootstrapServerAddress != "" || t.Endpoint.Attribute("bootstrapURL") != "" ||
			t.Endpoint.Attribute("bootstrapPort") != "") {
		s.Notes = append(s.Notes,
			Note{NoEffect: true, Path: "config.bootstrapPort",
				Text: "the engine's attribute, or bootstrap_server_address, is more special"})
	}
	s.Env, s.Notes = abortTimeout(o, s.Env, s.Notes)
	s.Notes = append(s.Notes,
		NoLimits(t.Resources, "Mooncake's transfer goes from engine to engine, and keeps nothing of its own")...)
	return s, errors.Join(errs...)
}

func mooncakeExtra(o *mooncake.Options, t Target) map[string]any {
	extra := map[string]any{}
	if o.NumWorkers > 0 {
		extra["num_workers"] = o.NumWorkers
	}
	switch {
	case o.Protocol != "":
		extra["mooncake_protocol"] = o.Protocol
	case t.CPU:
		extra["mooncake_protocol"] = "tcp"
	}
	if o.DeviceName != "" {
		extra["device_name"] = o.DeviceName
	}
	if o.BootstrapServerAddress != "" {
		extra["bootstrap_server_address"] = o.BootstrapServerAddress
	}
	if o.PrefillSideSWAReplay {
		extra["prefill_side_swa_replay"] = true
	}
	if len(extra) == 0 {
		return nil
	}
	return extra
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
	switch {
	case u.Port() != "":
		return strconv.Atoi(u.Port())
	case u.Scheme == "https":
		return 443, nil
	}
	return 80, nil
}

// bootstrapClash notes another prefill engine on the same host whose bootstrap server would use the same port.
func bootstrapClash(c *mooncake.Connector, t Target, port int) []Note {
	for _, other := range t.Engines {
		if other.ID == t.Endpoint.ID || !other.Role.Has(discovery.RolePrefill) || other.Host() != t.Endpoint.Host() {
			continue
		}
		if p, err := bootstrapPort(c, other); err == nil && p == port {
			return []Note{{Path: "attributes.bootstrapPort",
				Text: "another prefill engine on this host has the same bootstrap port; give each its own"}}
		}
	}
	return nil
}

func abortTimeout(o *mooncake.Options, env []EnvVar, notes []Note) ([]EnvVar, []Note) {
	d := time.Duration(o.AbortTimeout)
	if d == 0 {
		return env, append(notes,
			Note{Path: "config.abortTimeout",
				Text: "is left at the engines' 480 s: for so long a decode whose prefill failed " +
					"holds sender tasks of the prefill engine. Set it a little above your longest prefill"})
	}
	seconds := strconv.Itoa(int(d / time.Second))
	return append(env, EnvVar{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", Value: seconds}), notes
}
