// SPDX-License-Identifier: Apache-2.0

package record

import (
	"encoding/json"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/pdflow/decide"
)

const (
	lineMost   = 400  // bytes of a decision's line, with its end
	windowMost = 1000 // lines of engines, to which a decision refers back
	linesKept  = 8    // of an engine
	ageUnit    = 10 * time.Millisecond
)

// engineLine is a line that says which engine a number stands for from then on.
type engineLine struct {
	number uint64
	speed  decide.Speed
	memory int // tokens of KV
}

// linkLine says the same of what moves KV.
type linkLine struct {
	number     uint64
	tokenBytes int
	link       float64
}

// encoder writes the lines of one file.
type encoder struct {
	out     []byte                  // lines
	lines   uint64                  // of engines and links, so far
	engines map[string][]engineLine // the last ones
	link    linkLine
	refs    [2][]uint64
	packer  packer
}

func newEncoder() *encoder { return &encoder{engines: map[string][]engineLine{}} }

// header begins a file.
func (e *encoder) header(h *Header) error {
	line, err := json.Marshal(h)
	e.out = append(append(e.out[:0], line...), '\n')
	return err
}

// entry writes the lines of a decision that was made at a time since the file's beginning. ok is false if it cannot be
// written: a number is none, or the line too long for all that it has.
func (e *encoder) entry(at time.Duration, r *decide.Recorded, b *beginnings) (ok bool) {
	e.out = e.out[:0]
	in := &r.Input
	for role, list := range [2][]decide.Candidate{in.Prefill, in.Decode} {
		e.refs[role] = e.refs[role][:0]
		for i := range list {
			number, ok := e.engine(r.Engines[role][i], &list[i])
			if !ok {
				return false
			}
			e.refs[role] = append(e.refs[role], number)
		}
	}
	for _, id := range [...]string{r.Prefill, r.Decode} { // the scheduler may have picked others
		if id != "" && !slices.Contains(r.Engines[0], id) && !slices.Contains(r.Engines[1], id) {
			if _, ok := e.engine(id, &decide.Candidate{Speed: e.last(id).speed}); !ok {
				return false
			}
		}
	}
	if !e.linkOf(in) {
		return false
	}
	before := len(e.out)
	for b.n >= 0 { // the longest prefixes are the first to go
		e.decision(at, r, b)
		if len(e.out)-before <= lineMost {
			return true
		}
		e.out = e.out[:before]
		b.n--
	}
	return false
}

func finite(all ...float64) bool {
	for _, x := range all {
		if math.IsNaN(x) || math.IsInf(x, 0) {
			return false
		}
	}
	return true
}

// engine writes a line for an engine, unless one of its last lines says the same: decisions are written in the order of
// their ends, so that old speeds come again.
func (e *encoder) engine(id string, c *decide.Candidate) (number uint64, ok bool) {
	old := e.engines[id]
	memory := c.KV.Total
	for _, x := range slices.Backward(old) {
		if memory == 0 {
			memory = x.memory
		}
		if x.speed == c.Speed && x.memory == memory && e.lines-x.number < windowMost/2 {
			return x.number, true
		}
	}
	s := &c.Speed
	if !finite(s.Base, s.PerRequest, s.PerContext, s.PerPrompt) {
		return 0, false
	}
	e.lines++
	if len(old) == linesKept {
		old = slices.Delete(old, 0, 1)
	}
	e.engines[id] = append(old, engineLine{e.lines, *s, memory})
	b := append(e.out, `{"engine":`...)
	b = strconv.AppendUint(b, e.lines, 10)
	b = appendString(append(b, `,"id":`...), id)
	b = append(b, `,"speed":[`...)
	for i, x := range [...]float64{s.Base, s.PerRequest, s.PerContext, s.PerPrompt} {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendFloat(b, x, 'g', -1, 64)
	}
	b = append(b, `],"kv":`...)
	e.out = append(strconv.AppendInt(b, int64(memory), 10), "}\n"...)
	return e.lines, true
}

// last is the last line of an engine.
func (e *encoder) last(id string) (x engineLine) {
	if all := e.engines[id]; len(all) > 0 {
		x = all[len(all)-1]
	}
	return x
}

func (e *encoder) linkOf(in *decide.Input) (ok bool) {
	if in.TokenBytes == 0 && in.Link == 0 {
		return true
	}
	if e.link.tokenBytes == in.TokenBytes && e.link.link == in.Link && e.link.number > 0 &&
		e.lines-e.link.number < windowMost/2 {
		return true
	}
	if !finite(in.Link) {
		return false
	}
	e.lines++
	e.link = linkLine{e.lines, in.TokenBytes, in.Link}
	b := append(e.out, `{"link":`...)
	b = strconv.AppendUint(b, e.lines, 10)
	b = strconv.AppendInt(append(b, `,"tokenBytes":`...), int64(in.TokenBytes), 10)
	b = strconv.AppendFloat(append(b, `,"bytesPerSecond":`...), in.Link, 'g', -1, 64)
	e.out = append(b, "}\n"...)
	return true
}

// appendString adds a string as JSON.
func appendString(b []byte, s string) []byte {
	raw, err := json.Marshal(s)
	if err != nil { // no string has one
		return append(b, `""`...)
	}
	return append(b, raw...)
}

// decision adds the line of a decision, without those that it refers to.
func (e *encoder) decision(at time.Duration, r *decide.Recorded, b *beginnings) {
	out := strconv.AppendFloat(append(e.out, `{"at":`...), at.Seconds(), 'f', 4, 64)
	out = append(append(out, `,"action":"`...), r.Decision.Action.String()...)
	out = appendString(append(out, `","reason":`...), r.Decision.Reason)
	if r.Attempt > 1 {
		out = strconv.AppendInt(append(out, `,"attempt":`...), int64(r.Attempt), 10)
	}
	if r.Instead != "" {
		out = appendString(append(out, `,"instead":`...), r.Instead)
	}
	if r.Result.Error != "" {
		out = appendString(append(out, `,"error":`...), r.Result.Error)
	}
	x := &r.Result
	out = strconv.AppendFloat(append(out, `,"result":[`...), ms(x.TTFT, 1), 'f', -1, 64)
	out = strconv.AppendFloat(append(out, ','), ms(x.ITL, 2), 'f', -1, 64)
	out = strconv.AppendFloat(append(out, ','), ms(x.Took, 0), 'f', -1, 64)
	out = strconv.AppendInt(append(out, ','), int64(x.Output), 10)
	out = strconv.AppendInt(append(out, ','), int64(x.Cached), 10)
	e.packer = packer{out: append(out, `],"data":"`...)}
	e.pack(r, b)
	e.packer.end()
	e.out = append(e.packer.out, "\"}\n"...)
}

// ms is a time in milliseconds, of which so many decimals are kept.
func ms(d time.Duration, decimals int) float64 {
	scale := math.Pow10(decimals)
	return math.Round(d.Seconds()*1e3*scale) / scale
}

// pack writes what a decision was made on, and what it says beside its action and reason.
func (e *encoder) pack(r *decide.Recorded, b *beginnings) {
	p, in, d := &e.packer, &r.Input, &r.Decision
	p.number(e.lines)
	link := uint64(0)
	if in.TokenBytes != 0 || in.Link != 0 {
		link = e.lines - e.link.number + 1
	}
	for _, v := range [...]uint64{link, signed(int64(in.Prompt)), signed(int64(in.Limit)), signed(int64(in.Class.TTFT)),
		signed(int64(in.Class.ITL)), in.Rand} {
		p.number(v)
	}
	p.bool(in.Exact)
	p.bool(in.Class.Refusable)
	p.number(uint64(len(in.Prefill)))
	p.number(uint64(len(in.Decode)))
	for _, v := range [...]int64{int64(d.Prefill), int64(d.Decode), int64(d.TTFT), int64(d.ITL), int64(d.RetryAfter)} {
		p.number(signed(v))
	}
	e.served(r, r.Prefill)
	e.served(r, r.Decode)
	e.column(e.refs[0])
	e.column(e.refs[1])
	candidates(p, in.Prefill)
	candidates(p, in.Decode)
	p.number(uint64(b.size))
	p.number(uint64(b.n))
	for i := range b.n {
		p.bits(b.bits[i], levelBits(i))
	}
}

// signed makes small numbers of small ones on both sides of 0.
func signed(v int64) uint64 {
	return uint64(v)<<1 ^ uint64(v>>63)
}

func unsigned(v uint64) int64 {
	return int64(v>>1) ^ -int64(v&1)
}

// served writes which engine served: 0 none, else its place in both lists, or behind them its number.
func (e *encoder) served(r *decide.Recorded, id string) {
	if id == "" {
		e.packer.number(0)
		return
	}
	place := uint64(0)
	for role := range r.Engines {
		for _, x := range r.Engines[role] {
			if place++; x == id {
				e.packer.number(place)
				return
			}
		}
	}
	e.packer.number(place + 1)
	e.packer.number(e.lines - e.last(id).number)
}

// column writes by how many lines the decision refers back to its engines.
func (e *encoder) column(numbers []uint64) {
	width := 0
	for _, n := range numbers {
		width = max(width, bits.Len64(e.lines-n))
	}
	e.packer.bits(uint64(width), 4)
	for _, n := range numbers {
		e.packer.bits(e.lines-n, width)
	}
}
