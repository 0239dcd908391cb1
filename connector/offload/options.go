// SPDX-License-Identifier: Apache-2.0

package offload

import (
	"encoding/json"
	"errors"
	"strconv"

	"github.com/pdkit/pdkit/config"
)

// DefaultPort is the base port of control sockets that pdkit renders, as vLLM's own example does. The engine's default
// is 5710, so engines must be given this one.
const DefaultPort = 7777

const dispatchTogether, dispatchSerial = "together", "serial"

const (
	tieringSpec = "TieringOffloadingSpec"
	tierP2P     = "p2p"
)

// Options are the connector's settings. Dispatch and Port are pdkit's own. The others are the engines'
// kv_connector_extra_config, under the engines' names; they are only rendered.
type Options struct {
	Dispatch string `json:"dispatch"` // together (default) or serial
	// the base port of engines without the attribute p2pPort; default: the port of the p2p tier below, or 7777
	Port int `json:"port"`

	SpecName              string           `json:"spec_name"` // TieringOffloadingSpec, or left out
	CPUBytesToUse         int64            `json:"cpu_bytes_to_use"`
	BlockSize             int              `json:"block_size"` // tokens of an offloaded block
	BlocksPerChunk        int              `json:"blocks_per_chunk"`
	EvictionPolicy        string           `json:"eviction_policy"`
	CachePolicyModulePath string           `json:"cache_policy_module_path"`
	OffloadPromptOnly     *bool            `json:"offload_prompt_only"`
	SelfDescribingEvents  *bool            `json:"self_describing_kv_events"`
	SecondaryTiers        []map[string]any `json:"secondary_tiers"` // left out: one of type p2p
}

func (o *Options) check() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if o.Dispatch != "" && o.Dispatch != dispatchTogether && o.Dispatch != dispatchSerial {
		fault("dispatch", "is not a known value", "together or serial")
	}
	if o.Port < 0 || o.Port > 65535 {
		fault("port", "is not a port", "1 to 65535")
	}
	if o.SpecName != "" && o.SpecName != tieringSpec {
		fault("spec_name", "keeps KV in the engine's own memory: nothing goes from engine to engine",
			tieringSpec+", with a secondary tier of type p2p")
	}
	for _, c := range []struct {
		path  string
		value int64
	}{{"cpu_bytes_to_use", o.CPUBytesToUse}, {"block_size", int64(o.BlockSize)},
		{"blocks_per_chunk", int64(o.BlocksPerChunk)}} {
		if c.value < 0 {
			fault(c.path, "is negative", "1 or more")
		}
	}
	if o.BlockSize > 0 && o.BlocksPerChunk > 0 {
		fault("blocks_per_chunk", "stands beside block_size, of which it is another form", "one of the two")
	}
	if o.SecondaryTiers != nil {
		if tier, at := o.tier(); tier == nil {
			fault("secondary_tiers", "has no tier of type p2p: nothing goes from engine to engine",
				`add {"type": "p2p"}`)
		} else if _, given := tier["port"]; given && portOf(tier["port"]) == 0 {
			fault("secondary_tiers["+strconv.Itoa(at)+"].port", "is not a port", "1 to 65535")
		}
	}
	return errors.Join(errs...)
}

// tier is the secondary tier of type p2p.
func (o *Options) tier() (tier map[string]any, at int) {
	for i, t := range o.SecondaryTiers {
		if t["type"] == tierP2P {
			return t, i
		}
	}
	return nil, 0
}

// BasePort is the port of the control socket of engines without an attribute for it.
func (o *Options) BasePort() int {
	if o.Port != 0 {
		return o.Port
	}
	if tier, _ := o.tier(); tier != nil {
		if n := portOf(tier["port"]); n != 0 {
			return n
		}
	}
	return DefaultPort
}

// portOf reads a port from decoded JSON, or returns 0 if it is not a port.
func portOf(v any) int {
	var n int
	switch v := v.(type) {
	case float64:
		n = int(v)
		if float64(n) != v {
			return 0
		}
	case json.Number:
		i, err := v.Int64()
		if err != nil || i > 65535 {
			return 0
		}
		n = int(i)
	}
	if n < 1 || n > 65535 {
		return 0
	}
	return n
}
