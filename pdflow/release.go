// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// noModel is a model that no engine serves.
const noModel = "pdkit.release-handoff"

// release lets P's blocks go after D has refused the request that was to read them (connector.Ending.RefusalReleases).
// D has told P by itself, unless it could not even parse the body. So D gets a body that it can parse and refuses, for
// a model that it does not have. D must not read the blocks instead: if D has told P, another prompt may have them by
// now, and D would keep their KV as this prompt's (docs/protocols/nixl.md, recording 60).
func (a *attempt) release(refused *connector.Leg) {
	a.unread = true
	params, ok := refused.Current(connector.ParamsMember)
	if !a.f.traits.Ending.RefusalReleases || !ok || a.ctx.Err() != nil {
		return
	}
	a.watch.Limit(a.f.limits.Cleanup)
	defer a.watch.Relax()
	status := a.aside(a.ctx, a.s.Decode, params, contract.Leg(refused).Headers,
		`{"model":"`+noModel+`","prompt":[0],"max_tokens":1,`)
	if a.unread = status/100 != 4; !a.unread {
		a.x.tel.Released()
	}
}

// unblockLimit is how long P may take for the two tokens where Timeouts.Cleanup has no limit.
const unblockLimit = 5 * time.Second

// unblocking returns what ends that P waits for a prefill after both engines have refused a request
// (connector.Ending.RefusalHolds), or nil if P waits for nothing: it has P compute two tokens under the name of the
// request's transfer, and reports whether P did. It is made while the client's body is there, and reads nothing of it
// later.
func (a *attempt) unblocking() func(context.Context) bool {
	d := &a.out.Decode
	if a.detached == nil || d.Status/100 != 4 || !a.refusalHolds(d.Err) {
		return nil
	}
	a.x.header = a.x.header.Clone() // the host's own may be another request's when P refuses late
	ctx, leg := context.WithoutCancel(a.x.life.Base), contract.NewPrefillLeg(a.s.Request, &a.f.traits)
	if a.guard(LegPrefill, "cleanup", func() error { return a.f.conn.Prefill(ctx, a.s, leg) }) != nil {
		return nil
	}
	params, _ := leg.Current(connector.ParamsMember)
	params, header := slices.Clone(params), contract.Leg(leg).Headers
	return func(ctx context.Context) bool {
		limit := a.f.limits.Cleanup
		if limit <= 0 {
			limit = unblockLimit
		}
		ctx, stop := context.WithTimeout(ctx, limit)
		defer stop()
		return a.aside(ctx, a.s.Prefill, params, header,
			`{"prompt":[0,0],"max_tokens":1,"min_tokens":1,`) == http.StatusOK
	}
}

// refusalHolds reports whether decode's refusal has P wait for a prefill. It has not if D could not parse the body.
func (a *attempt) refusalHolds(e *Error) bool {
	unparsed := e != nil && e.engine != nil && e.engine.said != nil &&
		e.engine.said.Type == http.StatusText(http.StatusBadRequest)
	return a.f.traits.Ending.RefusalHolds && !unparsed
}

// refusalGrace is how long decode may take to refuse what P has refused. A busy engine needs that long for a body of
// megabytes; a client waits for it only if decode, unlike P, takes the request.
const refusalGrace = time.Second

// decodesRefusal waits a moment for decode to refuse what P has refused. Cancelled before that, decode would leave P
// waiting for one knows not what.
func (a *attempt) decodesRefusal(decoded <-chan decodeEnd, e *Error) (d decodeEnd, told bool) {
	if !a.f.traits.Ending.RefusalHolds || e.Code != CodePrefillRejected {
		return d, false
	}
	timer := time.NewTimer(refusalGrace)
	defer timer.Stop()
	select {
	case d = <-decoded:
		return d, true
	case <-timer.C:
	case <-a.ctx.Done():
	}
	return d, false
}

// aside sends an engine a completion in place of a leg, with the leg's headers and transfer parameters after the
// members that body begins with. It returns the response's status, 0 if there is none.
func (a *attempt) aside(ctx context.Context, to discovery.Endpoint, params json.RawMessage,
	header []contract.Header, body string) int {
	leg := contract.NewLeg(a.s.Request)
	leg.SetPath(connector.APICompletions.Path())
	leg.SetBody([]byte(body + `"` + connector.ParamsMember + `":` + string(params) + `}`))
	for _, h := range header {
		leg.SetHeader(h.Name, h.Value)
	}
	req, text, e := a.legRequest(ctx, to, leg, &LegOutcome{})
	if e != nil {
		return 0
	}
	defer text.Drop()
	resp, err := a.x.sender.send(ctx, a, nil, req)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close()
	return resp.StatusCode
}
