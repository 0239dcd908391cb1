// SPDX-License-Identifier: Apache-2.0

package enginesim

import "encoding/json"

// remote is the engine that params name.
func remote(params kvParams) place {
	port := string(params["remote_port"])
	if s := params.text("remote_port"); s != "" {
		port = s
	}
	return place{id: params.text("remote_engine_id"), host: params.text("remote_host"), port: port}
}

// addressed says whether params name the other engine.
func addressed(params kvParams) bool {
	return params.has("remote_engine_id") && params.has("remote_host") && params.has("remote_port") && params.has("remote_request_id")
}

// blockIDs reads [[int,...]]: one inner array per KV cache group, of which there
// is one here.
func blockIDs(raw json.RawMessage) ([]int64, bool) {
	var groups [][]int64
	if len(raw) == 0 || json.Unmarshal(raw, &groups) != nil || len(groups) == 0 || len(groups[0]) == 0 {
		return nil, false
	}
	return groups[0], true
}
