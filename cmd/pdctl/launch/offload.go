// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/offload"
	"github.com/pdkit/pdkit/discovery"
)

// defaultMemory is the size of the first tier in host memory if the settings have none, since vLLM has no default.
const defaultMemory = 8 << 30

// Releases of vLLM: 0.23 did not have the tier, and by 0.28 the keys had their present names.
var firstTier, newNames = Version{Minor: 24}, Version{Minor: 28}

// renderOffload gives all engines the same tiers. Each engine has its own control socket: D's, too, since P connects
// back to it.
func renderOffload(c connector.KVConnector, given *offload.Options, t Target) (Settings, error) {
	o := offloadOptions{given}
	if t.Version.Before(firstTier.Major, firstTier.Minor) {
		return Settings{}, refuse("version", "has no tier of type p2p", "vLLM 0.25 or newer")
	}
	asPrefill := t.Endpoint // D's own entry is checked as P's is, since P connects back to it
	asPrefill.Role = discovery.RolePrefill
	if err := checkEndpoint(c, asPrefill); err != nil {
		return Settings{}, err
	}
	host, port := offload.HostOf(t.Endpoint), o.listens(t)
	if port == 0 {
		return Settings{},
			errors.New("offload-p2p: no port is left on this host for the engine's control socket")
	}
	s := vllm(&KVTransfer{Connector: "OffloadingConnector", Role: "kv_both", Extra: o.extra(t)})
	s.set("PYTHONHASHSEED", "0")
	s.set("VLLM_P2P_SIDE_CHANNEL_HOST", host)
	s.set("VLLM_P2P_SIDE_CHANNEL_PORT", strconv.Itoa(port))
	o.notes(&s, t, host, port)
	return s, nil
}

// offloadOptions are the settings of the connector, with what they mean for engines.
type offloadOptions struct{ *offload.Options }

func (o offloadOptions) extra(t Target) map[string]any {
	extra := addMembers(map[string]any{"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": o.memory(t)}, []member{
		{"block_size", o.BlockSize, o.BlockSize > 0},
		{"blocks_per_chunk", o.BlocksPerChunk, o.BlocksPerChunk > 0},
		{"eviction_policy", o.EvictionPolicy, o.EvictionPolicy != ""},
		{"cache_policy_module_path", o.CachePolicyModulePath, o.CachePolicyModulePath != ""},
		{"offload_prompt_only", o.OffloadPromptOnly, o.OffloadPromptOnly != nil},
		{"self_describing_kv_events", o.SelfDescribingEvents, o.SelfDescribingEvents != nil},
	})
	tiers := []map[string]any{{"type": "p2p"}}
	if o.SecondaryTiers != nil {
		tiers = nil
		for _, tier := range o.SecondaryTiers {
			tier = maps.Clone(tier)
			if tier["type"] == "p2p" { // environment variables give each engine its host and port
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
func (o offloadOptions) memory(t Target) int64 {
	if o.CPUBytesToUse > 0 {
		return o.CPUBytesToUse
	}
	if n, err := t.Resources.MaxMemory.Bytes(); err == nil && n > 0 {
		return n
	}
	return defaultMemory
}

// listens is the base port of the engine's control socket. The gateway must know P's, so it is the attribute or the
// settings' port. P learns D's from D, so without an attribute D takes the next port that no other engine of its host
// has.
func (o offloadOptions) listens(t Target) int {
	if port, fixed := o.fixed(t.Endpoint); fixed {
		return port
	}
	return nextPort(t, o.BasePort(), discovery.Endpoint.Host, func(e discovery.Endpoint) (int, int, error) {
		port, _ := o.fixed(e)
		return port, ranksOf(e), nil
	})
}

// fixed is the port that an engine has whatever ports the others have, if there is one.
func (o offloadOptions) fixed(e discovery.Endpoint) (int, bool) {
	if port, err := attr.Port(e, "p2pPort", o.BasePort()); err == nil &&
		(e.Role.Has(discovery.RolePrefill) || strings.TrimSpace(e.Attribute("p2pPort")) != "") {
		return port, true
	}
	return 0, false
}

// ranksOf returns how many ports an engine's ranks take, from its base port to the last rank behind its URL.
func ranksOf(e discovery.Endpoint) int {
	ranks, err := attr.RanksOf(e)
	if err != nil {
		return 1
	}
	return ranks.Start + ranks.Local
}

func (o offloadOptions) notes(s *Settings, t Target, host string, port int) {
	s.noteIf(slices.ContainsFunc(t.Engines, func(e discovery.Endpoint) bool {
		other, fixed := o.fixed(e)
		return fixed && e.ID != t.Endpoint.ID && e.Host() == t.Endpoint.Host() &&
			other < port+ranksOf(t.Endpoint) && port < other+ranksOf(e)
	}), "attributes.p2pPort",
		"another engine on this host has the same port, or one of its ranks has; give each its own")
	s.noteIf(loopback(host), "attributes.p2pHost", "a loopback address works only if all engines are on one machine")
	s.noteIf(o.Dispatch != "", "config.dispatch", "how the gateway sends the legs; no setting of an engine")
	s.noteIf(o.SpecName != "", "config.spec_name",
		"kv_connector_extra_config.spec_name, which has it in any case: no other one has the tier")
	s.noteIf(o.Port != 0, "config.port",
		"VLLM_P2P_SIDE_CHANNEL_PORT of engines without the attribute p2pPort; each data-parallel rank takes one more")
	s.noteIf(t.Version.Before(newNames.Major, newNames.Minor), "version",
		"engines from before July 2026 know other names of the keys (prefill, decode), ignore these in silence and "+
			"compute every prompt twice: see that vllm:kv_offload_tiering_read_bytes rises")
	given := t.Resources.MaxMemory != ""
	s.idleIf(given && o.CPUBytesToUse > 0, "resources.maxMemory",
		"cpu_bytes_to_use says how much host memory is taken")
	s.noteIf(given && o.CPUBytesToUse <= 0, "resources.maxMemory",
		"cpu_bytes_to_use: of all workers of an engine together")
	s.noteIf(!given && o.CPUBytesToUse == 0, "config.cpu_bytes_to_use",
		"is not set, and vLLM has no default: 8 GiB are rendered")
	r := t.Resources
	r.MaxMemory = ""
	s.noLimits(r, "the tier goes from host memory to host memory, without a limit")
}
