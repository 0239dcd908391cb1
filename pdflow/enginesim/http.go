// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"
)

// maxBody bounds what a client may send, in bytes.
const maxBody = 256 << 20

// surface is a connector whose engines serve more than vLLM's HTTP surface.
type surface interface {
	// parsers gives further APIs that make tokens, by path.
	parsers() map[string]parser
	// serve answers a request that is no POST, and reports whether it did.
	serve(w http.ResponseWriter, r *http.Request) bool
}

// ServeHTTP serves vLLM's HTTP surface with uvicorn's headers. No request id is
// echoed: vLLM does that only when told to.
func (n *node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !n.pass() {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Server", "uvicorn")
	if r.Method == http.MethodPost {
		n.post(w, r)
		return
	}
	if s, ok := n.conn.(surface); ok && s.serve(w, r) {
		return
	}
	if strings.HasPrefix(r.URL.Path, mediaPath) {
		n.media.give(w, r)
		return
	}
	get, ok := map[string]func(http.ResponseWriter){
		"/health": n.health, "/ping": n.health, "/version": n.version, "/load": n.load, "/v1/models": n.models,
		"/metrics": n.metrics,
	}[r.URL.Path]
	switch {
	case !ok && n.knownPost(r.URL.Path):
		writeError(w, &apiError{Message: "Method Not Allowed", Type: "Method Not Allowed", Code: http.StatusMethodNotAllowed})
	case !ok:
		writeError(w, errNotFound())
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		writeError(w, &apiError{Message: "Method Not Allowed", Type: "Method Not Allowed", Code: http.StatusMethodNotAllowed})
	default:
		get(w)
	}
}

// parser gives the API that a path belongs to, nil if none.
func (n *node) parser(path string) parser {
	if s, ok := n.conn.(surface); ok {
		if parse := s.parsers()[path]; parse != nil {
			return parse
		}
	}
	return generationAPIs[path]
}

func (n *node) knownPost(path string) bool {
	return n.parser(path) != nil || plainAPIs[path] != nil
}

func (n *node) post(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	n.cfg.Received(r, body)
	ctx, f, err := n.begin(r.Context())
	if err != nil {
		n.answerEnding(w, err)
		return
	}
	defer n.finish(f)
	fault := n.cfg.Strike(r.URL.Path, body)
	if fault != nil && n.strike(ctx, w, fault) {
		return
	}
	if !n.pass() {
		panic(http.ErrAbortHandler)
	}
	parse := n.parser(r.URL.Path)
	switch {
	case parse == nil && !n.knownPost(r.URL.Path):
		writeError(w, errNotFound())
		return
	case !isJSON(r):
		writeError(w, badField("", "value_error", "Unsupported Media Type: Only application/json is allowed", "None"))
		return
	case parse == nil:
		answer, bad := plainAPIs[r.URL.Path](&n.cfg.API, r, body)
		if bad != nil {
			writeError(w, bad)
			return
		}
		writeJSON(w, http.StatusOK, encode(answer))
		return
	}
	n.serve(ctx, w, r, body, fault, parse)
}

// health answers 503 while a dead engine's server goes down.
func (n *node) health(w http.ResponseWriter) { writeHealth(w, n.ended() == nil) }

func (n *node) version(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, encode(map[string]string{"version": version}))
}

func (n *node) load(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, encode(map[string]int{"server_load": n.inFlight()}))
}

func (n *node) models(w http.ResponseWriter) {
	writeJSON(w, http.StatusOK, encode(models(&n.cfg.API, n.started.Unix())))
}

func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// answerEnding answers a request that comes when the engine is about to end.
func (n *node) answerEnding(w http.ResponseWriter, why error) {
	if errors.Is(why, errCoreDead) {
		writeError(w, errEngine)
		return
	}
	panic(http.ErrAbortHandler)
}

// serve runs a call of one of the generation APIs.
func (n *node) serve(ctx context.Context, w http.ResponseWriter, r *http.Request, body []byte, fault *effect, parse parser) {
	c, bad := parse(&n.cfg.API, r, body)
	if bad == nil {
		bad = c.check(&n.cfg.API)
	}
	if bad != nil {
		// A call that could not even be parsed has no params to release by. The
		// client's leaving must not stop the release.
		if c != nil {
			release, stop := context.WithTimeout(context.WithoutCancel(ctx), n.cfg.HandshakeTimeout)
			n.conn.rejected(release, c.params)
			stop()
		}
		writeError(w, bad)
		return
	}
	c.came(r, body)
	arm(c, fault)
	if c.stream {
		n.serveStream(ctx, w, c, fault)
		return
	}
	if fault != nil {
		switch fault.Kind {
		case effectKill:
			n.killSoon()
			panic(http.ErrAbortHandler)
		case effectTerminate:
			n.terminateSoon()
		case effectDeath:
			n.die()
		}
	}
	outs, err := n.run(ctx, c, nil)
	if err != nil {
		n.writeFailure(w, err)
		return
	}
	data := withMembers(encode(c.whole(outs)), outs)
	if fault != nil && (fault.Kind == effectResetStream || fault.Kind == effectStallStream) {
		n.breakBody(ctx, w, data, fault)
		return
	}
	writeJSON(w, http.StatusOK, data)
}

// writeFailure answers a generation that failed. A killed engine answers nothing.
func (n *node) writeFailure(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, errLoadFailed):
		writeError(w, errInternal)
	case errors.Is(err, errCoreDead):
		writeError(w, errEngine)
	default:
		panic(http.ErrAbortHandler)
	}
}
