// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"net/http"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/modelname"
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

// changes returns how each event of decode's response that has mark is changed for the client, nil if none is.
func (a *attempt) changes(sse bool, status int) (change func([]byte) ([]byte, error), mark []byte) {
	fn := a.rewriting(status)
	all := fn != nil
	if status == http.StatusOK && a.correctsUsage() {
		fn, mark = a.withPrefillsCount(fn), cachedMark(a.s.API)
	}
	if status == http.StatusOK && a.mergesMembers(sse) {
		fn, all = a.withPrefillsMembers(fn), true
	}
	if sse && a.asksUsage() && status == http.StatusOK {
		fn, mark = withoutUsage(fn, a.decodeUsage), usageMark
	}
	if a.x.names != nil {
		all = all || fn != nil
		fn, mark = a.withAskedModel(fn), modelname.Mark
	}
	if all {
		mark = nil
	}
	if fn == nil {
		return nil, nil
	}
	return func(data []byte) (out []byte, err error) {
		if e := a.guard(LegDecode, "rewrite", func() error { out, err = fn(data); return err }); e != nil {
			return nil, e
		}
		return out, nil
	}, mark
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
	if a.pEnded != nil && a.parallel.Load() {
		select {
		case <-a.pEnded:
		case <-a.ctx.Done():
		}
	}
	return a.p.Load()
}
