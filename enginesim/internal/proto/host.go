// SPDX-License-Identifier: Apache-2.0

// Package proto has what the protocols share that move KV between simulated engines: the host that a protocol belongs
// to, the wire between two engines, and a store in a folder. Each protocol is a package below.
package proto

import (
	"net"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// KV roles, as in vLLM's kv_transfer_config.
const (
	RoleProducer = "kv_producer"
	RoleConsumer = "kv_consumer"
	RoleBoth     = "kv_both"
)

// Host is what a protocol needs of the engine that it belongs to.
type Host struct {
	ID, Model, Role string
	Extra           map[string]string // Config.Extra
	SideChannel     string            // the address to listen on for other engines
	Handshake       time.Duration     // bounds the first contact with another engine
	KeepAlive       time.Duration     // of idle HTTP connections
	MaxModelLen     int
	Core            *core.Core
	Life
}

// Life is how a protocol follows the life of its engine.
type Life interface {
	// Pass waits while the engine is frozen. It returns false once the engine has ended.
	Pass() bool
	// Frozen reports whether the engine is frozen now.
	Frozen() bool
	// Ended says why the engine takes no new request, or nil.
	Ended() error
}

// Hello introduces the engine to others.
func (h *Host) Hello() Hello {
	return Hello{EngineID: h.ID, Blocks: h.Core.Blocks(), BlockBytes: h.Core.BlockBytes,
		Compat: h.Core.Compatible(h.Model)}
}

// Beside is the address of a port beside the side channel, for a listener of the connector's own.
func (h *Host) Beside(port int) string {
	host, _, err := net.SplitHostPort(h.SideChannel)
	if err != nil {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, strconv.Itoa(port))
}
