// SPDX-License-Identifier: Apache-2.0

package enginesim

const (
	connectorNone = "none"
	connectorNIXL = "nixl"
)

// starters are the connectors that are built in, by the name in Config.Connector.
func starters() map[string]func(*host) (connector, error) {
	return map[string]func(*host) (connector, error){
		connectorNone:      func(*host) (connector, error) { return noConnector{}, nil },
		connectorNIXL:      startNIXL,
		"lmcache":          startLMCache,
		"lmcache-pd":       startLMCachePD,
		"nixl-push":        startNIXLPush,
		"mooncake":         startMooncake,
		"mooncake-store":   startMooncakeStore,
		"offload-p2p":      startOffload,
		"mooncake-ascend":  startMooncakeAscend,
		"ascend-layerwise": startAscendLayerwise,
		"moriio":           startMoRIIO,
		"sglang":           startSGLang,
		"trtllm":           startTRTLLM,
		"sharedstorage":    startSharedStorage,
		"p2pnccl":          startP2PNCCL,
		"pynccl":           startPyNCCL,
		"multi":            startMulti,
	}
}
