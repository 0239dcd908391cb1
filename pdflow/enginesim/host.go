// SPDX-License-Identifier: Apache-2.0

package enginesim

import "time"

// KV roles, as in vLLM's kv_transfer_config.
const (
	roleProducer = "kv_producer"
	roleConsumer = "kv_consumer"
	roleBoth     = "kv_both"
)

// host is what a protocol needs of the engine that it belongs to.
type host struct {
	id, model, role string
	extra           map[string]string // Config.Extra
	sideChannel     string            // the address to listen on for other engines
	handshake       time.Duration     // bounds the first contact with another engine
	keepAlive       time.Duration     // of idle HTTP connections
	maxModelLen     int
	core            *core
	life
}

// life is how a protocol follows the life of its engine.
type life interface {
	// pass waits while the engine is frozen. It returns false once the engine has ended.
	pass() bool
	// frozen reports whether the engine is frozen now.
	frozen() bool
	// ended says why the engine takes no new request, or nil.
	ended() error
}

// hello introduces the engine to others.
func (h *host) hello() hello {
	return hello{EngineID: h.id, Blocks: h.core.blocks(), BlockBytes: h.core.blockBytes, Compat: h.core.compatible(h.model)}
}
