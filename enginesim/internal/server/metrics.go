// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/metrics"
)

// metrics is the /metrics page, in vLLM's names and labels.
func (n *Node) metrics(w http.ResponseWriter) {
	p := &metrics.Page{Model: n.cfg.API.Model}
	if own, ok := n.Conn.(interface{ Metrics(p *metrics.Page) }); ok {
		own.Metrics(p)
	}
	store, ok := n.Conn.(interface{ Unspecified() bool })
	n.Core.WriteMetrics(p, ok && store.Unspecified())
	h := w.Header()
	h.Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	h.Set("Content-Length", strconv.Itoa(p.B.Len()))
	h.Set("Vary", "Origin")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(p.B.Bytes())
}
