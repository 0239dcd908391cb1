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

// SessionInfo is a request in flight, for operators.
type SessionInfo struct {
	ID        string        `json:"id"` // of the current attempt; "" before the first
	RequestID string        `json:"requestId"`
	Model     string        `json:"model"`
	Connector string        `json:"connector"`
	Attempt   int           `json:"attempt"`
	Prefill   string        `json:"prefill,omitempty"` // endpoint IDs
	Decode    string        `json:"decode,omitempty"`
	Reason    string        `json:"reason,omitempty"` // why the picker let one engine serve, or two
	Phase     string        `json:"phase"`
	Age       time.Duration `json:"ageNanoseconds"`
	// for how long decode has sent nothing in mid-stream, if that is longer than Timeouts.Idle
	Silent    time.Duration `json:"silentNanoseconds,omitempty"`
	ExpiresAt time.Time     `json:"expiresAt,omitzero"` // end of the KV lease
}

func (x *serving) info() SessionInfo {
	i := SessionInfo{RequestID: x.id, Model: x.model(), Connector: x.f.name, Phase: phaseNames[x.phase.Load()],
		Age: time.Since(x.tel.Start)}
	if a := x.current.Load(); a != nil {
		i.ID, i.Attempt, i.Prefill, i.Decode = a.s.ID, a.s.Attempt, a.s.Prefill.ID, a.s.Decode.ID
		i.Silent, i.Reason = a.silent.For(&a.watch), a.out.Reason
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
