// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"slices"
	"time"
)

// Sessions lists what is in flight, the newest first.
func (f *Flow) Sessions() []SessionInfo {
	infos := make([]SessionInfo, 0, f.live.Count())
	f.live.Each(func(x *serving) { infos = append(infos, x.info()) })
	slices.SortFunc(infos, func(a, b SessionInfo) int { return cmp.Compare(a.Age, b.Age) })
	return infos
}

func (x *serving) info() SessionInfo {
	i := SessionInfo{RequestID: x.id, Model: x.model, Connector: x.f.name, Phase: phaseNames[x.phase.Load()],
		Age: time.Since(x.tel.Start)}
	if a := x.current.Load(); a != nil {
		i.ID, i.Attempt, i.Prefill, i.Decode = a.s.ID, a.s.Attempt, a.s.Prefill.ID, a.s.Decode.ID
		if exp := a.expires.Load(); exp != 0 {
			i.ExpiresAt = time.Unix(0, exp)
		}
	}
	return i
}

// The phases of a request, for operators.
const (
	phasePick uint32 = iota
	phasePrepare
	phaseEncode
	phasePrefill
	phaseEvent
	phaseDecode
	phaseStream
	phaseBackoff
)

var phaseNames = [...]string{"pick", "prepare", "encode", "prefill", "event", "decode", "stream", "backoff"}
