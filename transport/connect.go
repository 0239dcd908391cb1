// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"errors"
	"net"

	"github.com/pdkit/pdkit/transport/internal/rawsocket"
)

type newConnectionKey struct{}

// WithNewConnection makes a [Transport] open a new connection for each request under the returned context. Use it for
// the attempt after one that failed on a reused connection ([Error].Reused): what ended that connection may have ended
// all idle connections, of other engines too, and a request must not fail twice for the same reason.
func WithNewConnection(ctx context.Context) context.Context {
	return context.WithValue(ctx, newConnectionKey{}, true)
}

func wantsNew(ctx context.Context) bool { return ctx.Value(newConnectionKey{}) != nil }

// dial opens a connection to address (host:port), with TLS if secure is true. It runs the TLS handshake itself, so that
// one limit covers TCP and TLS, and a failed handshake can be told from other faults. Errors are of type *connectError.
func (t *Transport) dial(ctx context.Context, address string, secure bool) (net.Conn, *tls.Conn, error) {
	ctx, cancel := t.connectContext(ctx)
	defer cancel()
	raw, err := t.options.DialContext(ctx, "tcp", address)
	if err != nil {
		failed := newConnectError(err, false)
		if failed.kind == KindRefused {
			t.suspects.clear(address)
		}
		return nil, nil, failed
	}
	raw = rawsocket.New(raw)
	if !secure {
		return raw, nil, nil
	}
	kept := false
	defer func() { // also where a function of the configuration's panics
		if !kept {
			_ = raw.Close()
		}
	}()
	config := t.tls
	if t.options.GetTLS != nil {
		config = clientTLS(t.options.GetTLS(), config.NextProtos)
	}
	if config.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, nil, newConnectError(err, false)
		}
		config = config.Clone()
		config.ServerName = host
	}
	secured := tls.Client(raw, config)
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, nil, newConnectError(err, true)
	}
	kept = true
	return raw, secured, nil
}

// dialApart is dial in a goroutine of its own. To open a connection takes more stack than the rest of a request does,
// a TLS handshake several times as much, and a stream keeps all the stack that its request has needed.
func (t *Transport) dialApart(ctx context.Context, address string, secure bool) (raw net.Conn, secured *tls.Conn,
	err error) {
	err = newConnectError(errors.New("DialContext ended its goroutine"), false) // as a test's does that fails
	var panicked any                                                            // by a function of the host's
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() { panicked = recover() }()
		raw, secured, err = t.dial(ctx, address, secure)
	}()
	<-done
	if panicked != nil {
		panic(panicked)
	}
	return raw, secured, err
}

func (t *Transport) connectContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.options.ConnectTimeout < 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.options.ConnectTimeout)
}
