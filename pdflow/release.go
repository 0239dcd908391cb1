// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"io"

	"github.com/pdkit/pdkit/connector"
)

// noModel is a model that no engine serves.
const noModel = "pdkit.release-handoff"

// release lets P's blocks go after D has refused the request that was to read them, where D tells P of requests that it
// refuses. D did so now unless it could not even parse the body. So D gets a body that it can parse and refuses, for a
// model that it does not have. D must not read the blocks instead: if D has told P, another prompt may have them by now,
// and D would keep their KV as this prompt's (docs/protocols/nixl.md, recording 60).
func (a *attempt) release(refused *connector.Leg) {
	a.unread = true
	params, ok := refused.Current(connector.ParamsMember)
	if !a.f.traits.RefusalReleases || !ok || a.ctx.Err() != nil {
		return
	}
	leg := connector.NewLeg(a.x.req)
	leg.SetPath(connector.APICompletions.Path())
	leg.SetBody([]byte(`{"model":"` + noModel + `","prompt":[0],"max_tokens":1,"` + connector.ParamsMember + `":` +
		string(params) + `}`))
	for _, h := range refused.Header() {
		leg.SetHeader(h.Name, h.Value)
	}
	a.watch.limit(a.f.limits.Cleanup)
	defer a.watch.relax()
	req, e := a.request(a.ctx, a.s.Decode, leg, &LegOutcome{Leg: LegDecode})
	if e != nil {
		return
	}
	resp, err := a.x.door.send(a.ctx, a, nil, req)
	if err != nil {
		return
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close()
	if a.unread = resp.StatusCode/100 != 4; !a.unread {
		a.f.tel.released.Add(a.x.client, 1, a.f.tel.base)
	}
}
