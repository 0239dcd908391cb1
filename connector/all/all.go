// SPDX-License-Identifier: Apache-2.0

// Package all registers every connector of this module. Import it for its side effect if a configuration names
// connectors:
//
//	import _ "github.com/pdkit/pdkit/connector/all"
package all

import (
	_ "github.com/pdkit/pdkit/connector/ascendlayerwise" // ascend-layerwise
	_ "github.com/pdkit/pdkit/connector/lmcache"         // lmcache
	_ "github.com/pdkit/pdkit/connector/lmcachepd"       // lmcache-pd
	_ "github.com/pdkit/pdkit/connector/mooncake"        // mooncake
	_ "github.com/pdkit/pdkit/connector/mooncakeascend"  // mooncake-ascend, mooncake-hybrid
	_ "github.com/pdkit/pdkit/connector/mooncakestore"   // mooncake-store
	_ "github.com/pdkit/pdkit/connector/moriio"          // moriio
	_ "github.com/pdkit/pdkit/connector/multi"           // multi, kvbm
	_ "github.com/pdkit/pdkit/connector/nixl"            // nixl
	_ "github.com/pdkit/pdkit/connector/nixlpush"        // nixl-push
	_ "github.com/pdkit/pdkit/connector/offload"         // offload-p2p
	_ "github.com/pdkit/pdkit/connector/p2pnccl"         // p2pnccl
	_ "github.com/pdkit/pdkit/connector/plainhttp"       // http
	_ "github.com/pdkit/pdkit/connector/pynccl"          // pynccl
	_ "github.com/pdkit/pdkit/connector/relay"           // relay, tpu
	_ "github.com/pdkit/pdkit/connector/sglang"          // sglang
	_ "github.com/pdkit/pdkit/connector/sharedstorage"   // sharedstorage
	_ "github.com/pdkit/pdkit/connector/silentstore"     // ascend-store, flexkv, hf3fs, ucm
	_ "github.com/pdkit/pdkit/connector/trtllm"          // trtllm
)
