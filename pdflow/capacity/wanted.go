// SPDX-License-Identifier: Apache-2.0

package capacity

import (
	"cmp"
	"math"
	"time"

	"github.com/pdkit/pdkit/discovery"
)

// judge completes a role's figures.
func (m *Meter) judge(now time.Time, role discovery.Role, s *sum) {
	r := m.roles[role]
	s.Speed = cmp.Or(m.o.Speed[role], r.speed)
	if s.requests > 0 {
		s.Backlog = float64(s.Waiting) * s.Throughput / s.requests
	}
	usage := 0.0
	if s.Told > 0 {
		usage = s.usage / float64(s.Told)
		s.Saturation = usage
		if s.Speed > 0 {
			s.Saturation = max(usage, s.Throughput/(s.Speed*float64(s.Told)))
		}
	}
	n, why := m.wanted(s, usage, m.target(role))
	s.Wanted, s.Reason = r.hold(now, m.o.Down, n, why, s.Engines)
}

func (m *Meter) target(role discovery.Role) float64 {
	if m.o.Target == 0 && role == discovery.RolePrefill {
		return 0.65
	}
	return cmp.Or(m.o.Target, 0.85)
}

// wanted is how many engines the figures ask for, before any is held. What ready engines that have not told might say
// is taken to be as much as the others. Engines that are loading the model serve nothing yet: else each of them would
// ask for more.
func (m *Meter) wanted(s *sum, usage, target float64) (int, Reason) {
	if s.Told == 0 {
		return s.Engines, Unknown
	}
	all := max(1, float64(s.ready)/float64(s.Told))
	most, why := all*usage*float64(s.Told)/target, Memory
	if s.Speed > 0 {
		one := s.Speed * target
		if n := all * s.Throughput / one; n > most {
			most, why = n, Throughput
		}
		if n := all * (s.Throughput + s.Backlog/m.o.Drain.Seconds()) / one; s.Backlog > 0 && n > most {
			most, why = n, Backlog
		}
	} else if n := float64(max(s.ready, s.Told) + 1); s.Waiting > 0 && n > most {
		most, why = n, Waiting
	}
	if math.Abs(most-float64(s.Engines)) <= m.o.Tolerance*float64(s.Engines) {
		return s.Engines, Tolerated
	}
	return max(1, int(math.Ceil(most-1e-9))), why
}

// hold returns the most that was wanted within down, so that a pause of the load takes no engine away. What was wanted
// while there were more engines than now is no reason for more than there are.
func (r *role) hold(now time.Time, down time.Duration, n int, why Reason, engines int) (int, Reason) {
	for len(r.wanted) > 0 && now.Sub(r.wanted[0].at).Abs() > down { // long ago, or the clock has gone back
		r.wanted = r.wanted[1:]
	}
	for len(r.wanted) > 0 && r.wanted[len(r.wanted)-1].n <= n {
		r.wanted = r.wanted[:len(r.wanted)-1]
	}
	r.wanted = append(r.wanted, wish{now, n})
	if held := min(r.wanted[0].n, max(engines, n)); held > n {
		return held, Held
	}
	return n, why
}
