// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"net/http"
	"strconv"
)

// target is what the client APIs need to know of the engine.
type target struct {
	model            string
	maxModelLen      int
	defaultMaxTokens int
	// media does the engine's part of the encode stage for a chat and returns the chat's ec_transfer_params.
	media func(ctx context.Context, body []byte) any
}

// parser reads a request of an API that makes tokens.
type parser = func(*target, *http.Request, []byte) (*call, *apiError)

// generationAPIs are vLLM's APIs that make tokens.
var generationAPIs = map[string]parser{
	"/v1/completions":        parseCompletion,
	"/v1/chat/completions":   parseChat,
	"/v1/responses":          parseResponses,
	"/v1/messages":           parseMessages,
	"/inference/v1/generate": parseGenerate,
}

func errNotFound() *apiError {
	return &apiError{Message: "Not Found", Type: "Not Found", Code: http.StatusNotFound}
}

func writeError(w http.ResponseWriter, e *apiError) {
	writeJSON(w, e.Code, encode(errorBody{e}))
}

func writeJSON(w http.ResponseWriter, status int, data []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(data)))
	h.Set("Vary", "Origin")
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

// writeHealth answers a health check.
func writeHealth(w http.ResponseWriter, healthy bool) {
	status := http.StatusOK
	if !healthy {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Length", "0")
	w.Header().Set("Vary", "Origin")
	w.WriteHeader(status)
}
