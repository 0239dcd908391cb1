// SPDX-License-Identifier: Apache-2.0

package admit

// Where adaptive limits begin: high, since a limit that is too low refuses what could be served, and one that is too
// high costs latency for the moment that it takes to shrink. 256 is what vLLM runs at once (max_num_seqs).
const (
	firstPrefill = 16
	firstDecode  = 256
	leastLimit   = 2 // one computes while the next one comes
)

const (
	tolerance   = 3     // times the latency of an engine that is not crowded
	queueing    = 1.25  // of a streamed response: its whole time over the time that it would take without waiting
	window      = 10    // samples before the limit moves
	leastSample = 0.001 // seconds: what is shorter is noise
)

// Kinds of latency, each with a reference of its own.
const (
	streamed = iota // until the first byte
	whole           // per token, of a response that is not streamed
)

// sample is what one request tells of an engine.
type sample struct {
	kind  int
	took  float64 // seconds, of the kind
	rest  float64 // seconds that a streamed response went on after its first byte; 0: no stream
	crowd int     // requests in flight when it came, itself included
}

// limiter is the limit of one engine in one role.
type limiter struct {
	limit   float64    // requests in flight; 0: none
	most    float64    // limit never exceeds this; 0: none
	base    [2]float64 // seconds, by kind: the latency of an engine that is not crowded; 0: not known
	scores  float64    // sum over the window: the latency over the greatest one that is good
	targets float64    // sum over the window: how many requests in flight would have had that latency
	n       int        // samples in the window
	good    float64    // samples of good windows since the limit moved
	reached bool       // requests had to go elsewhere, or to wait, since the limit moved
}

func newLimiter(adaptive bool, most, first int) limiter {
	l := limiter{limit: float64(most), most: float64(most)}
	if adaptive && (most == 0 || most > first) {
		l.limit = float64(first)
	}
	return l
}

// learn learns from a request. It returns whether the engine was not crowded.
func (l *limiter) learn(s sample) (uncrowded bool) {
	took := max(s.took, leastSample)
	uncrowded = s.crowd <= max(leastLimit, int(l.limit/8))
	if uncrowded || l.base[s.kind] == 0 {
		l.base[s.kind] = mean(l.base[s.kind], took, 16)
	}
	score := took / l.base[s.kind] / tolerance
	if s.rest > 0 {
		// Of n requests, those that run are n*rest/(rest+waiting): by Little's law, as both sets are left at one rate.
		score = (1 + max(took-l.base[s.kind], 0)/s.rest) / queueing
	}
	l.scores += score
	l.targets += float64(s.crowd) / score
	if l.n++; l.n < window {
		return uncrowded
	}
	switch n := float64(l.n); {
	case l.scores > n:
		l.set(min(l.limit, max(l.targets/n, l.limit/2)))
	case l.reached:
		if l.good += n; l.good >= l.limit { // by then the requests of the last step have ended, and have told
			l.grow()
		}
	}
	l.scores, l.targets, l.n = 0, 0, 0
	return uncrowded
}

// told learns from what an engine says of itself. n of its requests are ours.
func (l *limiter) told(n, running, waiting int) {
	switch {
	case waiting > 0 && running > 0:
		l.set(float64(n) * float64(running) / float64(running+waiting))
	case waiting == 0 && l.reached:
		l.grow()
	}
}

func (l *limiter) grow() { l.set(l.limit + max(1, l.limit/8)) }

func (l *limiter) set(limit float64) {
	if limit = max(limit, leastLimit); l.most > 0 {
		limit = min(limit, l.most)
	}
	l.limit, l.reached, l.good = limit, false, 0
}
