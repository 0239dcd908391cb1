// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"encoding/json"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Remote is the engine that params name.
func Remote(params core.Params) Place {
	port := string(params["remote_port"])
	if s := params.Text("remote_port"); s != "" {
		port = s
	}
	return Place{ID: params.Text("remote_engine_id"), Host: params.Text("remote_host"), Port: port}
}

// Addressed reports whether params name the other engine.
func Addressed(params core.Params) bool {
	return params.Has("remote_engine_id") && params.Has("remote_host") && params.Has("remote_port") &&
		params.Has("remote_request_id")
}

// BlockIDs reads [[int,...]]: one inner array per KV cache group, of which there is one here.
func BlockIDs(raw json.RawMessage) ([]int64, bool) {
	var groups [][]int64
	if len(raw) == 0 || json.Unmarshal(raw, &groups) != nil || len(groups) == 0 || len(groups[0]) == 0 {
		return nil, false
	}
	return groups[0], true
}
