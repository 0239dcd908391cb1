// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"strings"
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

// requestID returns the client's X-Request-Id where it is fit to be sent on and echoed, else a new one: pdflow's rule,
// for what does not go through a flow.
func requestID(h http.Header) string {
	if v := h[headerRequestID]; len(v) == 1 && fitID(v[0]) {
		return v[0]
	}
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func fitID(id string) bool {
	if len(id) < 1 || len(id) > 128 || strings.Contains(id, "___prefill_addr_") || strings.Contains(id, "___decode_addr_") {
		return false
	}
	return !strings.ContainsFunc(id, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.:", c)
	})
}
