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
	spare       = 1. / 3 // of the requests that run: how many may wait at the engine, so that it never idles
	leastSpare  = 2
	window      = 10    // samples before the limit moves, or as many as the limit, up to twice that
	leastSample = 0.001 // seconds: what is shorter is noise
	fewer       = 0.75  // of the requests in flight: then the latency must be shorter, or the engine is slower
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
	limit float64    // requests in flight; 0: none
	most  float64    // limit never exceeds this; 0: none
	base  [2]average // seconds, by kind: the latency of an engine that is not crowded

	seen    readings // sums over the window
	n       int      // samples in the window
	good    int      // samples of good windows since the limit moved
	found   bool     // the limit has been too high, so now it is about right; before, it grows fast
	reached bool     // requests had to go elsewhere, or to wait, since the limit moved
	crowded readings // when the limit began to shrink; zero: it has not since the last good window
}

// readings are means over requests, or their sums.
type readings struct {
	crowd  float64 // requests in flight
	wanted float64 // how many in flight would keep the engine busy
	slow   float64 // latency, as a multiple of base
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
	took, base, few := max(s.took, leastSample), &l.base[s.kind], l.limit/8
	if l.found {
		few = l.limit / 2
	}
	uncrowded = s.crowd <= max(leastLimit, int(few))
	if uncrowded || base.n == 0 {
		base.add(took, 16)
	}
	if float64(s.crowd-1) >= l.limit {
		return uncrowded // it came before the limit shrank, and tells nothing of what is in flight now
	}
	slow := max(1, took/base.mean)
	if s.rest > 0 {
		slow = 1 + max(took-base.mean, 0)/s.rest
	}
	// Of n requests in flight n/slow run and the others wait: by Little's law, as both sets are left at one rate.
	crowd := float64(s.crowd)
	running := crowd / slow
	l.seen.crowd += crowd
	l.seen.wanted += running + max(leastSpare, spare*running)
	l.seen.slow += slow
	if l.n++; l.n >= min(max(window, int(l.limit)), 2*window) {
		l.move(s.kind)
		l.seen, l.n = readings{}, 0
	}
	return uncrowded
}

// move sets the limit at the end of a window.
func (l *limiter) move(kind int) {
	n := float64(l.n)
	now, was := readings{l.seen.crowd / n, l.seen.wanted / n, l.seen.slow / n}, l.crowded
	share := now.crowd / max(was.crowd, 1)
	switch {
	case now.crowd <= now.wanted:
		l.crowded = readings{}
		l.widen(now.crowd)
	case was.crowd > 0 && share < fewer && now.slow > was.slow*(1+share)/2:
		// With fewer requests the latency is as long: they do not wait, the engine has become slower. If the limit
		// went on shrinking, the engine would idle.
		l.base[kind].mean *= now.slow
		l.crowded = readings{}
		l.set(was.crowd)
	default:
		if was.crowd == 0 || share < fewer {
			l.crowded = now
		}
		l.found = true
		l.set(min(l.limit, max(now.wanted, now.crowd/2)))
	}
}

// widen lets the limit grow after a good window, if requests have reached it: fast until it has been too high once.
func (l *limiter) widen(crowd float64) {
	switch {
	case !l.reached:
	case l.found:
		if l.good += l.n; float64(l.good) >= l.limit { // by then the requests of the last step have ended
			l.grow()
		}
	case crowd > l.limit/2: // fewer tell nothing of so many
		l.set(l.limit + float64(l.n))
	}
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
