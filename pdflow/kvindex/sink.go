// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"time"

	"github.com/pdkit/pdkit/discovery/kvevents"
)

// Sink returns the index as what takes the events that package kvevents reads.
func (x *Index) Sink() kvevents.Sink { return sink{x} }

type sink struct{ x *Index }

func (s sink) Apply(src kvevents.Source, seq uint64, payload []byte, now time.Time) (replay bool, err error) {
	return s.x.Apply(Source(src), seq, payload, now)
}

func (s sink) ReplayFrom(src kvevents.Source) (from uint64, needed bool) {
	return s.x.ReplayFrom(Source(src))
}

func (s sink) Replayed(src kvevents.Source, seq uint64, payload []byte, now time.Time) error {
	return s.x.Replayed(Source(src), seq, payload, now)
}

func (s sink) ReplayEnd(src kvevents.Source, whole bool, now time.Time) (again bool) {
	return s.x.ReplayEnd(Source(src), whole, now)
}

func (s sink) Lost(src kvevents.Source, now time.Time) { s.x.Lost(Source(src), now) }

func (s sink) Gone(src kvevents.Source, now time.Time) { s.x.Gone(Source(src), now) }

func (s sink) Forget(engine string) { s.x.Forget(engine) }
