// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"net/http"
)

// body gives errors of reading an answer this package's type, and so keeps
// addresses out of their text.
type body struct {
	io.ReadCloser
	ctx    context.Context
	reused bool
}

func wrapBody(ctx context.Context, resp *http.Response, reused bool) {
	if resp.Body == http.NoBody || resp.StatusCode == http.StatusSwitchingProtocols {
		return // nothing to read, or a connection that is also written to
	}
	resp.Body = &body{ReadCloser: resp.Body, ctx: ctx, reused: reused}
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		kind := requestKind(b.ctx, err)
		if kind == Other {
			kind = Protocol // what is left are broken chunks and trailers
		}
		if errors.Is(err, http.ErrBodyReadAfterClose) {
			kind = Other
		}
		err = &Error{Sent: Answered, Kind: kind, Reused: b.reused, Err: err}
	}
	return n, err
}
