// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net/http"
)

// clients is the clients' side: the PD flow, the list of models, and what may pass to a decode engine. All else is the
// mux's 404.
func (g *gateway) clients(background context.Context) http.Handler {
	models := newModelList(background, g)
	pass := http.Handler(g.mux)
	if g.cfg.gateway.Passthrough != "" {
		pass = &passthrough{g: g, otherwise: g.mux}
	}
	return g.mux.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && r.URL.Path == modelsPath {
			models.ServeHTTP(w, r)
			return
		}
		pass.ServeHTTP(w, r)
	}))
}

// closeAfterChunks ends the connection after a chunked request: net/http hides a Content-Length that stood beside it, and what
// follows must not be read as another request.
func closeAfterChunks(w http.ResponseWriter, r *http.Request) {
	if len(r.TransferEncoding) > 0 {
		w.Header().Set("Connection", "close")
	}
}

const headerRequestID = "X-Request-Id"
