// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"sync"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// engines finds a list's targets by their engine, for requests that name one. It is made when it is asked for the first
// time.
type engines struct {
	once sync.Once
	byID map[string]*list // each has the targets of one engine, and no indexes
}

// of returns the targets of one engine, nil if it has none here.
func (l *list) of(id string) *list {
	l.named.once.Do(func() {
		l.named.byID = make(map[string]*list, l.engines)
		for _, t := range l.targets {
			e := l.named.byID[t.endpoint.ID]
			if e == nil {
				e = &list{engines: 1, position: new(atomic.Uint64)}
				l.named.byID[t.endpoint.ID] = e
			}
			e.targets = append(e.targets, t)
		}
	})
	return l.named.byID[id]
}

// named returns the targets of a list that the request leaves to choose from, and the ID of the engine that it names
// for the leg that is chosen second. single is true if one engine serves the whole request.
func (p *picker) named(l *list, in *pdflow.PickInput, single bool) (first *list, second string) {
	id, second := in.Decode, in.Prefill
	switch {
	case in.Single:
		second = ""
	case single && second != "": // this engine does both
		if id != "" && id != second {
			return nil, ""
		}
		id, second = second, ""
	case !single && p.policy.first == prefillLeg:
		id, second = second, id
	}
	if id != "" {
		l = l.of(id)
	}
	return l, second
}

// rankNamed ranks a target of the leg that is chosen first, if the engine of the other leg is named. That engine is
// taken whatever it has done.
func (q *query) rankNamed(t *target) int {
	if t.peers.of(q.second) == nil {
		return never
	}
	if t.endpoint.ID == q.second { // it serves the whole request if it can be paired with no other engine
		return lonely
	}
	if q.clean {
		return good
	}
	p, d := t.endpoint.ID, q.second
	if t.leg == decodeLeg {
		p, d = d, p
	}
	return max(q.rankAlone(t), q.cooldowns.pair(p, d, q.roll))
}

// notNamed returns why an engine that the request names cannot serve it; nil if it names none.
func (t *table) notNamed(in *pdflow.PickInput, who *pairing) error {
	if t.snap.Version == 0 {
		return nil
	}
	for _, side := range [...]struct {
		id, name string
		role     discovery.Role
	}{{in.Decode, "decode", discovery.RoleDecode}, {in.Prefill, "prefill", discovery.RolePrefill}} {
		if side.id == "" || in.Single && side.role == discovery.RolePrefill {
			continue
		}
		e := find(t.snap, side.id)
		if e == nil || !e.Role.Has(side.role) {
			return notHere(side.name)
		}
		if in.Single && !servesAlone(e, who.serving) {
			return &pdflow.Error{Code: pdflow.CodeUnsupported, Phase: "pick",
				Message: "the decode engine that is to serve this request serves none alone"}
		}
		if e.Phase != discovery.PhaseReady {
			return notNow("the " + side.name + " engine that is to serve this request is not ready")
		}
	}
	if in.Decode == "" && (in.Prefill == "" || in.Single) {
		return nil
	}
	return notNow("no engine is ready that can exchange KV with the one that is to serve this request")
}

func notHere(role string) error {
	return &pdflow.Error{Code: pdflow.CodeNotFound, Phase: "pick", Param: role,
		Message: "the engine that is to serve this request is not here"}
}

func notNow(why string) error {
	return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Phase: "pick", Message: why}
}

// find returns an engine of a snapshot, ready or not; nil if there is none.
func find(snap *discovery.Snapshot, id string) *discovery.Endpoint {
	for i := range snap.Endpoints {
		if e := &snap.Endpoints[i]; e.ID == id {
			return e
		}
	}
	return nil
}

// servesAlone reports whether an engine that can decode may serve a whole request: see [part.candidates].
func servesAlone(e *discovery.Endpoint, serving connector.Serving) bool {
	switch {
	case serving.PairOnly:
		return e.Role.Has(discovery.RoleBoth)
	case serving.PrefillPairOnly:
		return !e.Role.Has(discovery.RolePrefill)
	}
	return true
}
