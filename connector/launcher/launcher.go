// SPDX-License-Identifier: Apache-2.0

// Package launcher is for connectors that live elsewhere: one that is a [Launcher] tells pdctl render how engines are
// launched to speak its protocol. For the connectors of this repository pdctl has the settings itself
// (cmd/pdctl/launch).
package launcher

import (
	"encoding/json"

	"github.com/pdkit/pdkit/discovery"
)

// Launcher says how engines are launched to speak a connector's protocol.
type Launcher interface {
	// LaunchSettings returns the same settings for the same engine. Its error says what the engine's entry lacks.
	LaunchSettings(e discovery.Endpoint) (Settings, error)
}

// Settings are what a [Launcher] asks for. They leave out what an engine needs without a connector, too: model, port,
// memory.
type Settings struct {
	Engine     string            // vllm (the default), sglang or trtllm
	Args       []string          // of the command line, one per element
	Env        map[string]string // environment variables
	KVTransfer json.RawMessage   // vLLM's --kv-transfer-config; nil is none
}
