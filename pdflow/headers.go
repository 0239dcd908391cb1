// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"crypto/rand"
	"encoding/hex"
	"net/http"
	"slices"
	"strings"
)

// forwarded are the client's headers that legs carry: an allow-list, since whatever else a client sends (cookies, the
// wish for gzip, a data-parallel rank) would reach the engines unread.
var forwarded = []string{"Authorization", "Content-Type", "Accept", "User-Agent", "X-Session-Id", "X-Vllm-Priority", "Traceparent", "Tracestate"}

const (
	headerRequestID = "X-Request-Id"
	headerMode      = "X-Pd-Mode" // X-PD-Mode on the wire is the same name
)

func neverForwarded(canonical string) bool {
	return slices.Contains([]string{"Cookie", "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
		"Transfer-Encoding", "Upgrade", "Content-Length", "Host", "Accept-Encoding", "Expect", "X-Data-Parallel-Rank", headerRequestID}, canonical)
}

// legHeader makes the header of a leg from the client's.
func (f *Flow) legHeader(client http.Header, requestID string) http.Header {
	h := make(http.Header, 8)
	for _, name := range forwarded {
		if v := client[name]; len(v) > 0 {
			h[name] = v
		}
	}
	for _, name := range f.opts.forward {
		if v := client[name]; len(v) > 0 {
			h[name] = v
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = userAgent // else net/http names itself
	}
	h["Content-Type"] = jsonType
	h[headerRequestID] = []string{requestID}
	return h
}

var (
	userAgent = []string{"pdkit/" + Version}
	jsonType  = []string{"application/json"}
)

// requestID returns the client's X-Request-Id if it may be used, else a new one. vLLM takes the header as its own id, and
// some connectors parse addresses out of it: so a client's id that looks like one of theirs is replaced.
func requestID(h http.Header) string {
	if v := h[headerRequestID]; len(v) == 1 && validRequestID(v[0]) {
		return v[0]
	}
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func validRequestID(s string) bool {
	if len(s) < 1 || len(s) > 128 || strings.Contains(s, "___prefill_addr_") || strings.Contains(s, "___decode_addr_") {
		return false
	}
	for i := range len(s) {
		c := s[i]
		ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.' || c == ':'
		if !ok {
			return false
		}
	}
	return true
}
