// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"strings"
	"sync"

	"golang.org/x/time/rate"
)

// client is a client in a request's context: the hash of its key.
type client [sha256.Size]byte

type clientKey struct{}

// authenticate admits clients that send one of the keys, as OpenAI's clients do (Authorization: Bearer) or as
// Anthropic's do (X-Api-Key). It removes the key from the request unless the engines are to get it.
func authenticate(keys []string, forward bool) func(http.Handler) http.Handler {
	known := map[client]bool{} // hashes, so that a comparison tells nothing of a key by its time
	for _, k := range keys {
		known[sha256.Sum256([]byte(k))] = true
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			key, found := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
			if !found {
				key = r.Header.Get("X-Api-Key")
			}
			c := client(sha256.Sum256([]byte(key)))
			if !known[c] {
				refuse(w, http.StatusUnauthorized, "authentication_error", "the key is missing or not known")
				return
			}
			// middleware before this one keeps its own header
			r = r.Clone(context.WithValue(r.Context(), clientKey{}, c))
			if !forward {
				r.Header.Del("Authorization")
				r.Header.Del("X-Api-Key")
			}
			next.ServeHTTP(w, r)
		})
	}
}

// limit admits so many requests a second from each client. It runs after authenticate, so strangers cost no memory.
func limit(perSecond rate.Limit, burst int) func(http.Handler) http.Handler {
	var mu sync.Mutex
	limiters := map[client]*rate.Limiter{}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c, _ := r.Context().Value(clientKey{}).(client)
			mu.Lock()
			l := limiters[c]
			if l == nil {
				l = rate.NewLimiter(perSecond, burst)
				limiters[c] = l
			}
			mu.Unlock()
			if !l.Allow() {
				w.Header().Set("Retry-After", "1")
				refuse(w, http.StatusTooManyRequests, "rate_limit_error", "too many requests with this key")
				return
			}
			next.ServeHTTP(w, r)
		})
	}
}

// refuse writes an error object that OpenAI's clients and Anthropic's understand alike.
func refuse(w http.ResponseWriter, status int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"type": "error",
		"error": map[string]any{"type": kind, "message": message, "param": nil, "code": kind}})
}
