// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"net/http"
	"slices"
	"strings"
)

// forwarded are the client's headers that engines get. It is an allow-list, because whatever else a client sends
// (cookies, the wish for gzip, a data-parallel rank) would reach the engines unread.
var forwarded = []string{"Authorization", "Content-Type", "Accept", "User-Agent", "X-Session-Id", "X-Vllm-Priority",
	"Traceparent", "Tracestate"}

const (
	headerRequestID = "X-Request-Id"
	headerMode      = "X-Pd-Mode" // X-PD-Mode on the wire is the same name
)

func neverForwarded(canonical string) bool {
	return slices.Contains([]string{"Cookie", "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
		"Transfer-Encoding", "Upgrade", "Content-Length", "Host", "Accept-Encoding", "Expect", "X-Data-Parallel-Rank", headerRequestID}, canonical)
}

// EngineHeader makes the header of a request to an engine from the client's: of the client's own headers Authorization,
// Content-Type, Accept, User-Agent, X-Session-Id, X-Vllm-Priority, Traceparent, Tracestate and those in more, then the
// request id. It is for hosts that send requests to engines themselves; the legs of a flow get it, too.
func EngineHeader(client http.Header, requestID string, more ...string) http.Header {
	h := make(http.Header, 8)
	for _, name := range forwarded {
		if v := client[name]; len(v) > 0 {
			h[name] = v
		}
	}
	for _, name := range more {
		if v := client.Values(name); len(v) > 0 {
			h[http.CanonicalHeaderKey(name)] = v
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = userAgent // else net/http names itself
	}
	h[headerRequestID] = []string{requestID}
	return h
}

func (f *Flow) legHeader(client http.Header, requestID string) http.Header {
	h := EngineHeader(client, requestID, f.opts.forward...)
	h["Content-Type"] = jsonType
	return h
}

var (
	userAgent = []string{"pdkit/" + Version}
	jsonType  = []string{"application/json"}
)

// WithRequestID takes a request's ID from id in place of the client's X-Request-Id. If what id returns is not valid (see
// [RequestID]), the flow makes a new one.
func WithRequestID(id func(*http.Request) string) Option {
	return optionFunc(func(o *options) error {
		if id == nil {
			return errors.New("WithRequestID needs a function")
		}
		o.requestID = id
		return nil
	})
}

// RequestID returns the X-Request-Id of a client's header if there is exactly one and it is valid, else a new one. Valid
// are 1 to 128 letters, digits and "-_.:". An ID that holds ___prefill_addr_ or ___decode_addr_ is not: vLLM takes the
// header as its own ID, and some of its connectors read addresses out of it.
func RequestID(client http.Header) string {
	if v := client[headerRequestID]; len(v) == 1 {
		return validOrNew(v[0])
	}
	return validOrNew("")
}

func validOrNew(id string) string {
	if validRequestID(id) {
		return id
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
