// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"context"
	"encoding/json"
	"strconv"

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
	return Missing(params, "remote_engine_id", "remote_host", "remote_port", "remote_request_id") == ""
}

// BlockIDs reads [[int,...]]: one inner array per KV cache group, of which there is one here.
func BlockIDs(raw json.RawMessage) ([]int64, bool) {
	var groups [][]int64
	if len(raw) == 0 || json.Unmarshal(raw, &groups) != nil || len(groups) == 0 || len(groups[0]) == 0 {
		return nil, false
	}
	return groups[0], true
}

// Legs is one request's side of a protocol in which two flags say what becomes of the prompt's KV. A transfer that
// embeds it writes only what it does.
type Legs struct {
	core.NoTransfer
	Request  *core.Generation
	Pulls    bool // it comes from elsewhere
	Produces bool // it is handed off
}

// LegsOf reads the two flags.
func LegsOf(r *core.Generation) Legs {
	return Legs{Request: r, Pulls: !r.Local && r.Params.Is("do_remote_prefill"),
		Produces: r.Params.Is("do_remote_decode")}
}

// External implements core.Transfer.
func (t *Legs) External() bool { return t.Pulls }

// Ended reports whether a request came to its own end: by its limit, or by what it was to stop at.
func Ended(reason string) bool { return reason == core.ReasonLength || reason == core.ReasonStop }

// Missing gives the first of some keys that params have not, "" if they have all.
func Missing(params core.Params, keys ...string) string {
	for _, key := range keys {
		if !params.Has(key) {
			return key
		}
	}
	return ""
}

// RankOf is the data-parallel rank, of so many, that a request's header names. ok is false if it names none:
// /v1/responses ignores it.
func RankOf(r *core.Generation, ranks int) (rank int, ok bool) {
	rank, err := strconv.Atoi(r.Header.Get("X-data-parallel-rank"))
	return rank, err == nil && rank >= 0 && rank < ranks && r.Path != "/v1/responses"
}

// Hang waits until the client leaves.
func Hang(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}
