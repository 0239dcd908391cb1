// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"fmt"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// KVFaultKind says what went wrong with KV blocks.
type KVFaultKind string

// Kinds of KV faults that [Engine.CheckKV] finds.
const (
	// KVLeak is a handoff that nobody read: its blocks are pinned although no request is left, or were until the lease
	// ended.
	KVLeak KVFaultKind = core.Leak
	// KVDoubleUse is a handoff read again after it was consumed.
	KVDoubleUse KVFaultKind = core.DoubleUse
	// KVStaleRead is a read of blocks whose lease had ended, or never was.
	KVStaleRead KVFaultKind = core.StaleRead
	// KVForeignRead is a read of other blocks than those of the named handoff, or for another prompt than the one that
	// was prefilled.
	KVForeignRead KVFaultKind = core.ForeignRead
	// KVNoTransfer is a prompt that a kv_consumer computed itself.
	KVNoTransfer KVFaultKind = core.NoTransferred
)

// KVFault is one breach of the rules of KV handoff, as the engine that noticed it saw it.
type KVFault struct {
	Kind    KVFaultKind
	Engine  string // engine id
	Request string // the engine's request id
}

func (f *KVFault) Error() string {
	return fmt.Sprintf("enginesim: KV %s: engine %s, request %s", f.Kind, f.Engine, f.Request)
}
