// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"crypto/rand"
	"encoding/hex"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/internal/contract"
)

// forwarded are the client's headers that engines get. It is an allow-list, because whatever else a client sends
// (cookies, the wish for gzip, a data-parallel rank) would reach the engines unread. Anthropic's clients send their key
// in X-Api-Key, and the version and the additions of their API beside it; OpenAI's clients send who pays.
var forwarded = []string{"Authorization", "X-Api-Key", "Content-Type", "Accept", "User-Agent", "X-Session-Id",
	"X-Vllm-Priority", "Traceparent", "Tracestate", "Anthropic-Version", "Anthropic-Beta", "Openai-Organization",
	"Openai-Project"}

const (
	headerRequestID = "X-Request-Id"
	headerMode      = "X-Pd-Mode" // X-PD-Mode on the wire is the same name
)

// neverForwarded reports whether a header must not reach engines, even if the host asks for it. SGLang's X-Override-
// headers replace a leg's room, ranks and id (docs/protocols/sglang.md §1).
func neverForwarded(canonical string) bool {
	return strings.HasPrefix(canonical, "X-Override-") || slices.Contains(
		[]string{"Cookie", "Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te",
			"Trailer", "Transfer-Encoding", "Upgrade", "Content-Length", "Host", "Accept-Encoding", "Expect",
			"X-Data-Parallel-Rank", headerRequestID}, canonical)
}

// EngineHeader makes the header that a flow's legs get: X-Request-Id, and of the client's headers Authorization,
// X-Api-Key, Content-Type, Accept, User-Agent, X-Session-Id, X-Vllm-Priority, Traceparent, Tracestate,
// Anthropic-Version, Anthropic-Beta, Openai-Organization, Openai-Project and those that more names. A name that
// [WithForwardHeaders] refuses is left out. It is for hosts that send other requests to engines themselves.
func (r *Request) EngineHeader(more ...string) http.Header {
	h := make(http.Header, 8)
	more = slices.DeleteFunc(slices.Clone(more), func(name string) bool {
		return neverForwarded(http.CanonicalHeaderKey(name))
	})
	fillEngineHeader(h, r.Header, []string{r.ID()}, more)
	return h
}

func fillEngineHeader(h, client http.Header, requestID, more []string) {
	for _, name := range forwarded {
		if v := client[name]; len(v) > 0 {
			h[name] = slices.Clip(v) // what is added to one leg's must not reach the other's
		}
	}
	for _, name := range more {
		if v := client.Values(name); len(v) > 0 {
			h[http.CanonicalHeaderKey(name)] = slices.Clip(v)
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = userAgent // otherwise net/http would name itself
	}
	h[headerRequestID] = requestID
}

// fillHeader fills the header of one leg. Each leg has its own, since round trippers set headers in place.
func (x *serving) fillHeader(h http.Header, edits []contract.Header) {
	fillEngineHeader(h, x.header, []string{x.id}, x.f.opts.forward)
	h["Content-Type"] = jsonType
	for _, e := range edits {
		h[http.CanonicalHeaderKey(e.Name)] = []string{e.Value}
	}
}

// fillAbsent gives a request of the connector's own to one of the session's engines the header of a leg, but for what
// the connector has set: an engine that wants a key wants it here, too.
func (x *serving) fillAbsent(r *http.Request) {
	own := r.Header
	r.Header = make(http.Header, 8)
	x.fillHeader(r.Header, nil)
	maps.Copy(r.Header, own)
}

// probeHeader is the client's header for a synthetic probe on its behalf: an engine that wants a key wants it here,
// too.
func (x *serving) probeHeader() http.Header {
	h := maps.Clone(x.header)
	delete(h, headerRequestID) // the probe is another request
	return h
}

var (
	userAgent = []string{"pdkit/" + built}
	jsonType  = []string{"application/json"}
)

// WithRequestID takes a request's ID from id in place of the client's X-Request-Id. If what id returns is not valid
// (see [Request.ID]), the flow makes a new one.
func WithRequestID(id func(*http.Request) string) Option {
	return optionFunc(func(o *options) error {
		o.requestID = id
		return needs("WithRequestID", id != nil, "a function")
	})
}

// ID returns RequestID, else the X-Request-Id of Header if there is exactly one and it is valid, else a new one at each
// call. Valid are 1 to 128 letters, digits and "-_.:". An ID that holds ___prefill_addr_ or ___decode_addr_ is not:
// vLLM takes the header as its own ID, and some of its connectors read addresses out of it.
func (r *Request) ID() string {
	if r.RequestID != "" {
		return r.RequestID
	}
	return requestIDs(r.Header)[0]
}

// requestIDs is a request's ID by a client's header, as a header's value.
func requestIDs(client http.Header) []string {
	if v := client[headerRequestID]; len(v) == 1 && validRequestID(v[0]) {
		return slices.Clip(v)
	}
	return newIDs()
}

// newIDs makes an id as a header's value.
func newIDs() []string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return []string{hex.EncodeToString(b[:])}
}

const idBytes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:"

func validRequestID(s string) bool {
	return len(s) >= 1 && len(s) <= 128 && strings.Trim(s, idBytes) == "" &&
		!strings.Contains(s, "___prefill_addr_") && !strings.Contains(s, "___decode_addr_")
}
