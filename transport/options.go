// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"context"
	"crypto/tls"
	"math/rand/v2"
	"net"
	"net/http"
	"time"
)

// The defaults of Options, with the reasons.
const (
	// defaultConnectTimeout bounds TCP and TLS together.
	defaultConnectTimeout = 2 * time.Second

	// defaultIdleTimeout is below the 5 s after which uvicorn, and with it vLLM (VLLM_HTTP_TIMEOUT_KEEP_ALIVE) and
	// SGLang, closes an idle connection. Where both sides' limits meet, a POST is written into a socket that the engine
	// is closing, and nobody can tell whether it was read.
	defaultIdleTimeout = 4 * time.Second

	// defaultMaxConnectionAge gives the processes behind one port new connections to share now and then.
	defaultMaxConnectionAge = 5 * time.Minute

	// defaultMaxIdlePerHost keeps the connections of a burst. net/http's own default is 2: of 200 concurrent streams to
	// one engine 198 connections would be thrown away after use.
	defaultMaxIdlePerHost = 256

	// defaultReadBuffer is enough to take a stream's chunks that came together by one system call. A request holds the
	// buffer from the moment when something has come until the caller has taken it; over TLS, and elsewhere than on
	// Linux, also while it waits for a head.
	defaultReadBuffer = 16 << 10

	// defaultWriteBuffer takes the head and body of a small request. It is held while the request is written. Large
	// bodies do not pass through it (see [Transport]).
	defaultWriteBuffer = 8 << 10

	// defaultMaxResponseHeaderBytes is far above what engines send.
	defaultMaxResponseHeaderBytes = 256 << 10
)

// Options of a [Transport]. The zero value is ready for use. Times and sizes are read once, by [New].
type Options struct {
	// ConnectTimeout bounds name lookup, TCP and TLS together, for each new connection. 0 means 2 s, a negative value
	// no limit other than the request's context.
	ConnectTimeout time.Duration

	// IdleTimeout is how long an unused connection is kept. It must stay below the engines' own keep-alive limit. 0
	// means 4 s, a negative value no limit.
	IdleTimeout time.Duration

	// MaxConnectionAge is how old a connection gets. A random fifth of it or less is taken off for each connection, so
	// that those of a burst do not end together. A request that runs is never cut: an older connection ends after its
	// response. Where several processes listen on an engine's port, as vLLM's API servers do, the system chooses one
	// for each new connection, and all share the load only if connections end. 0 means 5 min, a negative value no
	// limit. It does not hold for HTTP/2. With NetHTTP it is all that spreads single requests over the processes: of
	// an engine's idle connections net/http takes the one used last, and offers no choice (this package takes any that
	// is surely alive).
	MaxConnectionAge time.Duration

	// MaxIdlePerHost is how many unused connections are kept for each engine. 0 means 256, a negative value keeps none.
	// There is no limit over all engines.
	MaxIdlePerHost int

	// ReadBuffer and WriteBuffer are bytes for each request that is being read or written. 0 means 16 KiB and 8 KiB,
	// and less than 1 KiB means 1 KiB.
	ReadBuffer, WriteBuffer int

	// MaxResponseHeaderBytes bounds the head of a response; a longer one is an error of kind Protocol. 0 means 256 KiB.
	MaxResponseHeaderBytes int64

	// TLS is used for https engines; nil means the system's roots and no client certificate. It is cloned, and its
	// MinVersion raised to TLS 1.2.
	TLS *tls.Config

	// GetTLS, if not nil, is called for each new connection to an https engine, and returns what holds in place of TLS.
	// See [TLSFiles].
	GetTLS func() *tls.Config

	// NetHTTP sends all requests by net/http's own transport. Buffers are then held for a connection's whole life, and
	// GET and its kin may be sent again after a connection broke. A second response that comes together with the first
	// is dropped, as ever, but does not show here, and net/http writes its first bytes to the program's log.
	NetHTTP bool

	// Protocols chooses HTTP versions. nil means HTTP/1.1 alone: engines under uvicorn speak nothing else, and one
	// HTTP/2 connection would put all streams under one flow control window. A choice with HTTP/2 implies NetHTTP. Over
	// HTTP/2 an error counts as SentNothing only if no connection was made.
	Protocols *http.Protocols

	// DialContext opens connections in place of a [net.Dialer], for in-memory networks and tests. TLS, where the URL
	// asks for it, is run on top. It is called in a goroutine of its own.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
}

const minBuffer = 1 << 10

// connectionEnds returns when a connection that is opened now is too old; the zero time if never.
func (o *Options) connectionEnds() time.Time {
	age := o.MaxConnectionAge
	if age < 0 {
		return time.Time{}
	}
	return time.Now().Add(age - rand.N(age/5+1)) //nolint:gosec // jitter, guards nothing
}

// tooOld reports whether a connection has passed its end.
func tooOld(ends, now time.Time) bool { return !ends.IsZero() && now.After(ends) }

// withDefaults returns a copy of o (nil allowed) without zero values that stand for a default.
func (o *Options) withDefaults() Options {
	var out Options
	if o != nil {
		out = *o
	}
	out.ConnectTimeout = cmp.Or(out.ConnectTimeout, defaultConnectTimeout)
	out.IdleTimeout = cmp.Or(out.IdleTimeout, defaultIdleTimeout)
	out.MaxConnectionAge = cmp.Or(out.MaxConnectionAge, defaultMaxConnectionAge)
	out.MaxIdlePerHost = cmp.Or(out.MaxIdlePerHost, defaultMaxIdlePerHost)
	out.ReadBuffer = max(cmp.Or(max(out.ReadBuffer, 0), defaultReadBuffer), minBuffer)
	out.WriteBuffer = max(cmp.Or(max(out.WriteBuffer, 0), defaultWriteBuffer), minBuffer)
	out.MaxResponseHeaderBytes = cmp.Or(max(out.MaxResponseHeaderBytes, 0), defaultMaxResponseHeaderBytes)
	if out.DialContext == nil {
		out.DialContext = (&net.Dialer{}).DialContext
	}
	return out
}
