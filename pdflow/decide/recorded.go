// SPDX-License-Identifier: Apache-2.0

package decide

import (
	"errors"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Recorder keeps decisions. Package record has one. Its methods are called by many goroutines at once, in the way of
// requests, and must be quick.
type Recorder interface {
	// Sample returns memory for the decision on a request, or nil if that one is not to be kept. What Pick does not set
	// must be zero, but for the memory of lists.
	Sample(in *pdflow.PickInput) *Recorded
	// End is called when nothing more will become of a decision, and r is the recorder's again. It is not called where
	// nobody has used the pick.
	End(r *Recorded)
}

// Recorded is a decision, what it was decided on, and what came of it.
type Recorded struct {
	Request  *connector.ClientRequest // that Pick was given; nil in what a Recorder gives to others
	Time     time.Time                // of the decision
	Attempt  int                      // of its request: above 1, it is a retry
	Engines  [2][]string              // IDs of Input.Prefill and Input.Decode, in their order
	Input    Input                    // exactly as the policy had it
	Decision Decision                 // exactly as the policy gave it
	// Instead is why the decision was not followed: dry_run, doubtful, not_allowed or changed. "": it was.
	Instead         string
	Prefill, Decode string // IDs of the engines that were picked; "": none. One that served alone is Decode
	Result          Result
}

// Result is what came of a decision.
type Result struct {
	TTFT   time.Duration // from the decision to the first byte of a stream; 0: not known
	ITL    time.Duration // mean between two tokens of a stream; 0: not known
	Took   time.Duration // from the decision to the end
	Output int           // tokens; 0: not known
	Cached int           // tokens of the prompt that prefill found in its cache; 0: none, or not known
	Error  string        // the code of a failure, like decode_failed; overloaded: it was refused. "": it was served
}

const reasonDryRun = "dry_run"

// record keeps what the policy has just decided on, and what it has decided, if the request is sampled.
func (p *Picker) record(in *pdflow.PickInput, x *scratch) {
	if p.o.Recorder == nil {
		return
	}
	r := p.o.Recorder.Sample(in)
	if r == nil {
		return
	}
	x.recorded = r
	r.Request = in.Request
	r.Time, r.Attempt, r.Decision = x.now, max(in.Attempt, 1), x.decision
	ps, ds := append(r.Input.Prefill[:0], x.in.Prefill...), append(r.Input.Decode[:0], x.in.Decode...)
	r.Input = x.in
	r.Input.Prefill, r.Input.Decode = ps, ds
	for role, list := range [2][]Candidate{ps, ds} {
		ids := slices.Grow(r.Engines[role][:0], len(list))
		for i := range list {
			ids = append(ids, x.id(role, i))
		}
		r.Engines[role] = ids
	}
}

// id is the ID of a candidate.
func (x *scratch) id(role, i int) string {
	from, picked := x.candidates.Prefill, &x.picked.Prefill
	if role == decodeRole {
		from, picked = x.candidates.Decode, &x.picked.Decode
	}
	if i < len(from) {
		return from[i].Endpoint.ID
	}
	return picked.ID // of an inner picker that tells no candidates
}

// ignores is why decisions are not followed.
func (p *Picker) ignores() string {
	if p.o.DryRun {
		return reasonDryRun
	}
	return reasonDoubtful
}

// instead takes note that a decision is not followed.
func (x *scratch) instead(reason string) {
	if x.recorded != nil {
		x.recorded.Instead = reason
	}
}

// ended ends what Pick has recorded, unless an attempt has it now.
func (p *Picker) ended(x *scratch, err error) {
	r := x.recorded
	if r == nil {
		return
	}
	x.recorded = nil
	if e, ok := errors.AsType[*pdflow.Error](err); ok {
		r.Result.Error = string(e.Code)
	} else if code, ok := errors.AsType[pdflow.Code](err); ok {
		r.Result.Error = string(code)
	} else if err != nil { // a host's picker may say anything
		r.Result.Error = string(pdflow.CodeInternal)
	}
	p.o.Recorder.End(r)
}

// endRecorded ends what the attempt has recorded. One that was never begun has used no decision.
func (t *ticket) endRecorded(o *pdflow.Outcome) {
	r := t.recorded
	if r == nil {
		return
	}
	t.recorded = nil
	if o.Mode == "" {
		return
	}
	var came seen
	came.tell(o, t.at)
	r.Result = Result{TTFT: seconds(came.ttftCame), ITL: seconds(came.itlCame), Took: t.s.o.Now().Sub(t.at),
		Output: int(o.Usage.Output), Cached: int(o.Usage.Cached)}
	if o.Err != nil {
		r.Result.Error = string(o.Err.Code)
	}
	t.s.o.Recorder.End(r)
}

const (
	significant = 8 // bits, of whole numbers that are recorded
	shortAge    = 10 * time.Millisecond
	shortRand   = 1<<16 - 1
)

// shorten rounds a candidate's figures, so that few bytes record exactly what is decided on: by 0.4 % at most, which is
// far less than what any of them is wrong by.
func (c *Candidate) shorten() {
	c.Queue, c.QueueTokens, c.Running = short(c.Queue), short(c.QueueTokens), short(c.Running)
	c.Context, c.Coming, c.ComingContext = short(c.Context), short(c.Coming), short(c.ComingContext)
	c.Moving, c.KV.Free, c.Cached = short(c.Moving), short(c.KV.Free), short(c.Cached)
	c.Prefilled = float64(short(int(c.Prefilled + .5)))
	c.Age -= (c.Age+shortAge/2)%shortAge - shortAge/2
}

func short(n int) int {
	if uint(n) < 1<<significant {
		return n
	}
	return shorter(n)
}

func shorter(n int) int {
	if n < 0 {
		return n
	}
	e := bits.Len(uint(n)) - significant
	return (n + 1<<(e-1)) >> e << e
}

// settle makes a speed change by steps of 2 %. What is learnt moves by less with each request, and a record has a line
// for each change.
func (s *speed) settle(v *Speed) {
	for i, x := range [...]*float64{&v.Base, &v.PerRequest, &v.PerContext, &v.PerPrompt} {
		*x = settle(&s[i], *x)
	}
}

func settle(last *atomic.Uint64, x float64) float64 {
	const step, digits = 0.02, 3
	old := math.Float64frombits(last.Load())
	if math.Abs(x-old) <= step*old {
		return old
	}
	if round, err := strconv.ParseFloat(strconv.FormatFloat(x, 'g', digits, 64), 64); err == nil {
		x = round
	}
	last.Store(math.Float64bits(x))
	return x
}
