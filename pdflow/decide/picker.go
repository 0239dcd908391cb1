// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/estimate"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Options are the settings of [New]. Zero values mean the defaults.
type Options struct {
	// DryRun lets the inner picker decide as if nothing were around it, and counts what the policy would have decided.
	DryRun bool

	// Class returns what a request's client was promised. Nil: the policy's own objectives, and no request is refused.
	Class func(in *pdflow.PickInput) Class

	// Tokens returns how long a request's prompt is, and whether that was counted. Nil, or 0 tokens: token ids that the
	// inner picker has found (PickInput.Prompt), or that are in the body, are counted, and of text four bytes are a
	// token.
	Tokens func(in *pdflow.PickInput) (tokens int, exact bool)

	// Cache knows what engines have in their prefix caches. Nil: what the inner picker remembers to have sent, if its
	// policy is pick.PrefixAffinity, or what engines' events tell, if it is pick.KV.
	Cache Cache

	// Engine returns what is known of an engine beforehand. Nil, or a zero speed: speeds are learnt from what requests
	// took. It is called for each candidate, and must be quick.
	Engine func(e *discovery.Endpoint) Facts

	TokenBytes int     // of KV cache for one token; see Input. 0: what a token's transfer takes is learnt
	Link       float64 // bytes a second

	// Load says how busy an engine is, by its ID, as admit.Options has it. An older one than 2 s counts for nothing.
	Load func(id string) inspect.Load

	// ErrorBound is the mean relative error of the policy's predictions, of TTFT or of ITL, from which on they count
	// for nothing: where a decision has any, the inner picker then decides, until the error is a fifth below the bound.
	// Decisions without predictions, as those of [Threshold], always count. An error of 1, the default, is a prediction
	// of twice or half of what comes. Negative: all decisions count. TTFT is compared for streams, and ITL for those
	// whose length the engine's response tells.
	ErrorBound float64

	// Recorder keeps decisions with what they were decided on. With one, figures are rounded by 0.4 % at most, and
	// speeds by 2 %, so that few bytes hold exactly what the policy had. Nil: nothing is kept or rounded.
	Recorder Recorder

	// Now is the time, and Rand a number by chance, for simulations. Nil: those of package time and math/rand/v2. Both
	// are called concurrently.
	Now  func() time.Time
	Rand func() uint64

	MeterProvider metric.MeterProvider // nil: no metrics
	Attributes    []attribute.KeyValue // of all metrics
}

// Facts are what a host knows of an engine.
type Facts struct {
	Speed    Speed
	KVTokens int // of its KV cache; 0: not known
}

// Cache knows what engines have in their prefix caches. It must be quick, and safe for concurrent use.
type Cache interface {
	// Match fills found with engines that have a beginning of a request's prompt, the longest first, and returns how
	// many it has filled. It must not allocate where a decision must not.
	Match(in *pdflow.PickInput, found []Cached) int
}

// Cached is what one engine has of a prompt.
type Cached struct {
	Engine string // its ID
	Tokens int
	Exact  bool // the engine has told so
}

// defaultBound is Options.ErrorBound: predictions that are wrong by as much as they say.
const defaultBound = 1

// State is what a [Picker] has decided and predicted, for operators.
type State struct {
	Decisions []Count
	// Mean relative errors of what was predicted lately; 0: nothing was compared
	TTFTError, ITLError float64
	Doubtful            bool // an error is above its bound: decisions by predictions do not count
}

// Count is how many attempts had a decision, or would have had it in a dry run.
type Count struct {
	Action Action
	Reason string
	N      int64
}

// source is a picker that tells its candidates: those of package pick do.
type source interface {
	Candidates(in *pdflow.PickInput, c *pick.Candidates) (tells bool)
}

// Picker is a [pdflow.Picker] that decides by a policy. Make it with [New].
type Picker struct {
	inner
	source  source // nil: the inner picker does not tell
	serving connector.Serving
	early   bool // decode engines get their requests before prefill has ended
	*shared
}

// inner is the picker that is asked.
type inner = pick.Around

// shared is what all pickers share that were bound from one.
type shared struct {
	policy  Policy
	o       Options
	books   books
	tel     *telemetry
	scratch sync.Pool
	tickets sync.Pool
}

// New puts a policy around a picker. The candidates are at most eight engines of each role: see pick.WithCandidates,
// without which, and with pickers of other packages, the pair that the inner picker chooses is the only one. The inner
// picker then picks what was decided, so its rules, cooldowns and loads hold, and what it remembers goes on.
//
// Put limits (package admit) around the picker that New returns, not inside: a pick that is decided otherwise is given
// back.
//
// A request that one engine must serve (PickInput.Single), a second prefill beside a slow one (PickInput.Pair), and
// engines that the caller has named, stay as they are. A retry is decided anew, among the engines that have not failed
// it, and is never refused. Pick.Reason is the decision's.
func New(p pdflow.Picker, policy Policy, o *Options) (*Picker, error) {
	if p == nil || policy == nil {
		return nil, errors.New("decide: New needs a picker and a policy")
	}
	if o == nil {
		o = &Options{}
	}
	s := &shared{policy: policy, o: *o}
	if s.o.ErrorBound == 0 {
		s.o.ErrorBound = defaultBound
	}
	if s.o.Now == nil {
		s.o.Now = time.Now
	}
	if s.o.Rand == nil {
		s.o.Rand = rand.Uint64 // it breaks ties, and is no secret
	}
	s.books.init(&s.o)
	var err error
	s.tel, err = newTelemetry(s)
	out := &Picker{inner: pick.NewAround(p), shared: s}
	out.source, _ = p.(source)
	return out, err
}

// Bind binds the inner picker. What is learnt of engines is the same for all flows.
func (p *Picker) Bind(c connector.KVConnector, serving connector.Serving) pdflow.Picker {
	bound := p.inner.Bind(c, serving)
	out := &Picker{inner: pick.NewAround(bound), serving: serving, shared: p.shared,
		early: c != nil && c.Traits().Order != connector.PrefillThenDecode}
	out.source, _ = bound.(source)
	return out
}

// Ready is the inner picker's. Where one engine serves a prompt of any length alone, as with [Never], it need not have
// prefill engines.
func (p *Picker) Ready(in *pdflow.PickInput) error {
	err := p.inner.Ready(in)
	if err == nil || p.source == nil || p.o.DryRun || in.Single || in.Pair || in.Prefill != "" || in.Encode > 0 {
		return err
	}
	x, d := Input{Prompt: longestPrompt, Decode: []Candidate{{Alone: true}}}, Decision{}
	if p.policy.Decide(&x, &d); d.Action != DecodeAlone {
		return err
	}
	alone := *in
	alone.Single = true
	if !p.source.Candidates(&alone, &pick.Candidates{}) || p.inner.Ready(&alone) != nil {
		return err
	}
	return nil
}

const longestPrompt = 1 << 30 // tokens; no threshold is above it

// State returns what the picker has decided since New, in no order. It is safe for concurrent use.
func (p *Picker) State() State {
	mean, _ := p.books.meanErrors()
	return State{Decisions: p.tel.list(), TTFTError: mean[0], ITLError: mean[1], Doubtful: p.books.doubtful()}
}

// Close ends the picker's metrics.
func (p *Picker) Close() error { return p.tel.close() }

// scratch is the memory of one Pick.
type scratch struct {
	candidates pick.Candidates
	found      [pick.CandidatesMost]Cached
	ids        [pick.CandidatesMost]string
	lists      [2][pick.CandidatesMost]Candidate // as candidates has them
	pair       [2][1]Candidate
	in         Input
	asked      pdflow.PickInput // of the inner picker
	picked     pdflow.Pick      // by it
	decision   Decision
	recorded   *Recorded // nil: the decision is not kept, or an attempt has it
	now        time.Time
	early      bool // see Picker
}

// Pick decides, and has the inner picker pick what was decided.
func (p *Picker) Pick(ctx context.Context, in *pdflow.PickInput) (picked pdflow.Pick, err error) {
	x, _ := p.scratch.Get().(*scratch)
	if x == nil {
		x = &scratch{}
	}
	defer func() {
		p.ended(x, err)
		p.put(x)
	}()
	in = p.Prepare(ctx, in)
	x.early = p.early
	x.now = p.o.Now()
	x.candidates.Prefill, x.candidates.Decode = x.candidates.Prefill[:0], x.candidates.Decode[:0]
	x.in = Input{Rand: p.o.Rand(), TokenBytes: p.o.TokenBytes, Link: p.o.Link}
	x.in.Prompt, x.in.Exact = p.prompt(in)
	if in.Request != nil {
		x.in.Limit = int(min(estimate.Limit(in.Request), longestPrompt))
	}
	if in.Single || in.Pair {
		out, err := p.inner.Pick(ctx, in)
		return p.count(x, &out, false), err
	}
	p.books.link(&x.in)
	if p.o.Recorder != nil {
		x.in.Link = settle(&p.books.ledger.settled, x.in.Link)
	}
	if p.o.Class != nil {
		x.in.Class = p.o.Class(in)
	}
	x.in.Class.Refusable = x.in.Class.Refusable && in.Attempt <= 1
	if p.source == nil || !p.candidates(in, x) {
		return p.decideOnPair(ctx, in, x)
	}
	if len(x.in.Decode) == 0 { // what is to be done where no engine is good is the inner picker's business
		out, err := p.inner.Pick(ctx, in)
		return p.count(x, &out, false), err
	}
	p.decide(in, x)
	if p.o.DryRun || p.doubts(&x.decision) {
		return p.pickUndecided(ctx, in, x)
	}
	return p.pickDecided(ctx, in, x)
}

// prompt returns how many tokens a request's prompt has, and whether they were counted.
func (s *shared) prompt(in *pdflow.PickInput) (tokens int, exact bool) {
	if s.o.Tokens != nil {
		if tokens, exact = s.o.Tokens(in); tokens > 0 {
			return tokens, exact
		}
	}
	if p := in.Prompt; p != nil && len(p.IDs) > 0 {
		return len(p.IDs), p.Exact
	}
	if in.Request == nil {
		return 1, false
	}
	return estimate.Prompt(in.Request)
}

// decide asks the policy, and records what it says.
func (p *Picker) decide(in *pdflow.PickInput, x *scratch) {
	if p.o.Recorder != nil {
		x.in.Rand &= shortRand
	}
	p.policy.Decide(&x.in, &x.decision)
	p.record(in, x)
}

// doubts reports whether a decision counts for nothing. One without predictions, as by a threshold, always counts.
func (p *Picker) doubts(d *Decision) bool { return d.TTFT+d.ITL != 0 && p.books.doubtful() }

func (p *Picker) put(x *scratch) {
	x.asked, x.picked = pdflow.PickInput{}, pdflow.Pick{}
	p.scratch.Put(x)
}

// pickUndecided picks as if there were no policy. What the policy predicts of that pair is compared all the same.
func (p *Picker) pickUndecided(ctx context.Context, in *pdflow.PickInput, x *scratch) (pdflow.Pick, error) {
	decision := x.decision
	x.instead(p.ignores())
	out, err := p.inner.Pick(ctx, in)
	if err != nil {
		return out, err
	}
	p.foresee(x, out)
	ttft, itl := x.decision.TTFT, x.decision.ITL
	x.decision = decision
	x.decision.TTFT, x.decision.ITL = ttft, itl
	if !p.o.DryRun {
		x.decision.Action, x.decision.Reason = Undecided, reasonDoubtful
		out.Reason = reasonDoubtful
	}
	return p.count(x, &out, true), nil
}

// foresee has the policy predict what was picked.
func (p *Picker) foresee(x *scratch, picked pdflow.Pick) {
	x.picked = picked // here, where it costs no memory of its own
	out := &x.picked
	x.in.Prefill, x.in.Decode = nil, x.one(p, decodeRole, &out.Decode)
	x.in.Decode[0].Alone, x.in.Decode[0].Apart = out.Prefill.URL == nil, 0
	if out.Prefill.URL != nil {
		x.in.Prefill = x.one(p, prefillRole, &out.Prefill)
		x.in.Prefill[0].Alone = false
	}
	x.in.Class.Refusable = false
	p.policy.Decide(&x.in, &x.decision)
}

// one is the list of a single engine.
func (x *scratch) one(p *Picker, role int, e *discovery.Endpoint) []Candidate {
	c := &x.pair[role][0]
	if known := x.candidate(role, e.ID); known != nil {
		*c = *known
	} else {
		if p.books.figures(&p.o, e, role, &x.in, c, x.now); p.o.Recorder != nil {
			c.shorten()
		}
	}
	return x.pair[role][:]
}

// candidate is what the policy was told of an engine, nil if it was told nothing.
func (x *scratch) candidate(role int, id string) *Candidate {
	from := x.candidates.Prefill
	if role == decodeRole {
		from = x.candidates.Decode
	}
	for i := range min(len(from), len(x.lists[role])) {
		if from[i].Endpoint.ID == id {
			return &x.lists[role][i]
		}
	}
	return nil
}

// decideOnPair decides on what an inner picker has picked that tells no candidates.
func (p *Picker) decideOnPair(ctx context.Context, in *pdflow.PickInput, x *scratch) (pdflow.Pick, error) {
	out, err := p.inner.Pick(ctx, in)
	if err != nil {
		return out, err
	}
	refusable := x.in.Class.Refusable
	p.foresee(x, out)
	if out.Prefill.URL == nil {
		return p.count(x, &out, false), nil
	}
	split := x.decision
	x.in.Class.Refusable = refusable
	x.in.Decode[0].Alone = in.Encode == 0 && p.servesAlone(&out.Decode) &&
		(in.Prefill == "" || in.Prefill == out.Decode.ID)
	p.decide(in, x)
	if dry, doubtful := p.o.DryRun, p.doubts(&x.decision); dry || doubtful {
		x.instead(p.ignores())
		x.decision.TTFT, x.decision.ITL = split.TTFT, split.ITL
		if !dry {
			x.decision.Action, x.decision.Reason, out.Reason = Undecided, reasonDoubtful, reasonDoubtful
		}
		return p.count(x, &out, true), nil
	}
	if !x.in.allows(&x.decision) {
		x.decision = undecided(reasonNotAllowed)
		x.instead(reasonNotAllowed)
	}
	switch x.decision.Action {
	case DecodeAlone, Refuse:
		if out.Done != nil {
			out.Done(&pdflow.Outcome{Err: &pdflow.Error{Code: pdflow.CodeCanceled}})
		}
		if x.decision.Action == Refuse {
			return pdflow.Pick{}, p.refuse(x)
		}
		x.asked = *in
		x.asked.Single, x.asked.Prefill, x.asked.Decode = true, "", out.Decode.ID
		return p.pickAsked(ctx, in, x)
	}
	if x.decision.Reason != "" {
		out.Reason = x.decision.Reason
	}
	return p.count(x, &out, true), nil
}

// servesAlone reports whether a decode engine may serve a whole request, by the connector's rules.
func (p *Picker) servesAlone(e *discovery.Endpoint) bool {
	switch {
	case p.serving.PairOnly:
		return e.Role.Has(discovery.RoleBoth)
	case p.serving.PrefillPairOnly:
		return !e.Role.Has(discovery.RolePrefill)
	}
	return true
}

// candidates fills the policy's input, if the inner picker tells its candidates.
func (p *Picker) candidates(in *pdflow.PickInput, x *scratch) bool {
	c := &x.candidates
	c.Random, c.Want = x.in.Rand, x.ids[:0]
	found := x.found[:0]
	if p.o.Cache != nil {
		found = x.found[:min(p.o.Cache.Match(in, x.found[:]), len(x.found))]
		for i := range found {
			c.Want = append(c.Want, found[i].Engine)
		}
	}
	if !p.source.Candidates(in, c) {
		return false
	}
	for role, from := range [2][]pick.Candidate{c.Prefill, c.Decode} {
		n := min(len(from), pick.CandidatesMost)
		for i := range n {
			y := &x.lists[role][i]
			p.books.figures(&p.o, from[i].Endpoint, role, &x.in, y, x.now)
			y.Cached, y.CachedExact, y.Alone, y.Apart = from[i].Cached, from[i].Exact, from[i].Alone, from[i].Apart
			for k := range found {
				if found[k].Engine == from[i].Endpoint.ID {
					y.Cached, y.CachedExact = found[k].Tokens, found[k].Exact
				}
			}
			if p.o.Recorder != nil {
				y.shorten()
			}
		}
		if role == prefillRole {
			x.in.Prefill = x.lists[role][:n]
		} else {
			x.in.Decode = x.lists[role][:n]
		}
	}
	return true
}

// pickDecided has the inner picker pick what was decided, if it may be done.
func (p *Picker) pickDecided(ctx context.Context, in *pdflow.PickInput, x *scratch) (pdflow.Pick, error) {
	d := &x.decision
	if !x.in.allows(d) {
		*d = undecided(reasonNotAllowed)
		x.instead(reasonNotAllowed)
	}
	x.asked = *in
	switch d.Action {
	case Refuse:
		return pdflow.Pick{}, p.refuse(x)
	case DecodeAlone, PrefillAlone:
		from, i := x.candidates.Decode, d.Decode
		if d.Action == PrefillAlone {
			from, i = x.candidates.Prefill, d.Prefill
		}
		// A caller that has chosen one engine has chosen it for all that one engine does.
		x.asked.Single, x.asked.Prefill = true, ""
		x.asked.Decode = chosen(from, i, cmp.Or(in.Decode, in.Prefill))
	default:
		x.asked.Prefill = chosen(x.candidates.Prefill, d.Prefill, in.Prefill)
		x.asked.Decode = chosen(x.candidates.Decode, d.Decode, in.Decode)
	}
	return p.pickAsked(ctx, in, x)
}

// chosen is the ID of an engine that the caller has named, or the policy has chosen.
func chosen(from []pick.Candidate, i int, named string) string {
	if named != "" || i < 0 {
		return named
	}
	return from[i].Endpoint.ID
}

// allows reports whether a decision can be carried out. A policy of the host may say anything.
func (in *Input) allows(d *Decision) bool {
	if d.Prefill >= len(in.Prefill) || d.Decode >= len(in.Decode) {
		return false
	}
	switch d.Action {
	case Refuse:
		return in.Class.Refusable
	case DecodeAlone:
		return d.Decode >= 0 && in.Decode[d.Decode].Alone || d.Decode < 0 && anyAlone(in.Decode)
	case PrefillAlone:
		return d.Prefill >= 0 && in.Prefill[d.Prefill].Alone
	}
	return d.Prefill < 0 || d.Decode < 0 || in.Decode[d.Decode].Apart>>d.Prefill&1 == 0
}

func anyAlone(all []Candidate) bool {
	return slices.ContainsFunc(all, func(c Candidate) bool { return c.Alone })
}

// pickAsked picks as x.asked says. What has changed since the candidates were told must fail no request.
func (p *Picker) pickAsked(ctx context.Context, in *pdflow.PickInput, x *scratch) (pdflow.Pick, error) {
	out, err := p.inner.Pick(ctx, &x.asked)
	if err != nil {
		if out, err = p.inner.Pick(ctx, in); err != nil {
			return out, err
		}
		x.decision = undecided(reasonChanged)
		x.instead(reasonChanged)
		out.Reason = reasonChanged
		return p.count(x, &out, true), nil
	}
	if x.asked.Single {
		out.Prefill, out.PrefillRank, out.Encode = discovery.Endpoint{}, discovery.Rank{}, nil
	}
	if x.decision.Reason != "" {
		out.Reason = x.decision.Reason
	}
	return p.count(x, &out, true), nil
}

func (p *Picker) refuse(x *scratch) error {
	p.tel.count(Refuse, x.decision.Reason)
	return &pdflow.Error{Code: pdflow.CodeOverloaded, Phase: "pick", RetryAfter: x.decision.RetryAfter,
		Message: "no engine can serve the request in the time that was promised; try again later"}
}
