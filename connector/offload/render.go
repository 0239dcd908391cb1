// SPDX-License-Identifier: Apache-2.0

package offload

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

// defaultMemory is the size of the first tier in host memory if the settings have none, since vLLM has no default.
const defaultMemory = 8 << 30

// Releases of vLLM: 0.23 did not have the tier, and by 0.28 the keys had their present names.
var firstTier, newNames = launch.Version{Minor: 24}, launch.Version{Minor: 28}

// Render gives all engines the same tiers. Each engine has its own control socket: D's, too, since P connects back to
// it.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	if t.Version.Before(firstTier.Major, firstTier.Minor) {
		return launch.Settings{},
			&config.FieldError{Path: "version", Problem: "has no tier of type p2p", Remedy: "vLLM 0.25 or newer"}
	}
	if _, errs := c.read(t.Endpoint); len(errs) > 0 {
		return launch.Settings{}, attr.Faults(errors.Join(errs...), nil)
	}
	host, port := hostOf(t.Endpoint), c.listens(t)
	if port == 0 {
		return launch.Settings{},
			errors.New("offload-p2p: no port is left on this host for the engine's control socket")
	}
	s := launch.Settings{
		Engine:     "vllm",
		KVTransfer: &launch.KVTransfer{Connector: "OffloadingConnector", Role: "kv_both", Extra: c.extra(t)},
		Args:       []string{"--enable-prompt-tokens-details"},
		Env: []launch.EnvVar{
			{Name: "PYTHONHASHSEED", Value: "0"},
			{Name: "VLLM_P2P_SIDE_CHANNEL_HOST", Value: host},
			{Name: "VLLM_P2P_SIDE_CHANNEL_PORT", Value: strconv.Itoa(port)},
		},
	}
	s.Notes = c.notes(t, host, port)
	return s, nil
}

func (c *Connector) extra(t launch.Target) map[string]any {
	o := &c.opts
	extra := map[string]any{"spec_name": tieringSpec, "cpu_bytes_to_use": c.memory(t)}
	for _, m := range []struct {
		key   string
		value any
		given bool
	}{
		{"block_size", o.BlockSize, o.BlockSize > 0},
		{"blocks_per_chunk", o.BlocksPerChunk, o.BlocksPerChunk > 0},
		{"eviction_policy", o.EvictionPolicy, o.EvictionPolicy != ""},
		{"cache_policy_module_path", o.CachePolicyModulePath, o.CachePolicyModulePath != ""},
		{"offload_prompt_only", o.OffloadPromptOnly, o.OffloadPromptOnly != nil},
		{"self_describing_kv_events", o.SelfDescribingEvents, o.SelfDescribingEvents != nil},
	} {
		if m.given {
			extra[m.key] = m.value
		}
	}
	tiers := []map[string]any{{"type": tierP2P}}
	if o.SecondaryTiers != nil {
		tiers = nil
		for _, tier := range o.SecondaryTiers {
			tier = maps.Clone(tier)
			if tier["type"] == tierP2P { // environment variables give each engine its host and port
				delete(tier, "host")
				delete(tier, "port")
			}
			tiers = append(tiers, tier)
		}
	}
	extra["secondary_tiers"] = tiers
	return extra
}

// memory is the size of the first tier in host memory, in bytes, for all workers together.
func (c *Connector) memory(t launch.Target) int64 {
	if c.opts.CPUBytesToUse > 0 {
		return c.opts.CPUBytesToUse
	}
	if n, err := t.Resources.MaxMemory.Bytes(); err == nil && n > 0 {
		return n
	}
	return defaultMemory
}

// listens is the base port of the engine's control socket. The gateway must know P's, so it is the attribute or the
// settings' port. P learns D's from D, so without an attribute D takes the next port that no other engine of its host
// has.
func (c *Connector) listens(t launch.Target) int {
	if port, fixed := c.fixed(t.Endpoint); fixed {
		return port
	}
	taken := map[int]bool{}
	var free []discovery.Endpoint
	for _, e := range t.Engines {
		if e.Host() != t.Endpoint.Host() {
			continue
		}
		port, fixed := c.fixed(e)
		if !fixed {
			free = append(free, e)
			continue
		}
		for i := range ranksOf(e) {
			taken[port+i] = true
		}
	}
	if !slices.ContainsFunc(free, func(e discovery.Endpoint) bool { return e.ID == t.Endpoint.ID }) {
		free = append(free, t.Endpoint)
	}
	next := c.port
	for _, e := range free {
		ranks := ranksOf(e)
		for i := 0; i < ranks; i++ {
			if next+i > 65535 {
				return 0
			}
			if taken[next+i] {
				next, i = next+i+1, -1
			}
		}
		if e.ID == t.Endpoint.ID {
			return next
		}
		next += ranks
	}
	return 0
}

// fixed is the port that an engine has whatever ports the others have, if there is one.
func (c *Connector) fixed(e discovery.Endpoint) (int, bool) {
	if port, err := attr.Port(e, attrPort, c.port); err == nil &&
		(e.Role.Has(discovery.RolePrefill) || strings.TrimSpace(e.Attribute(attrPort)) != "") {
		return port, true
	}
	return 0, false
}

func ranksOf(e discovery.Endpoint) int {
	n, err := attr.Int(e, attrDP, 1, 1, 65535)
	if err != nil {
		return 1
	}
	return n
}

func (c *Connector) notes(t launch.Target, host string, port int) []launch.Note {
	var notes []launch.Note
	add := func(given bool, path, text string) {
		if given {
			notes = append(notes, launch.Note{Path: path, Text: text})
		}
	}
	for _, e := range t.Engines {
		if other, fixed := c.fixed(e); fixed && e.ID != t.Endpoint.ID && e.Host() == t.Endpoint.Host() &&
			other < port+ranksOf(t.Endpoint) && port < other+ranksOf(e) {
			add(true, "attributes."+attrPort,
				"another engine on this host has the same port, or one of its ranks has; give each its own")
			break
		}
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	add(host == "localhost" || err == nil && ip.IsLoopback(), "attributes."+attrHost,
		"a loopback address works only if all engines are on one machine")
	add(c.opts.Dispatch != "", "config.dispatch", "how the gateway sends the legs; no setting of an engine")
	add(c.opts.SpecName != "", "config.spec_name",
		"kv_connector_extra_config.spec_name, which has it in any case: no other one has the tier")
	add(c.opts.Port != 0, "config.port",
		"VLLM_P2P_SIDE_CHANNEL_PORT of engines without the attribute p2pPort; each data-parallel rank takes one more")
	add(t.Version.Before(newNames.Major, newNames.Minor), "version",
		"engines from before July 2026 know other names of the keys (prefill, decode), ignore these in silence and "+
			"compute every prompt twice: see that vllm:kv_offload_tiering_read_bytes rises")
	given := t.Resources.MaxMemory != ""
	switch {
	case c.opts.CPUBytesToUse > 0 && given:
		notes = append(notes,
			launch.NoEffect("resources.maxMemory", "cpu_bytes_to_use says how much host memory is taken"))
	case given:
		add(true, "resources.maxMemory", "cpu_bytes_to_use: of all workers of an engine together")
	case c.opts.CPUBytesToUse == 0:
		add(true, "config.cpu_bytes_to_use", "is not set, and vLLM has no default: 8 GiB are rendered")
	}
	r := t.Resources
	r.MaxMemory = ""
	return append(notes, launch.NoLimits(r, "the tier goes from host memory to host memory, without a limit")...)
}
