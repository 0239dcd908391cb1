// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"net/http"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// rank is what a bootstrap server says of one of P's data-parallel ranks.
type rank struct {
	EngineID string                       `json:"engine_id"`
	Workers  map[string]map[string]string `json:"worker_addr"`
}

// answerQuery answers GET /query as recorded (docs/protocols/mooncake.md, recording 00).
func (c *mooncake) answerQuery(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Server", "uvicorn")
	switch {
	case r.URL.Path != "/query":
		proto.WriteJSON(w, http.StatusNotFound, []byte(`{"detail":"Not Found"}`))
	case r.Method != http.MethodGet:
		proto.WriteJSON(w, http.StatusMethodNotAllowed, []byte(`{"detail":"Method Not Allowed"}`))
	default:
		ranks := map[string]rank{}
		for i := range c.ranks {
			ranks[strconv.Itoa(i)] = rank{c.engine(i),
				map[string]map[string]string{"0": {"0": "tcp://" + c.SideAddress()}}}
		}
		proto.WriteJSON(w, http.StatusOK, python.Encode(ranks))
	}
}
