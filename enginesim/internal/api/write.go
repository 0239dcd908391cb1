// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"net/http"
	"strconv"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Engine is what the client APIs need to know of the engine.
type Engine struct {
	Model            string
	MaxModelLen      int
	DefaultMaxTokens int
	StreamParams     bool // chunks have kv_transfer_params, as from vLLM 0.33.0 on
	Adapters         *Adapters
	ListedToo        map[string][]string // other models of /v1/models, with their adapters
	Kept             *Kept               // responses; nil: they are not kept
	Ranks            int                 // data-parallel ranks that a request may name; 0 allows any number
	// Media does the engine's part of the encode stage for a chat and returns the chat's ec_transfer_params.
	Media func(ctx context.Context, body []byte) any
}

// Parser reads a request of an API that makes tokens.
type Parser = func(*Engine, *http.Request, []byte) (*Call, *Error)

// GenerationAPIs are vLLM's APIs that make tokens.
var GenerationAPIs = map[string]Parser{
	"/v1/completions":        ParseCompletion,
	"/v1/chat/completions":   ParseChat,
	"/v1/responses":          parseResponses,
	"/v1/messages":           parseMessages,
	"/inference/v1/generate": parseGenerate,
}

// ErrNotFound is the error for a path that no API has.
func ErrNotFound() *Error {
	return &Error{Message: "Not Found", Type: "Not Found", Code: http.StatusNotFound}
}

// WriteError writes an error response.
func WriteError(w http.ResponseWriter, e *Error) {
	if e.anthropic {
		WriteJSON(w, e.Code, python.Encode(map[string]any{"type": "error",
			"error": map[string]string{"type": "invalid_request_error", "message": e.Message}}))
		return
	}
	WriteJSON(w, e.Code, python.Encode(errorBody{e}))
}

// WriteJSON writes a whole response.
func WriteJSON(w http.ResponseWriter, status int, data []byte) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(data)))
	h.Set("Vary", "Origin")
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

// WriteHealth answers a health check.
func WriteHealth(w http.ResponseWriter, healthy bool) {
	status := http.StatusOK
	if !healthy {
		status = http.StatusServiceUnavailable
	}
	w.Header().Set("Content-Length", "0")
	w.Header().Set("Vary", "Origin")
	w.WriteHeader(status)
}
