// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// sglangSizes is what a bootstrap server says of P as a whole.
type sglangSizes struct {
	AttnTP   int    `json:"attn_tp_size"`
	AttnCP   int    `json:"attn_cp_size"`
	Ranks    uint64 `json:"dp_size"`
	PP       int    `json:"pp_size"`
	PageSize int    `json:"page_size"`
	KVType   string `json:"kv_cache_dtype"`
	Follows  bool   `json:"follow_bootstrap_room"`
}

// serveBootstrap is P's bootstrap server (disaggregation/common/conn.py). Beside SGLang's routes it has /sim/aux, which
// stands for the auxiliary buffers that travel with the KV.
func (c *sglangDisagg) serveBootstrap(w http.ResponseWriter, r *http.Request) {
	status, body := c.bootstrapResponse(r)
	proto.WriteJSON(w, status, body)
}

func (c *sglangDisagg) bootstrapResponse(r *http.Request) (status int, body []byte) {
	switch r.Method + " " + r.URL.Path {
	case "GET /health":
		return http.StatusOK, []byte("OK")
	case "GET /route":
		return c.route(r)
	case "GET /sim/aux":
		c.mu.Lock()
		defer c.mu.Unlock()
		aux, ok := c.used[r.URL.Query().Get("room")]
		if !ok {
			return http.StatusNotFound, []byte(`"unknown room"`)
		}
		return http.StatusOK, python.Encode(aux)
	case "POST /register_dp_rank":
		return http.StatusOK, []byte("OK")
	case "POST /query_dp_ranks":
		var q struct {
			Rooms []uint64 `json:"bootstrap_rooms"`
		}
		if json.NewDecoder(http.MaxBytesReader(nil, r.Body, 1<<20)).Decode(&q) != nil {
			return http.StatusBadRequest, []byte(`"bad request"`)
		}
		ranks := map[string]uint64{}
		for _, room := range q.Rooms {
			ranks[strconv.FormatUint(room, 10)] = room % c.ranks
		}
		return http.StatusOK, python.Encode(ranks)
	}
	return http.StatusNotFound, []byte(`"Not Found"`)
}

// route gives the sizes, if all arguments are -1, else a rank's address.
func (c *sglangDisagg) route(r *http.Request) (status int, body []byte) {
	q := r.URL.Query()
	whole := true
	for _, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		if !q.Has(name) {
			return http.StatusBadRequest, []byte(`"missing inputs for bootstrap server"`)
		}
		whole = whole && q.Get(name) == "-1"
	}
	if whole {
		return http.StatusOK, python.Encode(sglangSizes{AttnTP: 1, AttnCP: 1, Ranks: c.ranks, PP: 1,
			PageSize: c.Core.BlockSize, KVType: "auto", Follows: c.follows()})
	}
	rank, err := strconv.ParseUint(q.Get("prefill_dp_rank"), 10, 32)
	if err != nil || rank >= c.ranks {
		return http.StatusNotFound, []byte(`"bootstrap info not found"`)
	}
	host, port := c.Side.Address()
	return http.StatusOK, python.Encode(map[string]any{"rank_ip": host, "rank_port": port})
}
