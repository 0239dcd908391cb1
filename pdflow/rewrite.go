// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"net/http"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/sse"
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

// changes returns how each event of decode's response is changed for the client, nil if it is not.
func (a *attempt) changes(sse bool, status int) func([]byte) ([]byte, error) {
	fn := a.rewriting(status)
	if sse && a.asksUsage() && status == http.StatusOK {
		fn = withoutUsage(fn, a.decodeUsage)
	}
	if fn == nil {
		return nil
	}
	return func(data []byte) (out []byte, err error) {
		if e := a.guard(LegDecode, "rewrite", func() error { out, err = fn(data); return err }); e != nil {
			return nil, e
		}
		return out, nil
	}
}

// rewriting returns how the connector changes this response of decode's, nil if it does not.
func (a *attempt) rewriting(status int) (fn func([]byte) ([]byte, error)) {
	if a.f.rewriter == nil || !a.twoLegs() || status != 200 {
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
