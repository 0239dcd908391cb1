// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"fmt"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// Engines take orders from whoever reaches them: load this adapter, forget that cache, sleep. New releases bring new
// ones, so what passes is listed. An entry is a method and a path, GET stands for HEAD, too. See match for the path.
// Sources: the routes of vLLM 0.32.0 (vllm/entrypoints) and of SGLang 0.5.23 (srt/entrypoints/http_server.py), and
// OpenAI's API of audio.
var served = []string{
	"GET /v1/models", "GET /v1/models/*",
	"POST /v1/messages/count_tokens",
	"POST /v1/chat/completions/render", "POST /v1/completions/render", "POST /v1/responses/render",
	"POST /v1/messages/render", "POST /v1/chat/completions/derender", "POST /v1/completions/derender",
	"POST /v1/audio/*",
	"POST /v1/embeddings", "POST /v1/score", "POST /v1/rerank", "POST /v1/classify", "POST /v1/tokenize",
	"POST /v1/detokenize",
	"POST /tokenize", "POST /detokenize", "POST /score", "POST /rerank", "POST /pooling",
}

// orders are how the names of orders begin, in both engines, at any depth of a path. What a host adds to the list must
// name none, and where it says *, none passes.
var orders = []string{
	"abort", "reset", "sleep", "wake", "is_", "load", "unload", "start_", "stop_", "pause", "resume", "continue_",
	"scale", "update", "init", "collective", "flush", "release", "set_", "get_", "server_", "destroy", "shutdown",
	"begin_", "end_", "finish_", "weight", "freeze", "slow_down", "configure", "dump", "register", "unregister",
	"pd_role", "fault_tolerance", "profile",
}

// further returns the entries of the paths that a host adds.
func further(paths []string) (entries []string, err error) {
	for _, p := range paths {
		partly := func(element string) bool { return strings.Contains(element, "*") && element != "*" }
		if !strings.HasPrefix(p, "/") || strings.Trim(p, "/") == "" || path.Clean(p) != p || !plain(p, "*") ||
			slices.ContainsFunc(strings.Split(p, "/"), partly) {
			return nil, fmt.Errorf("passthrough: %q is not a path like /v1/files or /v1/files/*", p)
		}
		if isOrder(p) {
			return nil, fmt.Errorf("passthrough: %s is an order to engines, which no client may give", p)
		}
		entries = append(entries, "GET "+p, "POST "+p, "DELETE "+p)
	}
	return entries, nil
}

// serves reports whether a request is the handler's.
func (h *Handler) serves(r *http.Request) bool {
	inference := r.Method == http.MethodPost && connector.APIOf(r.URL.Path) != connector.APIUnknown
	return !inference && h.passes(r) && (h.o.Allow == nil || h.o.Allow(r))
}

// OfResponse reports whether a request refers to a response of the Responses API by its path: GET, HEAD and DELETE
// below /v1/responses/ID, and POST on /v1/responses/ID/cancel.
func OfResponse(r *http.Request) bool { return listed(ofResponse, r) }

var ofResponse = []string{"GET /v1/responses/*", "DELETE /v1/responses/*", "POST /v1/responses/*/cancel"}

// passes reports whether a request may go to an engine. Any spelling of a path that an engine might read as another one
// (encoded bytes, dots, doubled slashes, a slash at the end, parameters) may not.
func (h *Handler) passes(r *http.Request) bool {
	p := r.URL.Path
	if !spells(r.URL) || path.Clean(p) != p || !plain(p, "") {
		return false
	}
	return listed(served, r) || OfResponse(r) || h.added(r)
}

// added reports whether the host has added a request's method and path to what passes.
func (h *Handler) added(r *http.Request) bool { return listed(h.further, r) && !isOrder(r.URL.Path) }

// listed reports whether entries have a request's method and path.
func listed(entries []string, r *http.Request) bool {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return slices.ContainsFunc(entries, func(entry string) bool { return match(entry, method+" "+r.URL.Path) })
}

// match reports whether a path is the one of an entry. An element * stands for any one element, and as the last one for
// one or more.
func match(entry, p string) bool {
	for {
		want, more, deeper := strings.Cut(entry, "/")
		got, rest, below := strings.Cut(p, "/")
		switch {
		case want == "*" && !deeper:
			return got != ""
		case want != "*" && want != got, deeper != below:
			return false
		case !deeper:
			return true
		}
		entry, p = more, rest
	}
}

// plain reports whether a path has letters, digits, "/-_.:" and those of more only.
func plain(p, more string) bool {
	return !strings.ContainsFunc(p, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') &&
			!strings.ContainsRune("/-_.:", c) && !strings.ContainsRune(more, c)
	})
}

// isOrder reports whether an element of a path begins like an order to an engine.
func isOrder(p string) bool {
	for element := range strings.SplitSeq(strings.ToLower(p), "/") {
		element = strings.ReplaceAll(element, "-", "_")
		if slices.ContainsFunc(orders, func(order string) bool { return strings.HasPrefix(element, order) }) {
			return true
		}
	}
	return false
}
