// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"sync/atomic"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// table is what pickers derive from one snapshot: made once per snapshot, so that a pick does not depend on the number
// of endpoints.
type table struct {
	snap    *discovery.Snapshot
	decodes []slot // ready decode engines whose group has a ready prefill engine
	singles []*discovery.Endpoint
	boths   []*discovery.Endpoint
	encodes []*discovery.Endpoint
	hasBoth bool // an engine of role both is known, ready or not
	hasP    bool // a ready prefill engine is there, if not in a group with a decode engine
}

// slot is a decode engine and the prefill engines that it can meet.
type slot struct {
	decode *discovery.Endpoint
	group  *group
}

type group struct {
	prefills []*discovery.Endpoint
	next     atomic.Uint64
}

// newTable sorts a snapshot's engines. apart keeps those of role both out of pairs.
func newTable(snap *discovery.Snapshot, apart bool) *table {
	t := &table{snap: snap}
	groups := map[string]*group{}
	for i := range snap.Endpoints {
		e := &snap.Endpoints[i]
		both := e.Role.Has(discovery.RoleBoth)
		t.hasBoth = t.hasBoth || both
		if e.Phase != discovery.PhaseReady || e.URL == nil {
			continue
		}
		if pairs := !both || !apart; pairs && e.Role.Has(discovery.RolePrefill) {
			g := groups[e.Group]
			if g == nil {
				g = &group{}
				groups[e.Group] = g
			}
			g.prefills = append(g.prefills, e)
			t.hasP = true
		}
		if e.Role.Has(discovery.RoleDecode) {
			t.singles = append(t.singles, e)
		}
		if both {
			t.boths = append(t.boths, e)
		}
		if e.Role.Has(discovery.RoleEncode) {
			t.encodes = append(t.encodes, e)
		}
	}
	for _, e := range t.singles {
		if g := groups[e.Group]; g != nil && !(apart && e.Role.Has(discovery.RoleBoth)) {
			t.decodes = append(t.decodes, slot{e, g})
		}
	}
	return t
}

// nobody says why no engine was found.
func (t *table) nobody(in *pdflow.PickInput) error {
	switch {
	case !in.Single || !in.Both || len(t.snap.Endpoints) == 0:
		return t.notReady(in.Single)
	case t.hasBoth:
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no engine that serves alone is ready"}
	}
	return &pdflow.Error{Code: pdflow.CodeUnsupported, Message: "no engine here serves alone"}
}

// notReady says which role is missing.
func (t *table) notReady(single bool) error {
	msg := "no prefill and decode engines of one group are ready"
	switch {
	case len(t.singles) == 0 && (single || t.hasP):
		msg = "no decode engine is ready"
	case len(t.singles) == 0:
		msg = "no engine is ready"
	case !t.hasP:
		msg = "no prefill engine is ready"
	}
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: msg}
}
