// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"net/http"

	"github.com/pdkit/pdkit/pdflow/internal/live"
)

// mayBeSilent reports whether a phase that has run out of time goes on all the same, as the silence of an engine that
// is well: see live.Silence. Its caller is the watch, whose owner's end waits for it.
func (a *attempt) mayBeSilent() bool {
	yes, result := a.silent.GoesOn(a.ctx, &a.watch, a.f.limits.Idle, a.f.limits.Silence, a.decodeWell)
	if result != "" {
		a.x.tel.Silent(result)
	}
	return yes
}

// decodeWell asks how the decode engine is: the picker, and where that does not know, the engine.
func (a *attempt) decodeWell() bool {
	d := &a.s.Decode
	if h, ok := a.f.picker.(EngineHealth); ok {
		if well, known := h.EngineHealth(d.ID); known {
			return well
		}
	}
	by := a.x.sender
	if by.steps != nil { // who sends the legs waits for this response, and takes no further step
		by = a.f.sender
	}
	return a.f.probes.Well(a.ctx, d.ID, func(ctx context.Context) bool {
		return live.Healthy(ctx, d.URL, a.f.limits.HealthCheck, func(r *http.Request) (*http.Response, error) {
			a.x.fillAbsent(r)
			return by.send(r.Context(), a, nil, r)
		})
	})
}
