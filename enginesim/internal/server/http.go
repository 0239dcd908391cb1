// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// maxBody bounds what a client may send, in bytes.
const maxBody = 256 << 20

// surface is a connector whose engines serve more than vLLM's HTTP surface.
type surface interface {
	// Parsers gives further APIs that make tokens, by path.
	Parsers() map[string]api.Parser
	// Serve answers a request that makes no tokens, and reports whether it did.
	Serve(w http.ResponseWriter, r *http.Request) bool
}

// ServeHTTP serves vLLM's HTTP surface with uvicorn's headers. No request id is echoed: vLLM does that only when told
// to.
func (n *Node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !n.Pass() {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Server", "uvicorn")
	if !n.allowed(r) {
		api.WriteJSON(w, http.StatusUnauthorized, []byte(`{"error":"Unauthorized"}`))
		return
	}
	if r.Method == http.MethodPost {
		n.post(w, r)
		return
	}
	if n.response(w, r) {
		return
	}
	if s, ok := n.Conn.(surface); ok && s.Serve(w, r) {
		return
	}
	if strings.HasPrefix(r.URL.Path, mediaPath) {
		n.media.give(w, r)
		return
	}
	get, ok := map[string]func(http.ResponseWriter){
		"/health": n.health, "/ping": n.health, "/version": n.version, "/load": n.load, "/v1/models": n.models,
		"/metrics": n.metrics, "/kv_event_sources": n.kvEventSources,
	}[r.URL.Path]
	switch {
	case !ok && !n.knownPost(r.URL.Path):
		api.WriteError(w, api.ErrNotFound())
	case !ok || r.Method != http.MethodGet && r.Method != http.MethodHead:
		api.WriteError(w, &api.Error{Message: "Method Not Allowed", Type: "Method Not Allowed",
			Code: http.StatusMethodNotAllowed})
	default:
		get(w)
	}
}

// allowed reports whether a request has the key that its path wants: vllm/entrypoints/serve/middleware/authenticate.py
// of 0.32.0, sglang/srt/utils/auth.py of 0.5.23.
func (n *Node) allowed(r *http.Request) bool {
	below := func(prefixes ...string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(r.URL.Path, p) })
	}
	guarded := below("/v1", "/v2", "/inference", "/cohere")
	if n.cfg.SGLang {
		guarded = !below("/health", "/ready", "/metrics")
	}
	if n.cfg.APIKey == "" || !guarded || r.Method == http.MethodOptions {
		return true
	}
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.EqualFold(scheme, "Bearer") && key == n.cfg.APIKey
}

// parser returns the API of a path, nil if there is none.
func (n *Node) parser(path string) api.Parser {
	if s, ok := n.Conn.(surface); ok {
		if parse := s.Parsers()[path]; parse != nil {
			return parse
		}
	}
	return api.GenerationAPIs[path]
}

func (n *Node) knownPost(path string) bool {
	return n.parser(path) != nil || api.PlainAPIs[path] != nil
}

func (n *Node) post(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	n.cfg.Received(r, body)
	ctx, f, err := n.begin(r.Context())
	if err != nil {
		n.refuseEnding(w, err)
		return
	}
	defer n.finish(f)
	fault := n.cfg.Strike(r.URL.Path, body)
	if fault != nil && n.strike(ctx, w, fault) {
		return
	}
	if fault != nil && fault.Kind == EffectSurplus {
		defer surplus(connOf(ctx), fault)
	}
	if !n.Pass() {
		panic(http.ErrAbortHandler)
	}
	parse := n.parser(r.URL.Path)
	switch {
	case n.response(w, r):
		return
	case parse == nil && !n.knownPost(r.URL.Path):
		if s, ok := n.Conn.(surface); !ok || !s.Serve(w, r) {
			api.WriteError(w, api.ErrNotFound())
		}
		return
	case !isJSON(r):
		api.WriteError(w, api.BadField("", "value_error", "Unsupported Media Type: Only application/json is allowed",
			"None"))
		return
	case parse == nil:
		result, bad := api.PlainAPIs[r.URL.Path](&n.cfg.API, r, body)
		if bad != nil {
			api.WriteError(w, bad)
			return
		}
		api.WriteJSON(w, http.StatusOK, python.Encode(result))
		return
	}
	n.serve(ctx, w, r, body, fault, parse)
}

// health answers 503 while a dead engine's server goes down.
func (n *Node) health(w http.ResponseWriter) { api.WriteHealth(w, n.Ended() == nil) }

func (n *Node) version(w http.ResponseWriter) {
	api.WriteJSON(w, http.StatusOK, python.Encode(map[string]string{"version": api.Version}))
}

func (n *Node) load(w http.ResponseWriter) {
	api.WriteJSON(w, http.StatusOK, python.Encode(map[string]int{"server_load": n.InFlight()}))
}

func (n *Node) models(w http.ResponseWriter) {
	api.WriteJSON(w, http.StatusOK, python.Encode(api.Models(&n.cfg.API, n.started.Unix())))
}

// kvEventSources says where each data-parallel rank publishes KV-cache events. The wildcard is vLLM's: a reader puts in
// the engine's host.
func (n *Node) kvEventSources(w http.ResponseWriter) {
	sources := map[string]any{}
	if p := n.cfg.KVEvents; p != nil {
		sources[strconv.Itoa(p.Rank())] = p.Source()
	}
	api.WriteJSON(w, http.StatusOK, python.Encode(sources))
}

// Adapters are those that this life of the engine has loaded.
func (n *Node) Adapters() *api.Adapters { return n.cfg.API.Adapters }

func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// refuseEnding answers a request that arrives while the engine ends.
func (n *Node) refuseEnding(w http.ResponseWriter, why error) {
	if errors.Is(why, core.ErrCoreDead) {
		api.WriteError(w, api.ErrEngine)
		return
	}
	panic(http.ErrAbortHandler)
}

// serve runs a call of one of the generation APIs.
func (n *Node) serve(ctx context.Context, w http.ResponseWriter, r *http.Request, body []byte, fault *Effect,
	parse api.Parser) {
	c, bad := parse(&n.cfg.API, r, body)
	if bad == nil {
		bad = c.Check(&n.cfg.API)
	}
	if bad == nil {
		bad = api.CheckRank(&n.cfg.API, r)
	}
	if bad != nil {
		// A call that could not be parsed has no params to release by. The release goes on even if the client leaves.
		if c != nil {
			release, stop := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.HandshakeTimeout)
			n.Conn.Rejected(release, c.Params)
			stop()
		}
		api.WriteError(w, bad)
		return
	}
	c.Came(r, body)
	if c.Background {
		n.serveBackground(ctx, w, c)
		return
	}
	arm(c, fault)
	if c.Stream {
		n.serveStream(ctx, w, c, fault)
		return
	}
	if fault != nil {
		switch fault.Kind {
		case EffectKill:
			n.killSoon()
			panic(http.ErrAbortHandler)
		case EffectTerminate:
			n.terminateSoon()
		case EffectDeath:
			n.die()
		}
	}
	outs, err := n.run(ctx, c, nil)
	if err != nil {
		n.writeFailure(w, err)
		return
	}
	data := python.Encode(c.Whole(outs))
	if fault != nil && (fault.Kind == EffectResetStream || fault.Kind == EffectStallStream) {
		n.breakBody(ctx, w, data, fault)
		return
	}
	api.WriteJSON(w, http.StatusOK, data)
}

// writeFailure answers a generation that failed. A killed engine answers nothing.
func (n *Node) writeFailure(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, core.ErrLoadFailed):
		api.WriteError(w, api.ErrInternal)
	case errors.Is(err, core.ErrCoreDead):
		api.WriteError(w, api.ErrEngine)
	default:
		panic(http.ErrAbortHandler)
	}
}
