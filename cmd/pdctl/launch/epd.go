// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"encoding/json"
	"errors"
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/discovery"
)

const defaultEncoderBytes = 1 << 30

// ecTransfer is vLLM's ec_transfer_config (vllm/config/ec_transfer.py).
type ecTransfer struct {
	Connector string         `json:"ec_connector"`
	Role      string         `json:"ec_role"`
	Extra     map[string]any `json:"ec_connector_extra_config,omitempty"`
}

// renderEncodeStage gives an encode engine its settings. For a prefill engine it adds the consumer's settings to what
// the inner connector renders. Decode engines take no embeddings.
func renderEncodeStage(k connector.KVConnector, settings json.RawMessage, t Target) (s Settings, err error) {
	c, ok := k.(*epd.Connector)
	if !ok {
		return s, ErrNoSettings
	}
	o, encodes := c.Options(), t.Endpoint.Role.Has(discovery.RoleEncode)
	if t.Version.Before(0, 11) || o.Type == epd.NIXL && t.Version.Before(0, 30) {
		return s, refuse("version", "has no encode stage of this type",
			"vLLM 0.11 or newer for example, 0.30 or newer for nixl")
	}
	s.Engine = "vllm"
	if !encodes {
		if s, err = Render(c.KVConnector, settings, t); err != nil && !errors.Is(err, ErrNoSettings) {
			return s, err
		}
		if !t.Endpoint.Role.Has(discovery.RolePrefill) {
			return s, nil
		}
	}
	ec := ecTransfer{Role: "ec_consumer"}
	if encodes {
		ec.Role = "ec_producer"
	}
	switch o.Type {
	case epd.NIXL:
		ec.Connector = "ECCPUConnector"
		ec.Extra = map[string]any{"ec_enable_nixl": true, "ec_cpu_bytes": cmp.Or(o.CPUBytes, defaultEncoderBytes)}
		s.set("VLLM_USE_V2_MODEL_RUNNER", "1")
		if encodes {
			if host := t.Endpoint.Host(); host != "" {
				s.set("VLLM_EC_SIDE_CHANNEL_HOST", host)
			}
			// Engines on one machine must not listen on the same port.
			s.set("VLLM_EC_SIDE_CHANNEL_PORT", strconv.Itoa(5601+t.Index))
		}
	default:
		ec.Connector = "ECExampleConnector"
		if o.SharedStoragePath != "" {
			ec.Extra = map[string]any{"shared_storage_path": o.SharedStoragePath}
		}
		s.noteIf(o.SharedStoragePath == "", "encoder.sharedStoragePath", ownTmp)
	}
	raw, err := json.Marshal(ec)
	if err != nil {
		return s, err
	}
	s.Args = append(s.Args, "--ec-transfer-config", string(raw))
	return s, nil
}
