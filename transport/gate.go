// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"io"
	"net/http"
)

type gateKey struct{}

// BeforeSend gives the requests under the returned context a last word: check is called once a connection stands, right
// before the first byte is written to it. If it returns an error, nothing is sent, and the request fails with an [*Error]
// (NotSent, never tried again) that wraps it. It is for what may have become untrue while a connection was made, such as
// the lease of a KV handoff.
func BeforeSend(ctx context.Context, check func() error) context.Context {
	return context.WithValue(ctx, gateKey{}, check)
}

// admitted asks the context's check, if it has one.
func admitted(ctx context.Context) error {
	if check, ok := ctx.Value(gateKey{}).(func() error); ok {
		return check()
	}
	return nil
}

// GateBody asks the check of a request's context at the first read of its body, for round trippers that do not ask it
// themselves: a request whose body cannot be read is given up, and no engine acts on it.
func GateBody(ctx context.Context, body io.ReadCloser) io.ReadCloser {
	if body == nil || body == http.NoBody || ctx.Value(gateKey{}) == nil {
		return body
	}
	return &gatedBody{ReadCloser: body, ctx: ctx}
}

type gatedBody struct {
	io.ReadCloser
	ctx   context.Context
	asked bool
}

func (b *gatedBody) Read(p []byte) (int, error) {
	if !b.asked {
		b.asked = true
		if err := admitted(b.ctx); err != nil {
			return 0, err
		}
	}
	return b.ReadCloser.Read(p)
}
