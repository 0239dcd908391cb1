// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// Engines take orders from whoever reaches them: load this adapter, forget that cache, sleep. So only what serves
// requests may pass, and nothing that begins like an order, at any depth.
var (
	methods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete}
	exact   = []string{"/tokenize", "/detokenize", "/score", "/rerank", "/pooling"}
	orders  = []string{
		"abort", "reset", "sleep", "wake", "is_sleeping", "load", "unload", "start_", "stop_", "pause", "resume",
		"scale", "update", "init", "collective", "flush", "release", "set_", "server_", "destroy",
	}
)

// serves reports whether a request is the handler's.
func (h *Handler) serves(r *http.Request) bool {
	inference := r.Method == http.MethodPost && connector.APIOf(r.URL.Path) != connector.APIUnknown
	return slices.Contains(methods, r.Method) && !inference && passes(r) && (h.o.Allow == nil || h.o.Allow(r))
}

// passes reports whether a path may go to an engine. Any spelling that an engine might read as another path (encoded
// bytes, dots, doubled slashes, a slash at the end, parameters) does not.
func passes(r *http.Request) bool {
	p := r.URL.Path
	if r.URL.EscapedPath() != p || path.Clean(p) != p || !strings.HasPrefix(p, "/v1/") && !slices.Contains(exact, p) {
		return false
	}
	for _, c := range p {
		plain := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
			strings.ContainsRune("/-_.:", c)
		if !plain {
			return false
		}
	}
	for segment := range strings.SplitSeq(strings.ToLower(p), "/") {
		segment = strings.ReplaceAll(segment, "-", "_")
		if slices.ContainsFunc(orders, func(order string) bool { return strings.HasPrefix(segment, order) }) {
			return false
		}
	}
	return true
}
