// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"

	"github.com/pdkit/pdkit/pdflow"
)

// Around is a picker that hands all on to another one, also what that one may know besides: it is a
// [pdflow.EngineNamer], a [pdflow.EngineHealth] and a [pdflow.Preparer], as far as the other one is. A picker that asks
// another one embeds it, and has methods of its own for what it does otherwise. Bind is always one of them, or the flow
// asks the inner picker alone. Make it with [NewAround].
type Around struct{ inner }

type inner = pdflow.Picker

// NewAround returns an Around that hands all on to p.
func NewAround(p pdflow.Picker) Around { return Around{p} }

// NamesEngine asks the inner picker.
func (a Around) NamesEngine(word string) bool {
	n, ok := a.inner.(pdflow.EngineNamer)
	return ok && n.NamesEngine(word)
}

// EngineHealth asks the inner picker.
func (a Around) EngineHealth(id string) (well, known bool) {
	h, ok := a.inner.(pdflow.EngineHealth)
	if !ok {
		return false, false
	}
	return h.EngineHealth(id)
}

// Prepare has the inner picker prepare.
func (a Around) Prepare(ctx context.Context, in *pdflow.PickInput) *pdflow.PickInput {
	if p, ok := a.inner.(pdflow.Preparer); ok {
		return p.Prepare(ctx, in)
	}
	return in
}
