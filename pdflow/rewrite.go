// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sse"
)

// rewrite puts the connector's event function into the stream, if this request needs one.
func (b *Body) rewrite(a *attempt) bool {
	fn := a.rewriting(b.status)
	if a.asked && b.sse && b.status == 200 {
		fn = withoutUsage(fn, a.decodeUsage)
	}
	if fn == nil {
		return false
	}
	b.src = sse.NewRewriter(b.src, b.sse, func(data []byte) (out []byte, err error) {
		if e := a.guard(LegDecode, "rewrite", func() error { out, err = fn(data); return err }); e != nil {
			return nil, e
		}
		return out, nil
	})
	return true
}

// rewriting returns how the connector changes this response of decode's, nil if it does not.
func (a *attempt) rewriting(status int) (fn connector.EventFunc) {
	if a.f.rewriter == nil || !a.twoLegs || status != 200 {
		return nil
	}
	if e := a.guard(LegDecode, "rewrite", func() error {
		fn = a.f.rewriter.Rewrite(a.s, a.awaitPrefill)
		return nil
	}); e != nil {
		return func([]byte) ([]byte, error) { return nil, e }
	}
	return fn
}

// awaitPrefill returns P's response. Where both legs run together it waits for it.
func (a *attempt) awaitPrefill() *connector.PrefillResult {
	if a.pEnded != nil {
		select {
		case <-a.pEnded:
		case <-a.ctx.Done():
		}
	}
	return a.p.Load()
}
