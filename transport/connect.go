// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"crypto/tls"
	"net"
)

// dialPlain opens connections for http URLs.
func (t *Transport) dialPlain(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := t.connectContext(ctx)
	defer cancel()
	raw, err := t.options.DialContext(ctx, network, address)
	if err != nil {
		return nil, newConnectError(err, false)
	}
	if t.plainHTTP2 {
		return raw, nil // many requests share it: its bytes tell nothing about one
	}
	return &conn{Conn: raw, buffers: &t.buffers}, nil
}

// dialTLS opens connections for https URLs. It runs the handshake itself, so
// that one limit covers TCP and TLS, and a failed handshake is known as such.
func (t *Transport) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := t.connectContext(ctx)
	defer cancel()
	raw, err := t.options.DialContext(ctx, network, address)
	if err != nil {
		return nil, newConnectError(err, false)
	}
	config := t.tls
	if config.ServerName == "" {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			_ = raw.Close()
			return nil, newConnectError(err, false)
		}
		config = config.Clone()
		config.ServerName = host
	}
	secured := tls.Client(raw, config)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, newConnectError(err, true)
	}
	state := secured.ConnectionState()
	if state.NegotiatedProtocol == "h2" {
		return secured, nil // net/http must see the type to speak HTTP/2
	}
	return &conn{Conn: secured, buffers: &t.buffers, tls: &state}, nil
}

func (t *Transport) connectContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.options.ConnectTimeout < 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.options.ConnectTimeout)
}
