// SPDX-License-Identifier: Apache-2.0

package intake

import (
	"net/http"
	"strings"
)

// Unserved is why nobody serves a path and method. A client that wants a WebSocket (vLLM's and SGLang's /v1/realtime)
// is told that there is none, so that it does not look for a fault in its address.
func Unserved(r *http.Request) *Fault {
	const realtime = "/v1/realtime"
	below, found := strings.CutPrefix(r.URL.Path, realtime)
	if strings.EqualFold(r.Header.Get("Upgrade"), "websocket") || found && (below == "" || below[0] == '/') {
		return &Fault{Code: "unsupported", Message: "WebSocket connections (" + realtime + ") are not served here"}
	}
	return &Fault{Code: "not_found", Message: "there is no such path and method here"}
}
