// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// bootstrapped is the first release that certainly has the bootstrap server (vllm#31034).
var bootstrapped = launch.Version{Minor: 16}

// Render gives the launch settings of one engine: its kv_transfer_config, the port of P's bootstrap server and, if
// AbortTimeout is set, the time after which orphaned transfers end. Names as in vLLM 0.32.0
// (docs/features/mooncake_connector_usage.md).
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	s := launch.Settings{Engine: "vllm", Args: []string{"--enable-prompt-tokens-details"},
		KVTransfer: &launch.KVTransfer{
			Connector: "MooncakeConnector", Role: launch.KVRole(t.Endpoint.Role), Extra: c.extra(t),
			LoadFailurePolicy: "fail", // the default since 2026-02 (vllm#34896), and what the failure tables count on
		}}
	if t.Version.Before(bootstrapped.Major, bootstrapped.Minor) {
		s.Notes = append(s.Notes,
			launch.Note{Path: "version",
				Text: "engines from before vllm#31034 (early 2026) have no bootstrap server and speak another " +
					"protocol, which hands off as NIXL does: use a newer one"})
	}
	if t.CPU {
		// As recorded on a CPU: vLLM's connector asks for an accelerator's index, so it needs a module that returns 0.
		s.KVTransfer.ModulePath = "mooncake_cpu"
		s.Env = append(s.Env, launch.EnvVar{Name: "MC_FORCE_TCP", Value: "true"})
		s.Notes = append(s.Notes,
			launch.Note{Text: "on a CPU, vLLM's MooncakeConnector needs a module mooncake_cpu on PYTHONPATH " +
				"that sets " +
				"torch.accelerator.current_device_index to a function that returns 0 and imports MooncakeConnector"})
	}
	var errs []error
	if t.Endpoint.Role.Has(discovery.RolePrefill) && c.opts.BootstrapServerAddress == "" {
		port, err := c.bootstrapPort(t.Endpoint)
		errs = append(errs, err)
		s.Env = append(s.Env, launch.EnvVar{Name: "VLLM_MOONCAKE_BOOTSTRAP_PORT", Value: strconv.Itoa(port)})
		s.Notes = append(s.Notes, c.clash(t, port)...)
	}
	if c.opts.BootstrapPort != 0 &&
		(c.opts.BootstrapServerAddress != "" || t.Endpoint.Attribute("bootstrapURL") != "" ||
			t.Endpoint.Attribute("bootstrapPort") != "") {
		s.Notes = append(s.Notes,
			launch.Note{NoEffect: true, Path: "config.bootstrapPort",
				Text: "the engine's attribute, or bootstrap_server_address, is more special"})
	}
	s.Env, s.Notes = c.abort(s.Env, s.Notes)
	s.Notes = append(s.Notes,
		launch.NoLimits(t.Resources, "Mooncake's transfer goes from engine to engine, and keeps nothing of its own")...)
	return s, errors.Join(errs...)
}

func (c *Connector) extra(t launch.Target) map[string]any {
	extra := map[string]any{}
	if c.opts.NumWorkers > 0 {
		extra["num_workers"] = c.opts.NumWorkers
	}
	switch {
	case c.opts.Protocol != "":
		extra["mooncake_protocol"] = c.opts.Protocol
	case t.CPU:
		extra["mooncake_protocol"] = "tcp"
	}
	if c.opts.DeviceName != "" {
		extra["device_name"] = c.opts.DeviceName
	}
	if c.opts.BootstrapServerAddress != "" {
		extra["bootstrap_server_address"] = c.opts.BootstrapServerAddress
	}
	if c.opts.PrefillSideSWAReplay {
		extra["prefill_side_swa_replay"] = true
	}
	if len(extra) == 0 {
		return nil
	}
	return extra
}

// bootstrapPort is the port on which P must listen so that [Connector.Prepare] finds it.
func (c *Connector) bootstrapPort(p discovery.Endpoint) (int, error) {
	base, err := c.bootstrapURL(p)
	if err != nil {
		return 0, fmt.Errorf("mooncake: %w", err)
	}
	u, err := url.Parse(base)
	if err != nil {
		return 0, fmt.Errorf("mooncake: %w",
			&connector.EndpointError{Endpoint: p.ID, Attribute: "bootstrapURL", Problem: "is not a URL"})
	}
	switch {
	case u.Port() != "":
		return strconv.Atoi(u.Port())
	case u.Scheme == "https":
		return 443, nil
	}
	return 80, nil
}

// clash notes another prefill engine on the same host whose bootstrap server would use the same port.
func (c *Connector) clash(t launch.Target, port int) []launch.Note {
	for _, other := range t.Engines {
		if other.ID == t.Endpoint.ID || !other.Role.Has(discovery.RolePrefill) || other.Host() != t.Endpoint.Host() {
			continue
		}
		if p, err := c.bootstrapPort(other); err == nil && p == port {
			return []launch.Note{{Path: "attributes.bootstrapPort",
				Text: "another prefill engine on this host has the same bootstrap port; give each its own"}}
		}
	}
	return nil
}

func (c *Connector) abort(env []launch.EnvVar, notes []launch.Note) ([]launch.EnvVar, []launch.Note) {
	d := time.Duration(c.opts.AbortTimeout)
	if d == 0 {
		return env, append(notes,
			launch.Note{Path: "config.abortTimeout",
				Text: "is left at the engines' 480 s: for so long a decode whose prefill failed " +
					"holds sender tasks of the prefill engine. Set it a little above your longest prefill"})
	}
	seconds := strconv.Itoa(int(d / time.Second))
	return append(env, launch.EnvVar{Name: "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", Value: seconds}), notes
}
