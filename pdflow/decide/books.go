// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/inflight"
)

const (
	prefillRole = iota
	decodeRole
)

const (
	loadMost    = 2 * time.Second  // an older load of an engine is worse than none: docs/herding.md
	forgetAfter = 10 * time.Minute // without requests, an engine may be forgotten
	// Where the host tells no speeds, an engine that has taught nothing for as long is taken to be like the fleet: else
	// one that was slow once would get no request any more, and never be known to be fast again.
	tryAgain = 2 * time.Minute
)

// books are what the picker knows of engines: what it has sent to each, and how fast each was.
type books struct {
	began     time.Time // times of engines are after it: a clock that is set does not change them
	hostTells bool      // the speeds of engines
	mu        sync.RWMutex
	engines   map[string]*engine

	learning sync.Mutex
	fleet    engineLines // of all engines, for one of which too little is known
	transfer ratio       // seconds after prefill, by tokens that decode fetched
	errors   [2]meanError
	others   [2]inflight.Fleet // requests of others at an engine, by role
	told     [3]told           // of prefill, of ITL and of transfers, by the host's speeds
	ledger   ledger

	works, prompts usual // tokens that prefill computes of a request, and tokens of a prompt
}

// ledger is what was learnt of the fleet, as decisions read it.
type ledger struct {
	speed     speed
	perToken  atomic.Uint64 // seconds of transfer, a float64
	scales    scales
	settled   atomic.Uint64 // Input.Link of decisions that are recorded, a float64
	isDubious atomic.Bool
}

// engine is one engine. Its counters are of what this picker has sent.
type engine struct {
	prefilling atomic.Int64 // prompt tokens whose prefill leg runs
	prefills   atomic.Int64
	running    atomic.Int64 // requests that have it as their decode engine, and whose prefill leg does not run
	context    atomic.Int64 // tokens of their prompts
	coming     atomic.Int64 // requests that have it as their decode engine, and whose prefill leg runs
	arriving   atomic.Int64 // tokens of their prompts
	unsent     atomic.Int64 // tokens of KV that will move from it, or to it, when a prefill leg has ended
	// when the KV of prefill legs that have ended will have moved: see books.clock
	movedUntil atomic.Int64
	beside     rate // of prompt tokens that it computes for requests that it serves alone
	// when the prefill of requests that it serves alone will be over: no report tells
	busyUntil atomic.Int64
	used      atomic.Int64
	taught    atomic.Int64    // when it last taught how fast it is
	here      inflight.Engine // requests that it prefills or generates for
	speed     speed
	settled   speed       // that decisions are made on, where they are recorded
	lines     engineLines // books.learning is held
}

// speed is a Speed that is read while it changes.
type speed [4]atomic.Uint64

func (s *speed) store(v Speed) {
	for i, x := range [4]float64{v.Base, v.PerRequest, v.PerContext, v.PerPrompt} {
		s[i].Store(math.Float64bits(x))
	}
}

func (s *speed) load() Speed {
	at := func(i int) float64 { return math.Float64frombits(s[i].Load()) }
	return Speed{at(0), at(1), at(2), at(3)}
}

func (b *books) init(o *Options) {
	b.engines, b.began, b.hostTells = map[string]*engine{}, o.Now(), o.Engine != nil
	if b.began.IsZero() { // a simulation that has not begun
		b.began = time.Unix(0, 0)
	}
}

// clock returns a time as nanoseconds.
func (b *books) clock(now time.Time) int64 { return int64(now.Sub(b.began)) }

func (b *books) engine(id string, now time.Time) *engine {
	b.mu.RLock()
	e := b.engines[id]
	b.mu.RUnlock()
	if e != nil {
		return e
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if e = b.engines[id]; e != nil {
		return e
	}
	for old, x := range b.engines { // engines come and go under new IDs
		if x.prefills.Load() == 0 && x.running.Load() == 0 && b.clock(now)-x.used.Load() > int64(forgetAfter) {
			delete(b.engines, old)
		}
	}
	e = &engine{}
	e.used.Store(b.clock(now))
	b.engines[id] = e
	return e
}

// figures fills what is known of an engine in a role.
func (b *books) figures(o *Options, at *discovery.Endpoint, role int, in *Input, c *Candidate, now time.Time) {
	e := b.engine(at.ID, now)
	*c = Candidate{Running: int(max(0, e.running.Load())), Context: int(max(0, e.context.Load())),
		Coming: int(max(0, e.coming.Load())), ComingContext: int(max(0, e.arriving.Load())),
		Prefilled: e.beside.at(now)}
	c.Speed = e.known(b, now)
	moving := 0
	if left := time.Duration(e.movedUntil.Load() - b.clock(now)); left > 0 && in.TokenBytes > 0 && in.Link > 0 {
		moving = int(left.Seconds() * in.Link / float64(in.TokenBytes))
	}
	c.Moving = int(max(0, e.unsent.Load())) + moving
	total := 0
	if o.Engine != nil {
		f := o.Engine(at)
		if f.Speed.PerPrompt > 0 {
			c.Speed = b.ledger.scales.of(f.Speed)
		}
		total = f.KVTokens
	}
	if o.Recorder != nil {
		e.settled.settle(&c.Speed)
	}
	sent := int(e.prefilling.Load())
	if ahead := time.Duration(e.busyUntil.Load() - b.clock(now)); ahead > 0 && c.Speed.PerPrompt > 0 {
		sent += int(ahead.Seconds() / c.Speed.PerPrompt)
	}
	c.QueueTokens = sent
	if o.Load == nil {
		return
	}
	l := o.Load(at.ID)
	age := now.Sub(l.At)
	if age > loadMost {
		l = inspect.Load{}
	}
	x, known := b.others[role].Others(&e.here, l.Running+l.Waiting, l.At, now)
	if known { // its own requests are known now
		c.Age = time.Duration(x / (x + float64(max(c.Running, 1))) * float64(max(age, 0)))
		if total > 0 {
			c.KV = Memory{Free: int((1 - l.KVUsage) * float64(total)), Total: total}
		}
	}
	others := int(x + 0.5)
	if role == prefillRole { // what others have sent is taken to be like what this gateway sends
		c.QueueTokens += others * b.works.or(in.Prompt)
		c.Moving += others * b.prompts.or(in.Prompt)
		// What it holds is what it computes and what is yet to be fetched, whoever has sent it.
		if known && at.Role == discovery.RolePrefill {
			c.Moving = max(c.Moving, c.KV.Total-c.KV.Free-c.Context)
		}
		return
	}
	mean := b.prompts.or(in.Prompt)
	if c.Running > 0 {
		mean = c.Context / c.Running
	}
	if known { // it has said so of a time before: more or fewer are there now
		since := c.Running + others - l.Running - l.Waiting
		c.Queue = max(0, l.Queued()+min(0, since))
		c.KV.Free = max(0, c.KV.Free-max(0, since)*mean)
		c.Moving += max(0, l.Fetching*mean-moving)
	}
	if others > 0 {
		c.Context += others * mean
		c.Prefilled *= float64(c.Running+others) / float64(max(c.Running, 1))
		c.Running += others
	}
}

// usual is a mean of tokens, of about the last hundred requests.
type usual struct{ bits atomic.Uint64 }

func (u *usual) add(tokens int64) {
	for {
		was := u.bits.Load()
		mean := math.Float64frombits(was)
		if was == 0 {
			mean = float64(tokens)
		}
		mean += (float64(tokens) - mean) / 64
		if u.bits.CompareAndSwap(was, math.Float64bits(mean)) {
			return
		}
	}
}

// or is the mean, or else what is given.
func (u *usual) or(tokens int) int {
	if bits := u.bits.Load(); bits != 0 {
		return int(math.Float64frombits(bits))
	}
	return tokens
}

// linkScale is the place of transfers in scales, behind the roles.
const linkScale = decodeRole + 1

// scales are by how much longer prefill, decode's steps and transfers take than the host has said; 0 is as long.
type scales [3]atomic.Uint64

func (s *scales) at(i int) float64 {
	if bits := s[i].Load(); bits != 0 {
		return math.Float64frombits(bits)
	}
	return 1
}

func (s *scales) of(v Speed) Speed {
	step := s.at(decodeRole)
	return Speed{Base: v.Base * step, PerRequest: v.PerRequest * step, PerContext: v.PerContext * step,
		PerPrompt: v.PerPrompt * s.at(prefillRole)}
}

// told compares what the host's speeds say with what came.
type told struct{ n, said, came float64 }

const (
	scaleMost     = 8    // times; more is no error of the speeds
	shortTransfer = 0.05 // seconds
)

// add returns by how much longer it takes, once that is known.
func (t *told) add(said, came float64) (scale float64, ok bool) {
	t.n, t.said, t.came = t.n*keeps+1, t.said*keeps+said, t.came*keeps+came
	return min(scaleMost, max(1/float64(scaleMost), t.came/t.said)), t.n >= leastSeen*keeps*keeps*keeps
}

// rate is how much comes in a second, of which later seconds count more.
type rate struct {
	mu   sync.Mutex
	last time.Time
	sum  float64
}

// lately is the time after which a rate counts e times less.
const lately = 30 * time.Second

func (r *rate) add(x float64, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum, r.last = r.decayed(now)+x, now
}

// takeBack takes back what was added before.
func (r *rate) takeBack(x float64, added, now time.Time) {
	x *= math.Exp(-max(0, now.Sub(added).Seconds()) / lately.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sum, r.last = max(0, r.decayed(now)-x), now
}

func (r *rate) decayed(now time.Time) float64 {
	if r.sum == 0 {
		return 0
	}
	return r.sum * math.Exp(-max(0, now.Sub(r.last).Seconds())/lately.Seconds())
}

func (r *rate) at(now time.Time) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.decayed(now) / lately.Seconds()
}

// move takes note that KV begins to move now, and returns when it will have moved.
func (e *engine) move(tokens int64, perToken float64, now int64) int64 {
	e.unsent.Add(-tokens)
	takes := int64(float64(tokens) * perToken * float64(time.Second))
	for {
		until := e.movedUntil.Load()
		if then := max(until, now) + takes; e.movedUntil.CompareAndSwap(until, then) {
			return then
		}
	}
}

// isOld reports whether what was learnt then says nothing any more.
func (b *books) isOld(then, now int64) bool { return !b.hostTells && now-then > int64(tryAgain) }

// known is an engine's speed. What it lacks is the fleet's.
func (e *engine) known(b *books, now time.Time) Speed {
	all := b.ledger.speed.load()
	if b.isOld(e.taught.Load(), b.clock(now)) {
		return all
	}
	s := e.speed.load()
	if s.PerPrompt <= 0 {
		s.PerPrompt = all.PerPrompt
	}
	if s.Base <= 0 && s.PerRequest <= 0 {
		s.Base, s.PerRequest = all.Base, all.PerRequest
	}
	return s
}

// link fills in what transfers take, if that was learnt.
func (b *books) link(in *Input) {
	if in.Link > 0 && in.TokenBytes > 0 {
		in.Link /= b.ledger.scales.at(linkScale)
		return
	}
	if perToken := math.Float64frombits(b.ledger.perToken.Load()); perToken > 0 {
		in.TokenBytes, in.Link = 1, 1/perToken
	}
}

// doubtful reports whether predictions were so wrong lately that they count for nothing.
func (b *books) doubtful() bool { return b.ledger.isDubious.Load() }

// engineLines are what an engine's requests have told.
type engineLines struct {
	prefill line // seconds by prompt tokens, with those before them
	step    line // seconds between two tokens, by requests that generate
}

// speed is what the lines say. A prefill leg has its overhead in it, which belongs to the engine's step where no step
// is known.
func (l *engineLines) speed() Speed {
	var s Speed
	if base, per, ok := l.step.fit(); ok {
		s.Base, s.PerRequest = base, per
	}
	if base, per, ok := l.prefill.fit(); ok {
		if per <= 0 && l.prefill.x > 0 {
			base, per = 0, l.prefill.y/l.prefill.x
		}
		s.PerPrompt = per
		if s.Base <= 0 {
			s.Base = base
		}
	}
	return s
}

const (
	keeps     = 0.98 // of each sum at the next sample: about 50 samples count
	leastSeen = 4    // samples
	// A sample is at most so many times what the others say, so that a request that hung for minutes is not the speed
	// of the next hundred. What has really become slower is followed all the same, in a few samples more.
	outlier = 32
)

// line is a line through samples, of which later ones count more.
type line struct{ n, x, y, xx, xy float64 }

func (l *line) add(x, y float64) {
	if base, per, ok := l.fit(); ok && base+per*x > 0 {
		y = min(y, outlier*(base+per*x))
	}
	l.n, l.x, l.y = l.n*keeps+1, l.x*keeps+x, l.y*keeps+y
	l.xx, l.xy = l.xx*keeps+x*x, l.xy*keeps+x*y
}

// fit returns the line y = base + per·x with neither below 0. Samples that are all alike give a level line.
func (l *line) fit() (base, per float64, ok bool) {
	if l.n < leastSeen*keeps*keeps*keeps {
		return 0, 0, false
	}
	mx, my := l.x/l.n, l.y/l.n
	if spread := l.xx/l.n - mx*mx; spread > 0.01*mx*mx && spread > 0 {
		per = max(0, (l.xy/l.n-mx*my)/spread)
	}
	if base = my - per*mx; base < 0 {
		base, per = 0, my/mx
	}
	return base, per, true
}

// ratio is a line through zero.
type ratio struct{ n, xx, xy float64 }

func (r *ratio) add(x, y float64) {
	if said := r.xy * x; r.n >= leastSeen-1 && said > 0 {
		y = min(y, outlier*said/r.xx)
	}
	r.n, r.xx, r.xy = r.n*keeps+1, r.xx*keeps+x*x, r.xy*keeps+x*y
}

// meanError is the mean relative error of predictions: 1 is twice or half of what came.
type meanError struct {
	n, sum float64
	at     int64 // of the last one
}

func (m *meanError) add(predicted, came float64, at int64) {
	wrong := math.Abs(predicted-came) / max(min(predicted, came), leastTime)
	m.n, m.sum, m.at = m.n*keeps+1, m.sum*keeps+min(wrong, mostWrong), at
}

func (m *meanError) mean() float64 {
	if m.n == 0 {
		return 0
	}
	return m.sum / m.n
}

const (
	leastTime     = 1e-4 // seconds, of which a prediction is wrong by so many times
	mostWrong     = 10   // a prediction that is wrong by more counts as this: one of them says nothing of the next
	leastCompared = 20   // predictions, before they may be given up
	trustAgain    = 0.8  // of the bound
)

// seen is what one attempt has told.
type seen struct {
	prefill, decode *engine
	alone           bool
	crowd           float64 // requests at the decode engine, this one included
	work            float64 // prompt tokens to compute, with those before them
	fetched         float64 // tokens that decode had to fetch
	ttft, itl       float64 // predicted, in seconds; 0: nothing
	prefillTook     float64 // 0: not known
	saidPrefill     float64 // what the host's speed says of that
	saidITL         float64 // what it says of ITL
	saidTransfer    float64 // what its link says of the time from prefill's end until the KV is there
	afterPrefill    float64 // from prefill's end to the first token; 0: not known
	ttftCame        float64 // 0: not known
	itlCame         float64 // 0: not known
}

// learn takes over what an attempt has told.
func (b *books) learn(s *seen, bound float64, now time.Time) {
	b.learning.Lock()
	defer b.learning.Unlock()
	clock := b.clock(now)
	add := func(e *engine, take func(*engineLines)) {
		if b.isOld(e.taught.Swap(clock), clock) {
			e.lines = engineLines{}
		}
		take(&e.lines)
		e.speed.store(e.lines.speed())
		take(&b.fleet)
	}
	switch {
	case s.alone && s.ttftCame > 0:
		add(s.decode, func(l *engineLines) { l.prefill.add(s.work, s.ttftCame) })
	case !s.alone && s.prefillTook > 0:
		add(s.prefill, func(l *engineLines) { l.prefill.add(s.work, s.prefillTook) })
	}
	if s.itlCame > 0 {
		add(s.decode, func(l *engineLines) { l.step.add(s.crowd, s.itlCame) })
	}
	b.ledger.speed.store(b.fleet.speed())
	step := s.decode.known(b, now)
	transfer := max(0, s.afterPrefill-step.Base-step.PerRequest*s.crowd)
	if s.afterPrefill > 0 && s.fetched > 0 {
		b.transfer.add(s.fetched, transfer)
		if b.transfer.n >= leastSeen-1 {
			b.ledger.perToken.Store(math.Float64bits(b.transfer.xy / b.transfer.xx))
		}
	}
	if s.saidTransfer <= 0 {
		transfer = 0
	}
	said := [3][2]float64{{s.saidPrefill, s.prefillTook}, {s.saidITL, s.itlCame},
		{s.saidTransfer + shortTransfer, transfer}}
	for i, x := range said {
		if x[0] > 0 && x[1] > 0 {
			scale, ok := b.told[i].add(x[0], x[1])
			if i == linkScale { // what a short transfer takes longer is no speed of the link
				scale = max(1, scale)
			}
			if ok {
				b.ledger.scales[i].Store(math.Float64bits(scale))
			}
		}
	}
	for i, x := range [2][2]float64{{s.ttft, s.ttftCame}, {s.itl, s.itlCame}} {
		if x[0] > 0 && x[1] > 0 {
			b.errors[i].add(x[0], x[1], clock)
		}
	}
	if bound > 0 {
		b.judge(bound, clock)
	}
}

// judge gives up predictions that are wrong, and trusts them again. Errors of what is not compared any more do not
// count.
func (b *books) judge(bound float64, now int64) {
	dubious := b.ledger.isDubious.Load()
	if dubious {
		bound *= trustAgain
	}
	worst := 0.0
	for i := range b.errors {
		if e := &b.errors[i]; e.n >= leastCompared*trustAgain && !b.isOld(e.at, now) {
			worst = max(worst, e.mean())
		}
	}
	b.ledger.isDubious.Store(worst > bound)
}

// meanErrors are the mean relative errors of TTFT and ITL, and how many predictions each is of.
func (b *books) meanErrors() (mean, n [2]float64) {
	b.learning.Lock()
	defer b.learning.Unlock()
	for i := range b.errors {
		mean[i], n[i] = b.errors[i].mean(), b.errors[i].n
	}
	return mean, n
}

// tell reads an attempt's outcome.
func (s *seen) tell(o *pdflow.Outcome, at time.Time) {
	d := &o.Decode
	if d.FirstByte.IsZero() || d.End.IsZero() || o.Session == nil || o.Session.Request == nil ||
		!o.Session.Request.Stream || o.Resumed > 0 {
		return
	}
	s.ttftCame = d.FirstByte.Sub(at).Seconds()
	if o.Usage.Output > 1 {
		s.itlCame = d.End.Sub(d.FirstByte).Seconds() / float64(o.Usage.Output-1)
	}
	if !s.alone && !o.Prefill.End.IsZero() {
		s.afterPrefill = max(0, d.FirstByte.Sub(o.Prefill.End).Seconds())
	}
}
