// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Recorded is the traffic of a gateway that has recorded its decisions, and the set-up that it had.
type Recorded struct {
	Header record.Header // of the first file
	Trace  *Trace
	Fleet  Fleet    // with the speeds, memory and link that decisions were made by
	By     Deciding // Policy nil: not known

	Copies  float64 // so many requests are played for each recorded one, since only a part was recorded
	Unread  int     // lines that could not be read
	SetBack int     // files that began before the one that stands before them: they are played behind that
	Assumed int     // responses of which no length was recorded: they get that of another one

	came []shown
}

// What is played of a file, which may come from anybody, at most.
const (
	playedMost = 5e6 // requests
	tokensMost = 1e11
	blocksMost = 1 << 25 // of KV, in the memory of all engines
	longest    = 366 * 24 * time.Hour
	promptLong = promptMost / tokenBytes // tokens
	memoryMost = 1 << 28                 // tokens of an engine
	stepMost   = 10.                     // seconds, of each term of a step
	bytesMost  = 1e15
)

// EnginesMost are those of one role that are played: each takes memory and time.
const EnginesMost = 4096

// What a recording does not tell of engines.
const (
	calm        = .9   // of the link's speeds that decisions knew: it was learnt while transfers waited for others, too
	usualStep   = 2048 // tokens: vLLM's max_num_batched_tokens for most cards
	usualBlock  = 16
	usualBlocks = 25_000
	lagMost     = 2 * time.Second // an older figure counts for nothing: see decide.Options.Load
)

// attempt is what is kept of a recorded decision.
type attempt struct {
	shown
	at                     time.Duration
	prompt, output, cached int
	exact                  bool
	own                    decide.Class
	prefixes               []record.Prefix
}

// ReadRecorded makes a trace of recorded decisions, of one file or of several behind each other. The same seed gives
// the same one. The error is a *[record.LineError] if a number is none that an engine or a client can have.
func ReadRecorded(ctx context.Context, entries iter.Seq2[*record.Entry, error], seed uint64) (*Recorded, error) {
	r := &Recorded{}
	var all []attempt
	var files clock
	var seen fleetSeen
	tokens := 0.
	for e, err := range entries {
		if _, is := errors.AsType[*record.LineError](err); is {
			r.Unread++
			continue
		}
		if err == nil && len(all)%1024 == 0 {
			err = ctx.Err()
		}
		if err == nil {
			err = files.check(e)
		}
		if err != nil {
			return nil, err
		}
		if e.Attempt > 1 { // the outcome of a retry is that of other engines' faults
			continue
		}
		at := files.at(e)
		if what := wild(e, at); what != "" {
			return nil, &record.LineError{Line: e.Line, Problem: record.Problem("beyond what is played: " + what)}
		}
		seen.add(e, at)
		a := attempt{at: at, prompt: max(1, e.Input.Prompt), output: e.Result.Output, cached: e.Result.Cached,
			exact: e.Input.Exact, own: e.Input.Class, prefixes: e.Prefixes}
		for _, candidates := range [2][]decide.Candidate{e.Input.Prefill, e.Input.Decode} {
			for k := range candidates {
				a.cached = max(a.cached, candidates[k].Cached)
			}
		}
		refused := e.Result.Error == string(pdflow.CodeOverloaded)
		a.shown = shown{ttft: e.Result.TTFT.Seconds(), itl: e.Result.ITL.Seconds(),
			split: e.Prefill != "" && e.Result.Error == "", refused: refused,
			failed: e.Result.Error != "" && !refused}
		all = append(all, a)
		tokens += float64(a.prompt)
		if n, share := float64(len(all)), files.first.Share; n/share > playedMost || tokens/share > tokensMost {
			return nil, fmt.Errorf("the files stand for more than %g requests or %g tokens, which is the most that is "+
				"played: take fewer files", float64(playedMost), float64(tokensMost))
		}
	}
	if len(all) == 0 {
		return nil, errors.New("the file has no decisions")
	}
	r.SetBack = files.setBack
	slices.SortStableFunc(all, func(a, b attempt) int { return cmp.Compare(a.at, b.at) })
	h := files.first
	policy, err := h.Policy.Policy()
	if err != nil {
		return nil, err
	}
	if h.DryRun {
		policy = decide.Always()
	}
	r.Header, r.Copies = *h, 1/h.Share
	r.By = Deciding{Policy: policy, Pick: pick.PrefixAffinity(), Class: decide.Class{
		TTFT: cmp.Or(h.Policy.TTFT, decide.DefaultTTFT), ITL: cmp.Or(h.Policy.ITL, decide.DefaultITL)}}
	if err := seen.setUp(r, all[len(all)-1].at-all[0].at); err != nil {
		return nil, err
	}
	r.came = make([]shown, len(all))
	for i := range all {
		r.came[i] = all[i].shown
		r.came[i].class = objectives(all[i].own, r.By.Class)
	}
	r.Trace, err = r.trace(ctx, all, rand.New(rand.NewPCG(seed, 3))) //nolint:gosec // the same trace each time
	return r, err
}

// wild is the number of a decision that is none of an engine or a client; "": there is none.
func wild(e *record.Entry, at time.Duration) string {
	in, x := &e.Input, &e.Result
	for _, n := range [...]struct {
		what        string
		value, most float64
	}{
		{"its time", math.Abs(float64(at)), float64(longest)},
		{"its prompt", float64(in.Prompt), promptLong},
		{"its response", float64(x.Output), outputMost},
		{"its cached tokens", float64(x.Cached), promptLong},
		{"its times", float64(min(x.TTFT, x.ITL)), float64(longest)}, // the other one is tested next
		{"its times", float64(max(x.TTFT, x.ITL)), float64(longest)},
		{"its objectives", float64(min(in.Class.TTFT, in.Class.ITL)), float64(longest)},
		{"its objectives", float64(max(in.Class.TTFT, in.Class.ITL)), float64(longest)},
		{"the bytes of a token", float64(in.TokenBytes), bytesMost},
		{"the link", in.Link, bytesMost},
	} {
		if !(n.value >= 0 && n.value <= n.most) {
			return n.what
		}
	}
	for _, candidates := range [2][]decide.Candidate{in.Prefill, in.Decode} {
		for i := range candidates {
			c := &candidates[i]
			for _, term := range [...]float64{c.Speed.Base, c.Speed.PerRequest, c.Speed.PerContext, c.Speed.PerPrompt} {
				if !(term >= 0 && term <= stepMost) {
					return "an engine's speed"
				}
			}
			if c.KV.Total < 0 || c.KV.Total > memoryMost || c.Cached < 0 || c.Cached > memoryMost {
				return "an engine's memory"
			}
		}
	}
	return ""
}

// clock places the decisions of several files on one line of time, that of the first file.
type clock struct {
	first, last *record.Header
	began       map[string]time.Duration // when each recorder began
	from        time.Duration            // of the last file
	end         time.Duration            // the last decision so far
	setBack     int
}

// check turns to the entry's file. The error says that it is of something else than the first one.
func (c *clock) check(e *record.Entry) error {
	h := e.Header
	if h == c.last {
		return nil
	}
	if c.first == nil {
		if !(h.Share > 0 && h.Share <= 1) {
			return errors.New("the file does not say which share of the requests it has")
		}
		c.first, c.began = h, map[string]time.Duration{}
	}
	if f := c.first; h.Policy != f.Policy || h.DryRun != f.DryRun || h.Share != f.Share || h.Model != f.Model {
		return fmt.Errorf("from line %d on, it has another model, policy or share than what is before it", e.Line)
	}
	before := c.from
	if began, ok := c.began[h.Recorder]; ok && h.Recorder != "" {
		c.from = began + h.After
	} else {
		if c.from = h.Began.Sub(c.first.Began); c.last != nil && c.from < before {
			c.from = c.end
			c.setBack++
		}
		c.began[h.Recorder] = c.from - h.After
	}
	c.last = h
	return nil
}

func (c *clock) at(e *record.Entry) time.Duration {
	at := c.from + e.At
	c.end = max(c.end, at)
	return at
}

// counts says how often each value came: of many decisions, few values differ.
type counts[K comparable] map[K]int

// quantile is that of one number of the values.
func (c counts[K]) quantile(q float64, of func(K) float64) float64 {
	keys, n := make([]K, 0, len(c)), 0
	for k, times := range c {
		keys, n = append(keys, k), n+times
	}
	slices.SortFunc(keys, func(a, b K) int { return cmp.Compare(of(a), of(b)) })
	left := int(q * float64(n-1))
	for _, k := range keys {
		if left -= c[k]; left < 0 {
			return of(k)
		}
	}
	return 0
}

func itself(x float64) float64 { return x }

// fleetSeen is what decisions knew of engines.
type fleetSeen struct {
	speeds             [2]counts[decide.Speed]
	memory             [2]counts[float64]
	engines            [2]map[string][2]time.Duration // when each was first seen, and last
	link               counts[[2]float64]             // bytes of a token, and a second
	age                counts[float64]
	alone, exact, read bool
}

func (f *fleetSeen) add(e *record.Entry, at time.Duration) {
	if f.age == nil {
		f.age, f.link = counts[float64]{}, counts[[2]float64]{}
		for role := range f.speeds {
			f.speeds[role], f.memory[role] = counts[decide.Speed]{}, counts[float64]{}
			f.engines[role] = map[string][2]time.Duration{}
		}
	}
	for role, candidates := range [2][]decide.Candidate{e.Input.Prefill, e.Input.Decode} {
		for i := range candidates {
			c := &candidates[i]
			if c.Speed.PerPrompt > 0 {
				f.speeds[role][c.Speed]++
			}
			if c.KV.Total > 0 {
				f.memory[role][float64(c.KV.Total)]++
			}
			f.alone = f.alone || role == 1 && c.Alone
			f.exact = f.exact || c.CachedExact
			f.read = f.read || c.KV.Total > 0 || c.Age > 0
			f.age[min(max(0, c.Age), lagMost).Seconds()]++
		}
		for _, id := range e.Engines[role] {
			seen, ok := f.engines[role][id]
			if !ok {
				seen = [2]time.Duration{at, at}
			}
			f.engines[role][id] = [2]time.Duration{min(seen[0], at), max(seen[1], at)}
		}
	}
	if e.Input.TokenBytes > 0 && e.Input.Link > 0 {
		f.link[[2]float64{float64(e.Input.TokenBytes), e.Input.Link}]++
	}
}

// setUp makes the fleet, of what decisions knew of each number: the median.
func (f *fleetSeen) setUp(r *Recorded, whole time.Duration) error {
	var specs [2]model.Spec
	var engines [2]int
	for role, speeds := range f.speeds {
		if len(speeds) == 0 {
			return errors.New("the file does not tell how fast engines are: record for longer")
		}
		specs[role] = model.Spec{
			StepTime: model.StepTime{
				Base:            speeds.quantile(.5, func(s decide.Speed) float64 { return s.Base }),
				PerRequest:      speeds.quantile(.5, func(s decide.Speed) float64 { return s.PerRequest }),
				PerContextToken: speeds.quantile(.5, func(s decide.Speed) float64 { return s.PerContext }),
				PerPrefillToken: speeds.quantile(.5, func(s decide.Speed) float64 { return s.PerPrompt })},
			StepTokens: usualStep, BlockSize: usualBlock,
			Blocks:        int(f.memory[role].quantile(.5, itself)) / usualBlock,
			BytesPerToken: f.link.quantile(.5, func(x [2]float64) float64 { return x[0] }),
		}
		if len(f.memory[role]) == 0 { // without a bound nothing but what is in use would stay cached
			specs[role].Blocks = usualBlocks
		}
		// Engines that came for others that went were not there at the same time.
		there := time.Duration(0)
		for _, seen := range f.engines[role] {
			there += seen[1] - seen[0]
		}
		engines[role] = 1
		if whole > 0 {
			engines[role] = max(1, int(math.Round(there.Seconds()/whole.Seconds())))
		}
	}
	// What was learnt of a prefill engine is what a leg takes beside its tokens, and no step.
	r.By.learns = specs[0].PerRequest+specs[0].PerContextToken+specs[1].PerContextToken == 0
	specs[0].Base = min(specs[0].Base, specs[1].Base)
	r.Fleet = Fleet{Prefill: engines[0], Decode: engines[1], PrefillSpec: specs[0], DecodeSpec: specs[1], Zones: 1,
		Link: model.Link{BytesPerSecond: f.link.quantile(calm, func(x [2]float64) float64 { return x[1] })}}
	r.By.Lag = time.Duration(f.age.quantile(.5, itself) * float64(time.Second))
	r.By.pairsOnly, r.By.approximate, r.By.unread = !f.alone, !f.exact, !f.read
	return r.Fleet.playable()
}

// playable says that a fleet takes more memory than there is for playing.
func (f *Fleet) playable() error {
	if n := max(f.Prefill, f.Decode); n > EnginesMost {
		return fmt.Errorf("%d engines of one role are more than the %d that are played", n, EnginesMost)
	}
	if n := f.Prefill*f.PrefillSpec.Blocks + f.Decode*f.DecodeSpec.Blocks; n > blocksMost {
		return fmt.Errorf("the engines have KV memory for %d tokens, and at most %d are played: take fewer engines",
			n*usualBlock, blocksMost*usualBlock)
	}
	return nil
}

// median is 0 of no values.
func median(values []float64) float64 { return quantile(slices.Sorted(slices.Values(values)), .5) }

// shifted is by how much copies of recorded requests come earlier or later than these, at most.
const shifted = 30.

// trace makes the requests. Where a part of them was recorded, whole conversations were, and so there are copies of
// each conversation, at other times. What several conversations begin with, as a message of the system, is the same
// text in all copies, since those that were not recorded began with it, too; all else is a copy's own.
func (r *Recorded) trace(ctx context.Context, all []attempt, chance *rand.Rand) (*Trace, error) {
	var lengths []int
	for i := range all {
		if n := all[i].output; n > 0 {
			lengths = append(lengths, n)
		}
	}
	if len(lengths) == 0 {
		return nil, errors.New("the file has no length of any response")
	}
	prompts, texts, owners := make([]*asked, len(all)), textsOf(all), map[string]int{}
	for i := range all {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		out := all[i].output
		if out == 0 {
			out = lengths[chance.IntN(len(lengths))]
			r.Assumed++
		}
		prompts[i] = texts.of(&all[i], i, out)
		for _, s := range prompts[i].segments {
			if owner, ok := owners[s.ID]; ok && owner != prompts[i].conversation {
				owners[s.ID] = nobody
			} else if !ok && r.Copies > 1 { // only copies have other texts
				owners[s.ID] = prompts[i].conversation
			}
		}
	}
	begin, whole := all[0].at.Seconds(), (all[len(all)-1].at - all[0].at).Seconds()
	shift := min(shifted, whole/4)
	copies := map[int][]float64{} // by how much later each of a conversation comes
	entries := make([]entry, 0, len(all))
	for i := range all {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		a, e := prompts[i], &all[i]
		late, ok := copies[a.conversation]
		if !ok {
			late = make([]float64, int(r.Copies+chance.Float64()))
			for k := 1; k < len(late); k++ {
				late[k] = shift * (2*chance.Float64() - 1)
			}
			copies[a.conversation] = late
		}
		for k := range late {
			x := entry{At: e.at.Seconds() - begin + late[k], Output: a.output, class: e.own,
				estimated: !e.exact, Answer: copyOf(a.answer, k)}
			if x.At < 0 || x.At > whole { // the whole time stays as busy as it was
				x.At = max(0, x.At-2*late[k])
			}
			if x.Segments = a.segments; k > 0 {
				x.Segments = slices.Clone(a.segments)
			}
			for n := range x.Segments {
				if s := &x.Segments[n]; k > 0 && owners[s.ID] != nobody {
					s.ID = copyOf(s.ID, k)
				}
			}
			entries = append(entries, x)
		}
	}
	return newTrace(entries)
}

// nobody is the owner of what several conversations have.
const nobody = -1

func copyOf(id string, k int) string {
	if k == 0 {
		return id
	}
	return id + "#" + strconv.Itoa(k)
}

// texts tells which segments prompts are of.
type texts map[uint64]*text // by the hash of a beginning that several prompts have

type text struct {
	id     string
	tokens int    // 0: no prompt with it was seen yet
	next   string // the segment that followed in the latest prompt
	// Prompts of which no longer beginning has a hash, by their tokens without and with the response: the latest.
	ended map[int]*asked
}

// textsOf finds what several prompts begin with. Most beginnings are those of one prompt, and need no memory.
func textsOf(all []attempt) texts {
	var hashes []uint64
	for i := range all {
		for _, p := range all[i].prefixes {
			hashes = append(hashes, p.Hash)
		}
	}
	slices.Sort(hashes)
	t := texts{}
	for i := 1; i < len(hashes); i++ {
		if h := hashes[i]; h == hashes[i-1] && t[h] == nil {
			t[h] = &text{id: strconv.FormatUint(h, 36)}
		}
	}
	return t
}

// asked is an earlier prompt, with its response.
type asked struct {
	number         int
	segments       []segment
	prompt, output int
	answer         string
	conversation   int // the number of its first prompt
}

// together is how near the tokens that an engine has of a prompt are to the length of an earlier one, which then is
// taken to be the turn of the conversation before it: less than a block. Recorded figures are rounded, besides.
const (
	together = 32
	rounded  = 256
)

// of gives the segments of a prompt, and that of its response. Recorded hashes tell what it shares with others as far
// as a power of two of blocks. How many tokens an engine had of it tells more: the whole turn before it, or else what
// followed in the latest prompt with the same beginning.
func (t texts) of(e *attempt, i, output int) *asked {
	r := &reading{asked: &asked{number: i, prompt: e.prompt, output: output, answer: "answer " + strconv.Itoa(i),
		conversation: i}, cached: e.cached, last: &text{}, shares: true}
	own := false
	for _, p := range e.prefixes {
		x := t[p.Hash]
		if own = x == nil; own { // and so is all that is longer
			break
		}
		known := x.tokens > 0
		if !known {
			x.tokens = p.Tokens
		}
		r.follow(x.id, x.tokens, known)
		r.last = x
	}
	r.follow("rest "+strconv.Itoa(i), r.prompt, false)
	if !own {
		if r.last.ended == nil {
			r.last.ended = map[int]*asked{}
		}
		r.last.ended[r.prompt], r.last.ended[r.prompt+output] = r.asked, r.asked
	}
	return r.asked
}

// reading is a prompt whose first tokens have their segments.
type reading struct {
	*asked
	done   int   // tokens
	cached int   // tokens that engines had of it
	last   *text // its longest beginning so far that has a hash
	shares bool  // earlier prompts have all of it so far
}

// add lets a segment follow, up to a number of tokens.
func (r *reading) add(id string, to int) {
	if to = min(to, r.prompt); to > r.done {
		r.segments = append(r.segments, segment{id, (to - r.done) * tokenBytes})
		r.done = to
	}
}

// follow lets a segment follow, too. If it is new, what engines had of it comes first.
func (r *reading) follow(id string, to int, known bool) {
	n := len(r.segments)
	if r.shares && !known {
		r.shares = false
		if before := r.last.turn(r.cached); before != nil {
			n = 0
			r.begin(before)
		} else if r.last.next != "" {
			r.add(r.last.next, min(r.cached, to))
		}
	}
	if r.add(id, to); len(r.segments) > n && n > 0 {
		r.last.next = r.segments[n].ID
	}
}

// begin makes the prompt begin with the turn before it and its response, as far as engines had them.
func (r *reading) begin(before *asked) {
	r.segments, r.conversation, r.done = nil, before.conversation, 0
	at := 0
	for _, s := range append(slices.Clone(before.segments), segment{before.answer, before.output * tokenBytes}) {
		at += s.Bytes / tokenBytes
		r.add(s.ID, min(at, r.cached))
	}
}

// turn is the latest prompt of which an engine has so many tokens, and hardly more.
func (t *text) turn(cached int) (latest *asked) {
	slack := cached / rounded
	for whole := cached - slack; whole < cached+together+slack; whole++ {
		if a := t.ended[whole]; a != nil && (latest == nil || a.number > latest.number) {
			latest = a
		}
	}
	return latest
}
