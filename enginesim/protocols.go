// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/proto/ascendlayerwise"
	"github.com/pdkit/pdkit/enginesim/internal/proto/lmcache"
	"github.com/pdkit/pdkit/enginesim/internal/proto/lmcachepd"
	"github.com/pdkit/pdkit/enginesim/internal/proto/mooncake"
	"github.com/pdkit/pdkit/enginesim/internal/proto/mooncakeascend"
	"github.com/pdkit/pdkit/enginesim/internal/proto/mooncakestore"
	"github.com/pdkit/pdkit/enginesim/internal/proto/moriio"
	"github.com/pdkit/pdkit/enginesim/internal/proto/multi"
	"github.com/pdkit/pdkit/enginesim/internal/proto/nccl"
	"github.com/pdkit/pdkit/enginesim/internal/proto/nixl"
	"github.com/pdkit/pdkit/enginesim/internal/proto/offload"
	"github.com/pdkit/pdkit/enginesim/internal/proto/relay"
	"github.com/pdkit/pdkit/enginesim/internal/proto/sglang"
	"github.com/pdkit/pdkit/enginesim/internal/proto/sharedstorage"
	"github.com/pdkit/pdkit/enginesim/internal/proto/trtllm"
)

const (
	connectorNone = "none"
	connectorNIXL = "nixl"
)

// starters are the connectors that are built in, by the name in Config.Connector.
func starters() map[string]func(*proto.Host) (core.Connector, error) {
	return map[string]func(*proto.Host) (core.Connector, error){
		connectorNone:      func(*proto.Host) (core.Connector, error) { return core.NoConnector{}, nil },
		connectorNIXL:      nixl.Start,
		"lmcache":          lmcache.Start,
		"lmcache-pd":       lmcachepd.Start,
		"nixl-push":        nixl.StartPush,
		"mooncake":         mooncake.Start,
		"mooncake-store":   mooncakestore.Start,
		"ascend-store":     mooncakestore.Start, // stores that differ in their engines' settings alone
		"flexkv":           mooncakestore.Start,
		"hf3fs":            mooncakestore.Start,
		"ucm":              mooncakestore.Start,
		"offload-p2p":      offload.Start,
		"mooncake-ascend":  mooncakeascend.Start,
		"mooncake-hybrid":  mooncakeascend.Start,
		"ascend-layerwise": ascendlayerwise.Start,
		"moriio":           moriio.Start,
		"sglang":           sglang.Start,
		"trtllm":           trtllm.Start,
		"sharedstorage":    sharedstorage.Start,
		"p2pnccl":          nccl.StartP2P,
		"pynccl":           nccl.StartPy,
		"multi":            multi.Start,
		"kvbm":             nixl.Start, // on the wire
		"relay":            relay.Start,
		"tpu":              relay.Start,
	}
}
