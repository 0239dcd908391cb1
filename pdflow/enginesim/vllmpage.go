// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"strconv"
)

// metrics is the /metrics page, in vLLM's names and labels.
func (n *node) metrics(w http.ResponseWriter) {
	p := &page{model: n.cfg.API.model}
	if own, ok := n.conn.(interface{ metrics(p *page) }); ok {
		own.metrics(p)
	}
	store, ok := n.conn.(interface{ unspecified() bool })
	n.core.writeMetrics(p, ok && store.unspecified())
	h := w.Header()
	h.Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(p.b.Len()))
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(p.b.Bytes())
}
