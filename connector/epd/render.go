// SPDX-License-Identifier: Apache-2.0

package epd

import (
	"encoding/json"
	"strconv"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/discovery"
)

const defaultCPUBytes = 1 << 30

// transfer is vLLM's ec_transfer_config (vllm/config/ec_transfer.py).
type transfer struct {
	Connector string         `json:"ec_connector"`
	Role      string         `json:"ec_role"`
	Extra     map[string]any `json:"ec_connector_extra_config,omitempty"`
}

// Render gives an encode engine its settings. For a prefill engine it adds the consumer's settings to what the inner
// connector renders. Decode engines take no embeddings.
func (c *Connector) Render(t launch.Target) (s launch.Settings, err error) {
	encodes := t.Endpoint.Role.Has(discovery.RoleEncode)
	if t.Version.Before(0, 11) || c.opts.Type == NIXL && t.Version.Before(0, 30) {
		return s, &config.FieldError{Path: "version", Problem: "has no encode stage of this type",
			Remedy: "vLLM 0.11 or newer for example, 0.30 or newer for nixl"}
	}
	s.Engine = "vllm"
	if !encodes {
		if r, ok := connector.As[launch.Renderer](c.KVConnector); ok {
			if s, err = r.Render(t); err != nil {
				return s, err
			}
		}
		if !t.Endpoint.Role.Has(discovery.RolePrefill) {
			return s, nil
		}
	}
	settings := transfer{Role: "ec_consumer"}
	if encodes {
		settings.Role = "ec_producer"
	}
	switch c.opts.Type {
	case NIXL:
		settings.Connector = "ECCPUConnector"
		bytes := c.opts.CPUBytes
		if bytes == 0 {
			bytes = defaultCPUBytes
		}
		settings.Extra = map[string]any{"ec_enable_nixl": true, "ec_cpu_bytes": bytes}
		s.Env = append(s.Env, launch.EnvVar{Name: "VLLM_USE_V2_MODEL_RUNNER", Value: "1"})
		if encodes {
			if host := t.Endpoint.Host(); host != "" {
				s.Env = append(s.Env, launch.EnvVar{Name: "VLLM_EC_SIDE_CHANNEL_HOST", Value: host})
			}
			// Engines on one machine must not listen on the same port.
			s.Env = append(s.Env, launch.EnvVar{Name: "VLLM_EC_SIDE_CHANNEL_PORT", Value: strconv.Itoa(5601 + t.Index)})
		}
	default:
		settings.Connector = "ECExampleConnector"
		if c.opts.SharedStoragePath != "" {
			settings.Extra = map[string]any{"shared_storage_path": c.opts.SharedStoragePath}
		} else {
			s.Notes = append(s.Notes,
				launch.Note{Path: "encoder.sharedStoragePath",
					Text: "is not set: each engine uses its own /tmp, which is shared only between processes of " +
						"one machine"})
		}
	}
	raw, err := json.Marshal(settings)
	if err != nil {
		return s, err
	}
	s.Args = append(s.Args, "--ec-transfer-config", string(raw))
	return s, nil
}
