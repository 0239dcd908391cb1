// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
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
	Trace *Trace
	Fleet Fleet    // with the speeds, memory and link that decisions were made by
	By    Deciding // Policy nil: not known

	Copies  float64 // so many requests are played for each recorded one, since only a part was recorded
	Unread  int     // lines that could not be read
	Assumed int     // responses of which no length was recorded: they get that of another one

	came []shown
}

// What is played of a file, which may come from anybody, at most.
const (
	playedMost = 5e6 // requests
	tokensMost = 1 << 24
	longest    = 366 * 24 * time.Hour
)

// What a recording does not tell of engines.
const (
	calm        = .9   // of the link's speeds that decisions knew: it was learnt while transfers waited for others, too
	usualStep   = 2048 // tokens: vLLM's max_num_batched_tokens for most cards
	usualBlock  = 16
	usualBlocks = 25_000
)

// ReadRecorded makes a trace of recorded decisions. The same seed gives the same one.
func ReadRecorded(h *record.Header, entries iter.Seq2[*record.Entry, error], seed uint64) (*Recorded, error) {
	var all []*record.Entry
	unread := 0
	for e, err := range entries {
		if _, is := errors.AsType[*record.LineError](err); is {
			unread++
			continue
		}
		if err != nil {
			return nil, err
		}
		if e.Attempt <= 1 { // the outcome of a retry is that of other engines' faults
			all = append(all, e)
		}
	}
	if len(all) == 0 {
		return nil, errors.New("the file has no decisions")
	}
	if !(h.Share > 0 && h.Share <= 1) {
		return nil, errors.New("the file does not say which share of the requests it has")
	}
	if played := float64(len(all)) / h.Share; played > playedMost {
		return nil, fmt.Errorf("the file stands for %.3g requests, and at most %g are played: take fewer files", played,
			float64(playedMost))
	}
	for _, e := range all {
		if e.Input.Prompt > tokensMost || e.Result.Output > tokensMost || !(e.At.Abs() < longest) {
			return nil, errors.New("the file has a request of more tokens than any engine takes, or of another year")
		}
	}
	slices.SortStableFunc(all, func(a, b *record.Entry) int { return cmp.Compare(a.At, b.At) })
	r := &Recorded{Copies: 1 / h.Share, Unread: unread}
	policy, err := h.Policy.Policy()
	if err != nil {
		return nil, err
	}
	if h.DryRun {
		policy = decide.Always()
	}
	r.By = Deciding{Policy: policy, Pick: pick.PrefixAffinity(), Class: decide.Class{
		TTFT: cmp.Or(h.Policy.TTFT, decide.DefaultTTFT), ITL: cmp.Or(h.Policy.ITL, decide.DefaultITL)}}
	if err := r.setUp(all); err != nil {
		return nil, err
	}
	for _, e := range all {
		refused := e.Result.Error == string(pdflow.CodeOverloaded)
		r.came = append(r.came, shown{class: objectives(e.Input.Class, r.By.Class), ttft: e.Result.TTFT.Seconds(),
			itl: e.Result.ITL.Seconds(), split: e.Prefill != "" && e.Result.Error == "", refused: refused,
			failed: e.Result.Error != "" && !refused})
	}
	r.Trace, err = r.trace(all, rand.New(rand.NewPCG(seed, 3))) //nolint:gosec // the same trace each time
	return r, err
}

// setUp finds the engines, and what decisions knew of them: of each number the median.
func (r *Recorded) setUp(all []*record.Entry) error {
	var known [2]struct {
		base, request, context, prompt, memory []float64
		engines                                map[string][2]time.Duration // when each was first seen, and last
	}
	var tokenBytes, link, age []float64
	var alone, exact, read bool
	for _, e := range all {
		for role, candidates := range [2][]decide.Candidate{e.Input.Prefill, e.Input.Decode} {
			k := &known[role]
			for i := range candidates {
				c := &candidates[i]
				if s := c.Speed; s.PerPrompt > 0 {
					k.base, k.request = append(k.base, s.Base), append(k.request, s.PerRequest)
					k.context, k.prompt = append(k.context, s.PerContext), append(k.prompt, s.PerPrompt)
				}
				if c.KV.Total > 0 {
					k.memory = append(k.memory, float64(c.KV.Total))
				}
				alone = alone || role == 1 && c.Alone
				exact = exact || c.CachedExact
				read = read || c.KV.Total > 0 || c.Age > 0
				age = append(age, c.Age.Seconds())
			}
			if k.engines == nil {
				k.engines = map[string][2]time.Duration{}
			}
			for _, id := range e.Engines[role] {
				if seen, ok := k.engines[id]; ok {
					k.engines[id] = [2]time.Duration{seen[0], e.At}
				} else {
					k.engines[id] = [2]time.Duration{e.At, e.At}
				}
			}
		}
		if e.Input.TokenBytes > 0 && e.Input.Link > 0 {
			tokenBytes, link = append(tokenBytes, float64(e.Input.TokenBytes)), append(link, e.Input.Link)
		}
	}
	var specs [2]model.Spec
	var engines [2]int
	for role := range known {
		k := &known[role]
		if len(k.prompt) == 0 {
			return errors.New("the file does not tell how fast engines are: record for longer")
		}
		specs[role] = model.Spec{
			StepTime: model.StepTime{Base: median(k.base), PerRequest: median(k.request),
				PerContextToken: median(k.context), PerPrefillToken: median(k.prompt)},
			StepTokens: usualStep, BlockSize: usualBlock, Blocks: int(median(k.memory)) / usualBlock,
			BytesPerToken: median(tokenBytes),
		}
		if len(k.memory) == 0 { // without a bound nothing but what is in use would stay cached
			specs[role].Blocks = usualBlocks
		}
		// Engines that came for others that went were not there at the same time.
		there := 0.
		for _, seen := range k.engines {
			there += (seen[1] - seen[0]).Seconds()
		}
		engines[role] = max(1, int(math.Round(there/(all[len(all)-1].At-all[0].At).Seconds())))
	}
	// What was learnt of a prefill engine is what a leg takes beside its tokens, and no step.
	r.By.learns = specs[0].PerRequest+specs[0].PerContextToken+specs[1].PerContextToken == 0
	specs[0].Base = min(specs[0].Base, specs[1].Base)
	r.Fleet = Fleet{Prefill: engines[0], Decode: engines[1], PrefillSpec: specs[0], DecodeSpec: specs[1], Zones: 1,
		Link: model.Link{BytesPerSecond: quantile(slices.Sorted(slices.Values(link)), calm)}}
	r.By.Lag = time.Duration(median(age) * float64(time.Second))
	r.By.pairsOnly, r.By.approximate, r.By.unread = !alone, !exact, !read
	return nil
}

// median is 0 of no values.
func median(values []float64) float64 { return quantile(slices.Sorted(slices.Values(values)), .5) }

// shifted is by how much copies of recorded requests come earlier or later than these, at most.
const shifted = 30.

// trace makes the requests. Where a part of them was recorded, whole conversations were, and so there are copies of
// each conversation, at other times. What several conversations begin with, as a message of the system, is the same
// text in all copies, since those that were not recorded began with it, too; all else is a copy's own.
func (r *Recorded) trace(all []*record.Entry, chance *rand.Rand) (*Trace, error) {
	var lengths []int
	for _, e := range all {
		if e.Result.Output > 0 {
			lengths = append(lengths, e.Result.Output)
		}
	}
	if len(lengths) == 0 {
		return nil, errors.New("the file has no length of any response")
	}
	prompts, texts, owners := make([]*asked, len(all)), texts{}, map[string]int{}
	for i, e := range all {
		out := e.Result.Output
		if out == 0 {
			out = lengths[chance.IntN(len(lengths))]
			r.Assumed++
		}
		prompts[i] = texts.of(e, i, out)
		for _, s := range prompts[i].segments {
			if owner, ok := owners[s.ID]; ok && owner != prompts[i].conversation {
				owners[s.ID] = nobody
			} else if !ok {
				owners[s.ID] = prompts[i].conversation
			}
		}
	}
	begin, whole := all[0].At.Seconds(), (all[len(all)-1].At - all[0].At).Seconds()
	shift := min(shifted, whole/4)
	copies := map[int][]float64{} // by how much later each of a conversation comes
	var entries []entry
	for i, e := range all {
		a := prompts[i]
		late, ok := copies[a.conversation]
		if !ok {
			late = make([]float64, int(r.Copies+chance.Float64()))
			for k := 1; k < len(late); k++ {
				late[k] = shift * (2*chance.Float64() - 1)
			}
			copies[a.conversation] = late
		}
		for k := range late {
			x := entry{At: e.At.Seconds() - begin + late[k], Output: a.output, class: e.Input.Class,
				estimated: !e.Input.Exact, Answer: copyOf(a.answer, k)}
			if x.At < 0 || x.At > whole { // the whole time stays as busy as it was
				x.At = max(0, x.At-2*late[k])
			}
			for _, s := range a.segments {
				if owners[s.ID] != nobody {
					s.ID = copyOf(s.ID, k)
				}
				x.Segments = append(x.Segments, s)
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
type texts map[uint64]*text // by the hash of a beginning

type text struct {
	tokens int
	next   string   // the segment that followed in the latest prompt
	ended  []*asked // prompts of which no longer beginning has a hash
}

// asked is an earlier prompt, with its response.
type asked struct {
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
func (t texts) of(e *record.Entry, i, output int) *asked {
	cached := e.Result.Cached
	for _, candidates := range [2][]decide.Candidate{e.Input.Prefill, e.Input.Decode} {
		for k := range candidates {
			cached = max(cached, candidates[k].Cached)
		}
	}
	a := &asked{prompt: e.Input.Prompt, output: output, answer: "answer " + strconv.Itoa(i),
		conversation: i}
	done, last, shares := 0, &text{}, true
	add := func(id string, to int) {
		if to = min(to, a.prompt); to > done {
			a.segments = append(a.segments, segment{id, (to - done) * tokenBytes})
			done = to
		}
	}
	// A segment up to a number of tokens follows. If it is new, what engines had of it comes first.
	follow := func(id string, to int, known bool) {
		n := len(a.segments)
		if shares && !known {
			shares = false
			if before := last.turn(cached); before != nil {
				a.segments, a.conversation, done, n = nil, before.conversation, 0, 0
				at := 0
				answer := segment{before.answer, before.output * tokenBytes}
				for _, s := range append(slices.Clone(before.segments), answer) {
					at += s.Bytes / tokenBytes
					add(s.ID, min(at, cached))
				}
			} else if last.next != "" {
				add(last.next, min(cached, to))
			}
		}
		if add(id, to); len(a.segments) > n && n > 0 {
			last.next = a.segments[n].ID
		}
	}
	for _, p := range e.Prefixes {
		x, known := t[p.Hash]
		if !known {
			x = &text{tokens: p.Tokens}
			t[p.Hash] = x
		}
		follow(strconv.FormatUint(p.Hash, 36), x.tokens, known)
		last = x
	}
	follow("rest "+strconv.Itoa(i), a.prompt, false)
	last.ended = append(last.ended, a)
	return a
}

// turn is the latest prompt of which an engine has so many tokens, and hardly more.
func (t *text) turn(cached int) *asked {
	slack := cached / rounded
	for _, a := range slices.Backward(t.ended) {
		for _, whole := range [2]int{a.prompt, a.prompt + a.output} {
			if over := whole - cached; over >= -slack && over < together+slack {
				return a
			}
		}
	}
	return nil
}
