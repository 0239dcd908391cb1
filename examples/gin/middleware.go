// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"net/http"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"
	"golang.org/x/time/rate"
)

const clientKey = "client" // the name in a gin.Context of who sends the request

// authenticate admits clients that send one of the keys, as OpenAI's clients do (Authorization: Bearer) or as
// Anthropic's do (X-Api-Key). It removes the key from the request unless the engines are to get it.
func authenticate(keys []string, forward bool) gin.HandlerFunc {
	known := map[[sha256.Size]byte]bool{} // hashes, so that a comparison tells nothing of a key by its time
	for _, k := range keys {
		known[sha256.Sum256([]byte(k))] = true
	}
	return func(c *gin.Context) {
		key, found := strings.CutPrefix(c.GetHeader("Authorization"), "Bearer ")
		if !found {
			key = c.GetHeader("X-Api-Key")
		}
		client := sha256.Sum256([]byte(key))
		if !known[client] {
			refuse(c, http.StatusUnauthorized, "authentication_error", "the key is missing or not known")
			return
		}
		if !forward {
			c.Request.Header.Del("Authorization")
			c.Request.Header.Del("X-Api-Key")
		}
		c.Set(clientKey, client)
	}
}

// limit admits so many requests a second from each client. It runs after authenticate, so strangers cost no memory.
func limit(perSecond rate.Limit, burst int) gin.HandlerFunc {
	var mu sync.Mutex
	limiters := map[any]*rate.Limiter{}
	return func(c *gin.Context) {
		client := c.MustGet(clientKey)
		mu.Lock()
		l := limiters[client]
		if l == nil {
			l = rate.NewLimiter(perSecond, burst)
			limiters[client] = l
		}
		mu.Unlock()
		if !l.Allow() {
			c.Header("Retry-After", "1")
			refuse(c, http.StatusTooManyRequests, "rate_limit_error", "too many requests with this key")
		}
	}
}

// refuse ends a request with an error object that OpenAI's clients and Anthropic's understand alike.
func refuse(c *gin.Context, status int, kind, message string) {
	c.AbortWithStatusJSON(status, gin.H{"type": "error",
		"error": gin.H{"type": kind, "message": message, "param": nil, "code": kind}})
}
