// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"math"
	"time"
)

// PredictedOptions are the settings of [Predicted]. Zero values mean the defaults.
type PredictedOptions struct {
	TTFT, ITL time.Duration // objectives of requests whose class has none; default [DefaultTTFT] and [DefaultITL]
	Chunk     int           // tokens that a step takes at most (vLLM's max_num_batched_tokens); default 2048
	Output    int           // tokens of a usual response here; default 256
}

// The objectives of requests that have none of their own.
const (
	DefaultTTFT = 2 * time.Second
	DefaultITL  = 100 * time.Millisecond
)

const (
	predictedChunk  = 2048
	predictedOutput = 256

	deviationTTFT = 0.25 // relative, of a prediction from fresh and exact figures
	deviationITL  = 0.1
	perSecond     = 0.5  // added for each second of the figures' age, for 4 s at most
	perEstimate   = 0.15 // added where the prompt's tokens are an estimate
	approximate   = 0.75 // of cached tokens that the engine has not told: some are evicted
	weightOfGap   = 0.1  // of a gap that is too long, in the streams that run beside prefill
	busiest       = 0.9  // share of a decode engine's time that prefill takes at most
	weightOfUse   = 0.05
	steepness     = 1.7 // of the logistic that is like a normal distribution
	certain       = 30  // of the logistic's argument, from which on it is 1
	hopeless      = 0.1 // an option with a smaller chance cannot meet the objectives
	leastRetry    = time.Second
	mostRetry     = time.Minute // by then, other engines and other requests are there
	oldestFigure  = 4.0         // seconds
)

// Predicted predicts the TTFT and ITL of each option for each pair of candidates, and takes the option with the best
// chance to meet the objectives, less the harm that it does to the requests that run already. All times are in seconds,
// u = prompt − cached tokens (at least 1; of cached tokens that are not exact three quarters count), Q is QueueTokens,
// and R and Context are those of the requests that generate, and of those that come soon: at most a quarter as many,
// and two.
//
//	s(c)         = (Base + PerRequest·R + PerContext·Context)/(1 − PerPrompt·Prefilled)   a decode step: see [Speed]
//	s'(c)        = the same with this request
//	s"(c)        = the same, and with its prompt among what is prefilled: Prefilled + u/30 s
//	prefill(c)   = ⌈(Q+u)/(Chunk−R)⌉·s(c) + PerPrompt·(Q+u)                 chunked, first come first served
//	moved(c)     = Moving·TokenBytes / Link                                 KV moves first come first served, too
//	fetch(d)     = (prompt − cached at d)·TokenBytes / Link                 d fetches what it has not
//	room(d)      = Output·s'(d)/R · max(Queue, R·(prompt−Free)/Context)     waits for ends; Queue only if Q is 0
//	gap(d, n)    = Base + … + PerPrompt·min(n, Chunk−R)                     a step that has prefill in it
//
//	TTFT split   = max(prefill(p), moved(p), moved(d)) + fetch(d) + room(d) + s'(d) + PerPrompt·min(Q, Chunk−R)
//	TTFT alone   = prefill(d) + room(d)
//	ITL          = s'(d) split, s"(d) alone
//
// The chance to meet an objective o with a prediction t is logistic, F(o,t) = 1/(1 + exp(−1.7·(o−t)/(σ·t))), which is
// within 0.01 of a normal distribution of deviation σ·t. σ is 0.25 for TTFT and 0.1 for ITL, and more for old figures
// and an estimated prompt. The harm is counted in requests that will miss their objective for this one, and a tenth of
// one for a gap in all streams that is too long:
//
//	split        F(TTFT, …)·F(ITL, …) − R·(F(ITL, s(d)) − F(ITL, s'(d))) − work(p) − 0.05·used
//	alone        F(TTFT, …)·F(ITL, …) − R·(F(ITL, s(d)) − F(ITL, s"(d))) − 0.1·(1 − F(ITL, gap(d, u)))
//	             − work(d) − 0.05·used
//
// work is the time that the prompt's prefill takes from requests that are yet to come: one whose tokens are not cached
// here and that takes the whole objective costs one of them. Without it, prompts go to whoever is idle, are computed
// where nobody has cached them, and a fleet that would serve all computes half as much again.
//
//	work(c)      = PerPrompt·u/o
//
// used is which part of the objectives the option uses up, of this request and of those that run beside it. It decides
// between options that all meet them, and between those of which none does:
//
//	used         = TTFT/o + R·(s'(d) − s(d))/o
//
// If no option has a chance above a tenth, the class may be refused, and idle engines would have a better chance, the
// request is refused, until the best option could meet the objectives again. What no engine could ever meet is no
// reason to refuse.
//
// Sources: the linear step and its coefficients are those of BLIS (inference-sim) and Vidur (arXiv:2405.05465), which
// fit such sums to vLLM; chunked prefill's effect on decode steps is Sarathi-Serve's (arXiv:2403.02310), the separation
// of both, and goodput by TTFT and TPOT, DistServe's (arXiv:2401.09670); choosing by predicted TTFT, and refusing by
// it, Mooncake's Conductor (arXiv:2407.00079). The weighing of chances against harm is pdkit's own.
//
// A candidate whose speed is not known is left out. Without any pair or engine left the request is undecided.
func Predicted(o PredictedOptions) Policy {
	p := &predicted{ttft: DefaultTTFT.Seconds(), itl: DefaultITL.Seconds(), chunk: predictedChunk,
		output: predictedOutput}
	if o.TTFT > 0 {
		p.ttft = o.TTFT.Seconds()
	}
	if o.ITL > 0 {
		p.itl = o.ITL.Seconds()
	}
	if o.Chunk > 0 {
		p.chunk = o.Chunk
	}
	if o.Output > 0 {
		p.output = float64(o.Output)
	}
	return p
}

type predicted struct {
	ttft, itl float64
	chunk     int
	output    float64
}

// view is what one engine means to one request, in seconds.
type view struct {
	known   bool
	work    float64 // the cost of its time for the prompt
	alone   bool
	prefill float64 // until its first token, if it prefills here
	arrive  float64 // of the first token, once the KV has come
	fetch   float64 // of the KV that it has not
	room    float64
	itl     float64
	meets   float64  // the chance that ITL is met
	joined  float64  // the cost of one more request that generates
	moved   float64  // when all has moved that moves before: from it, or to it
	here    struct { // where it prefills, too
		itl, meets, cost float64
	}
	spread float64 // added to σ
	cached float64
}

// option is the best option of one action so far.
type option struct {
	score, chance, ttft, itl float64
	prefill, decode          int
	cached                   float64 // at the engine that prefills
}

// Decide: see [Predicted].
func (p *predicted) Decide(in *Input, out *Decision) {
	q := request{predicted: p, in: in, prompt: float64(max(in.Prompt, 1))}
	q.ttft, q.itl = p.ttft, p.itl
	if in.Class.TTFT > 0 {
		q.ttft = in.Class.TTFT.Seconds()
	}
	if in.Class.ITL > 0 {
		q.itl = in.Class.ITL.Seconds()
	}
	split, alone, there := q.options()
	q.choose(&split, &alone, &there, out)
}

// options are the best pair, the best decode engine and the best prefill engine to serve alone.
func (q *request) options() (split, alone, there option) {
	var ps, ds [CandidatesMost]view
	prefills := q.in.Prefill[:min(len(q.in.Prefill), CandidatesMost)]
	decodes := q.in.Decode[:min(len(q.in.Decode), CandidatesMost)]
	for i := range prefills {
		q.look(&prefills[i], false, &ps[i])
	}
	for i := range decodes {
		q.look(&decodes[i], true, &ds[i])
	}
	split, alone, there = none, none, none
	for k, j := 0, start(q.in.Rand, len(decodes)); k < len(decodes); k, j = k+1, j+1 {
		if j == len(decodes) {
			j = 0
		}
		d := &ds[j]
		if !d.known {
			continue
		}
		if d.alone {
			q.alone(d, Any, j, &alone)
		}
		q.pairs(ps[:len(prefills)], d, j, decodes[j].Apart, &split)
	}
	for i := range prefills {
		if ps[i].known && ps[i].alone {
			q.alone(&ps[i], i, Any, &there)
		}
	}
	return split, alone, there
}

// request is one request, with its objectives.
type request struct {
	*predicted
	in        *Input
	prompt    float64
	ttft, itl float64
}

// look computes a view of an engine. What waits at a decode engine and has no prompt tokens to compute waits for
// memory; at a prefill engine it is requests like this one.
func (q *request) look(c *Candidate, decodes bool, v *view) {
	s := &c.Speed
	if !(s.PerPrompt > 0) || c.KV.Total > 0 && q.in.Prompt > c.KV.Total {
		return
	}
	v.known, v.alone, v.cached = true, c.Alone, c.has(q.in.Prompt)
	v.spread = perSecond * min(max(c.Age.Seconds(), 0), oldestFigure)
	if !q.in.Exact {
		v.spread += perEstimate
	}
	running, context := float64(c.Running), float64(c.Context)
	bare := s.step(running, context, 0)
	if c.Coming > 0 { // where more come than that, they wait for prefill, and as many will have ended
		soon := min(float64(c.Coming), 2+running/4)
		running, context = running+soon, context+soon/float64(c.Coming)*float64(c.ComingContext)
	}
	now := s.step(running, context, c.Prefilled)
	v.itl = s.step(running+1, context+q.prompt, c.Prefilled)
	budget := float64(max(q.chunk-c.Running, 1))
	own, ahead := max(q.prompt-v.cached, 1), float64(c.QueueTokens)
	if ahead == 0 && !decodes {
		ahead = float64(c.Queue) * q.prompt
	}
	v.prefill = math.Ceil((ahead+own)/budget)*bare + s.PerPrompt*(ahead+own)
	v.work = s.PerPrompt * own / q.ttft
	v.arrive = v.itl + s.PerPrompt*min(ahead, budget)
	if q.in.Link > 0 {
		perToken := float64(q.in.TokenBytes) / q.in.Link
		v.moved, v.fetch = float64(c.Moving)*perToken, (q.prompt-v.cached)*perToken
	}
	ends := float64(0)
	if c.KV.Total > 0 && context > 0 {
		ends = running * (q.prompt - float64(c.KV.Free)) / context
	}
	if ahead == 0 {
		ends = max(ends, float64(c.Queue))
	}
	if ends > 0 {
		v.room = ends * q.output * v.itl / max(running, 1)
	}
	spread := deviationITL + v.spread
	v.meets = chance(q.itl, v.itl, spread)
	if running > 0 {
		v.joined = running * (chance(q.itl, now, spread) - v.meets + weightOfUse*(v.itl-now)/q.itl)
	}
	if !c.Alone {
		return
	}
	more := c.Prefilled + own/lately.Seconds()
	h := &v.here
	h.itl = s.step(running+1, context+q.prompt, more)
	if h.meets = chance(q.itl, h.itl, spread); running > 0 {
		calm, gap := chance(q.itl, now, spread), bare+s.PerPrompt*min(own, budget)
		h.cost = running*(calm-h.meets+weightOfUse*(h.itl-now)/q.itl) + weightOfGap*(1-chance(q.itl, gap, spread))
	}
}

// chance is the probability that what was predicted as t is o at most: see [Predicted].
func chance(o, t, spread float64) float64 {
	if t <= 0 {
		return 1
	}
	x := steepness * (o - t) / (spread * t)
	if x > certain {
		return 1
	}
	return 1 / (1 + math.Exp(-x))
}

// has is how many of a prompt's tokens an engine is taken to have in its cache; none, if it is nil.
func (c *Candidate) has(prompt int) float64 {
	if c == nil {
		return 0
	}
	n := float64(min(c.Cached, prompt))
	if !c.CachedExact {
		n *= approximate
	}
	return n
}

// start is where a loop over n candidates begins, so that of equal ones each is taken now and then.
func start(random uint64, n int) int {
	if n == 0 {
		return 0
	}
	return int(random >> 1 % uint64(n))
}

var none = option{score: math.Inf(-1), prefill: Any, decode: Any}

func (o *option) found() bool { return !math.IsInf(o.score, -1) }

// alone takes the option that one engine serves, if it is better.
func (q *request) alone(v *view, prefill, decode int, best *option) {
	ttft := v.prefill + v.room
	meets := chance(q.ttft, ttft, deviationTTFT+v.spread) * v.here.meets
	if score := meets - v.here.cost - v.work - weightOfUse*ttft/q.ttft; score > best.score {
		*best = option{score: score, chance: meets, ttft: ttft, itl: v.here.itl, prefill: prefill, decode: decode,
			cached: v.cached}
	}
}

// pairs takes the best prefill engine for a decode engine, if the pair is better. It asks for the chance only of a
// prefill engine that is in any respect better than the last one.
func (q *request) pairs(ps []view, d *view, j int, apart uint64, best *option) {
	if d.meets-d.joined <= best.score {
		return
	}
	var last *view
	for k, i := 0, start(q.in.Rand, len(ps)); k < len(ps); k, i = k+1, i+1 {
		if i == len(ps) {
			i = 0
		}
		p := &ps[i]
		if !p.known || apart>>i&1 != 0 ||
			last != nil && p.prefill >= last.prefill && p.moved >= last.moved && p.spread >= last.spread &&
				p.work >= last.work {
			continue
		}
		last = p
		ttft := max(p.prefill, p.moved, d.moved) + d.fetch + d.arrive + d.room
		meets := chance(q.ttft, ttft, deviationTTFT+max(p.spread, d.spread)) * d.meets
		if score := meets - d.joined - p.work - weightOfUse*ttft/q.ttft; score > best.score {
			*best = option{score: score, chance: meets, ttft: ttft, itl: d.itl, prefill: i, decode: j, cached: p.cached}
		}
	}
}

// choose takes the best of the three options. Of equal ones a pair is the last.
func (q *request) choose(split, alone, there *option, out *Decision) {
	*out = undecided(ReasonUnknown)
	best, action := alone, DecodeAlone
	if there.score > best.score {
		best, action = there, PrefillAlone
	}
	if split.score > best.score {
		best, action = split, Split
	}
	if !best.found() {
		return
	}
	out.TTFT, out.ITL = seconds(best.ttft), seconds(best.itl)
	if q.in.Class.Refusable && max(split.chance, alone.chance, there.chance) < hopeless && q.idleMeet() {
		out.Action, out.Reason = Refuse, ReasonObjectives
		soonest := min(split.orNever(), alone.orNever(), there.orNever())
		out.RetryAfter = min(max(seconds(soonest-q.ttft), leastRetry), mostRetry)
		return
	}
	out.Action, out.Prefill, out.Decode = action, best.prefill, best.decode
	out.Reason = reason(action, best, split, alone, there)
}

// idleMeet reports whether the engines could meet the objectives if they had nothing else to do.
func (q *request) idleMeet() bool {
	var ps, ds [CandidatesMost]Candidate
	in := *q.in
	in.Prefill, in.Decode = idle(in.Prefill, &ps), idle(in.Decode, &ds)
	at := *q
	at.in = &in
	split, alone, there := at.options()
	return max(split.chance, alone.chance, there.chance) >= hopeless
}

func idle(all []Candidate, as *[CandidatesMost]Candidate) []Candidate {
	n := min(len(all), len(as))
	for i := range n {
		c := &all[i]
		as[i] = Candidate{KV: Memory{Free: c.KV.Total, Total: c.KV.Total}, Speed: c.Speed, Cached: c.Cached,
			CachedExact: c.CachedExact, Alone: c.Alone, Apart: c.Apart}
	}
	return as[:n]
}

// reason says why an option is better than that of the other kind, with one engine or two.
func reason(action Action, best, split, alone, there *option) string {
	other := split
	if action == Split {
		if other = alone; there.score > alone.score {
			other = there
		}
	}
	switch {
	case !other.found():
		return ReasonOnly
	case best.chance < other.chance || best.ttft >= other.ttft:
		return ReasonInterference
	case action != Split && best.cached > other.cached:
		return ReasonCached
	}
	return ReasonFaster
}

func (o *option) orNever() float64 {
	if !o.found() {
		return math.Inf(1)
	}
	return o.ttft
}

// secondsMost keeps a prediction within a time.Duration: some years.
const secondsMost = 1e8

func seconds(s float64) time.Duration {
	return time.Duration(max(0, min(s, secondsMost)) * float64(time.Second))
}
