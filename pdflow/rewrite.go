// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// withheldMember is the member of D's responses that clients must not see, nil if there is none. vLLM's D may return
// kv_transfer_params to every connector that sends them.
func withheldMember(t *connector.Traits) *sse.Member {
	switch {
	case t.Handoff.Member != "":
		return sse.MemberAt(t.Handoff.Member)
	case slices.Contains(t.Members, connector.ParamsMember):
		return sse.MemberAt(connector.ParamsMember)
	}
	return nil
}

// withhold keeps from the client where D has its KV, and what a stream's errors tell of the engines. length is the
// response's in bytes, -1 if it was not announced.
func (b *Body) withhold(length int64) {
	if b.sse {
		b.faults.Watch(b.src, b.cleanFault)
		b.src = &b.faults
	}
	m := b.a.f.withheld
	if m == nil {
		return
	}
	depth := m.Depth
	if b.sse && b.a.x.req.API == connector.APIResponses {
		depth++ // a stream's last event has the response
	}
	b.withheld.Withhold(b.src, m, depth, b.sse, length)
	b.src = &b.withheld
}

// cleanFault makes an error within a stream what it would be without one.
func (b *Body) cleanFault(data []byte) ([]byte, error) {
	if !verdict.IsError(data) {
		return data, nil
	}
	return errorObject(b.a.x.req.API, b.erroneous(data)), nil
}

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
