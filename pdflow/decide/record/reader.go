// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// LineError says which line of a file cannot be read, and why.
type LineError struct {
	Line    int // 1 is the header
	Problem Problem
}

// Problem is why a line cannot be read.
type Problem string

// The problems.
const (
	Cut      Problem = "cut off"            // the last line, of a writer that was killed
	Damaged  Problem = "damaged"            // it is no line that pdkit writes
	Newer    Problem = "of a newer pdkit"   // a JSON object of a kind that is not known
	Lost     Problem = "without an engine"  // the line of one of its engines is damaged
	Headless Problem = "without its header" // of a file behind another one, whose first line is damaged
)

// ErrEmpty is what Read says of a file that has no decision because not even its header was written whole: the writer
// was killed, or the disk was full.
var ErrEmpty = errors.New("it is empty, or cut off before its first decision")

func (e *LineError) Error() string { return fmt.Sprintf("line %d is %s", e.Line, string(e.Problem)) }

const (
	longestLine = 64 << 10 // bytes
	beginning   = `{"pdkitDecisions":`
)

// Read reads a file, or several that were joined. The error says that it does not begin with the header of a version
// that is known; [ErrEmpty] is one. Entries come in the order of their ends, with those that were decided before the
// file began at times below 0. They are the caller's to keep. A line that cannot be read is a *[LineError] in the place
// of an entry, and the next lines go on; any other error is the reader's, and the last.
func Read(from io.Reader) (Header, iter.Seq2[*Entry, error], error) {
	r := &reader{in: bufio.NewReaderSize(from, longestLine)}
	line, whole, err := r.next()
	if err != nil && !errors.Is(err, io.EOF) {
		return Header{}, nil, err
	}
	h, _ := headerIn(line)
	switch text := bytes.Trim(line, "\x00 \r\n"); {
	case h != nil && h.Version > Version:
		return *h, nil, fmt.Errorf("a newer pdkit has written it: its version is %d, and %d is the newest known here",
			h.Version, Version)
	case h != nil:
		r.header = h
		return *h, r.entries, nil
	case !whole && bytes.HasPrefix(text, []byte(beginning)[:min(len(text), len(beginning))]):
		return Header{}, nil, ErrEmpty
	}
	return Header{}, nil, errors.New("it does not begin as a record of decisions does")
}

// headerIn returns the header that a line is, or has behind what was left of a file that was cut off before this one
// was joined to it; nil: there is none.
func headerIn(line []byte) (h *Header, behind bool) {
	from := max(0, bytes.LastIndex(line, []byte(beginning)))
	h = &Header{}
	if json.Unmarshal(line[from:], h) != nil || h.Version <= 0 {
		return nil, false
	}
	return h, from > 0
}

type reader struct {
	in      *bufio.Reader
	line    int
	header  *Header
	skip    Problem // of all lines up to the next header
	last    uint64  // number of an engine or link
	engines [2 * windowMost]knownEngine
	links   [2 * windowMost]linkLine
}

type knownEngine struct {
	engineLine
	id string
}

// next returns the next line, which is valid until the one after it. whole is false for the last one without an end. Of
// a line that is too long it returns the end.
func (r *reader) next() (line []byte, whole bool, err error) {
	r.line++
	line, err = r.in.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) { // pdkit writes no such line
		var before []byte
		for errors.Is(err, bufio.ErrBufferFull) {
			before = append(before[:0], line[len(line)/2:]...)
			line, err = r.in.ReadSlice('\n')
		}
		line = append(before, line...)
	}
	return line, err == nil, err
}

func (r *reader) entries(yield func(*Entry, error) bool) {
	for {
		line, whole, err := r.next()
		if err != nil && !errors.Is(err, io.EOF) {
			yield(nil, err)
			return
		}
		if len(bytes.TrimSpace(line)) > 0 {
			entry, problem := r.read(line)
			if problem == Damaged && !whole {
				problem = Cut
			}
			if problem != "" && !yield(nil, &LineError{r.line, problem}) || entry != nil && !yield(entry, nil) {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// begin begins the next file of those that were joined.
func (r *reader) begin(h *Header) {
	*r = reader{in: r.in, line: r.line, header: h}
	if h.Version > Version {
		r.skip = Newer
	}
}

// follows reports whether a number comes behind those that the file has, as all do. Else the header of another file is
// missing before it.
func (r *reader) follows(number uint64) bool {
	if number <= r.last {
		r.skip = Headless
		return false
	}
	r.last = number
	return true
}

// line has the members of all kinds of lines.
type line struct {
	Engine uint64     `json:"engine"`
	ID     string     `json:"id"`
	Speed  [4]float64 `json:"speed"`
	KV     int        `json:"kv"`

	Link           uint64  `json:"link"`
	TokenBytes     int     `json:"tokenBytes"`
	BytesPerSecond float64 `json:"bytesPerSecond"`

	At      *float64   `json:"at"`
	Action  string     `json:"action"`
	Reason  string     `json:"reason"`
	Attempt int        `json:"attempt"`
	Instead string     `json:"instead"`
	Error   string     `json:"error"`
	Result  [5]float64 `json:"result"`
	Data    string     `json:"data"`
}

// read reads a line. It returns neither an entry nor a problem for a line that entries refer to.
func (r *reader) read(raw []byte) (*Entry, Problem) {
	var l line
	known := json.Unmarshal(raw, &l) == nil
	number := max(l.Engine, l.Link)
	if !known || number == 0 && (l.At == nil || l.Data == "") {
		return nil, r.other(raw, known)
	}
	switch {
	case r.skip != "" || number > 0 && !r.follows(number):
		return nil, r.skip
	case l.Engine > 0:
		x := &r.engines[l.Engine%uint64(len(r.engines))]
		x.engineLine = engineLine{l.Engine, decide.Speed{Base: l.Speed[0], PerRequest: l.Speed[1],
			PerContext: l.Speed[2], PerPrompt: l.Speed[3]}, l.KV}
		x.id = l.ID
		return nil, ""
	case l.Link > 0:
		r.links[l.Link%uint64(len(r.links))] = linkLine{l.Link, l.TokenBytes, l.BytesPerSecond}
		return nil, ""
	}
	return r.entry(&l)
}

// other reads a line that is of no decision: a header, or one that cannot be read.
func (r *reader) other(raw []byte, known bool) Problem {
	h, behind := headerIn(raw)
	switch {
	case h != nil:
		if r.begin(h); behind {
			return Cut
		}
		return ""
	case r.skip != "":
		return r.skip
	case known:
		return Newer
	}
	return Damaged
}

func (r *reader) entry(l *line) (*Entry, Problem) {
	const timeMost = 1e9 // seconds
	if !(*l.At > -timeMost && *l.At < timeMost) {
		return nil, Damaged
	}
	e := &Entry{Header: r.header, Line: r.line, At: duration(*l.At, time.Second)}
	e.Attempt, e.Instead = max(l.Attempt, 1), l.Instead
	e.Time = r.header.Began.Add(e.At)
	e.Result = decide.Result{TTFT: duration(l.Result[0], time.Millisecond),
		ITL: duration(l.Result[1], time.Millisecond), Took: duration(l.Result[2], time.Millisecond),
		Output: count(l.Result[3]), Cached: count(l.Result[4]), Error: l.Error}
	e.Decision.Reason = l.Reason
	found := false
	for a := decide.Undecided; a <= decide.Refuse; a++ {
		if a.String() == l.Action {
			e.Decision.Action, found = a, true
		}
	}
	if !found {
		return nil, Newer
	}
	if problem := r.unpack(&unpacker{in: l.Data}, e); problem != "" {
		return nil, problem
	}
	return e, ""
}

func duration(x float64, unit time.Duration) time.Duration {
	const most = 1e18
	return time.Duration(math.Round(max(-most, min(most, x*float64(unit)))))
}

func count(x float64) int {
	const most = 1 << 30
	return int(max(0, min(most, x)))
}

const listMost = decide.CandidatesMost

// unpack reads what encoder.pack has written.
func (r *reader) unpack(u *unpacker, e *Entry) Problem {
	in, d := &e.Input, &e.Decision
	lines, link := u.number(), u.number()
	in.Prompt, in.Limit = int(unsigned(u.number())), int(unsigned(u.number()))
	in.Class.TTFT, in.Class.ITL = time.Duration(unsigned(u.number())), time.Duration(unsigned(u.number()))
	in.Rand, in.Exact, in.Class.Refusable = u.number(), u.bool(), u.bool()
	in.Prefill, in.Decode = list(u), list(u)
	d.Prefill, d.Decode = int(unsigned(u.number())), int(unsigned(u.number()))
	d.TTFT, d.ITL = time.Duration(unsigned(u.number())), time.Duration(unsigned(u.number()))
	d.RetryAfter = time.Duration(unsigned(u.number()))
	var served [2]struct{ place, back int }
	for i := range served {
		if served[i].place = u.upTo(2*listMost + 1); served[i].place > len(in.Prefill)+len(in.Decode) {
			served[i].back = u.upTo(windowMost)
		}
	}
	for role, list := range [2][]decide.Candidate{in.Prefill, in.Decode} {
		width := int(u.bits(4))
		for i := range list {
			x := r.engine(lines - u.bits(width))
			if x == nil {
				u.lacks = true
				continue
			}
			list[i].Speed, list[i].KV.Total = x.speed, x.memory
			e.Engines[role] = append(e.Engines[role], x.id)
		}
	}
	unpackCandidates(u, in.Prefill)
	unpackCandidates(u, in.Decode)
	if link > 0 {
		x := &r.links[(lines-link+1)%uint64(len(r.links))]
		u.lacks = u.lacks || x.number != lines-link+1
		in.TokenBytes, in.Link = x.tokenBytes, x.link
	}
	b := beginnings{size: u.upTo(math.MaxInt32), n: u.upTo(levelsMost)}
	for i := range b.n {
		b.bits[i] = u.bits(levelBits(i))
	}
	switch {
	case u.wrong:
		return Damaged
	case u.lacks:
		return Lost
	}
	e.Prefixes = b.prefixes(in.Prompt)
	for i, to := range [2]*string{&e.Prefill, &e.Decode} {
		if x := r.engine(lines - uint64(served[i].back)); served[i].place > len(e.Engines[0])+len(e.Engines[1]) {
			if x == nil {
				return Lost
			}
			*to = x.id
		} else if served[i].place > 0 {
			*to = slices.Concat(e.Engines[0], e.Engines[1])[served[i].place-1]
		}
	}
	return ""
}

// engine is what an engine's line with a number says; nil if there was none.
func (r *reader) engine(number uint64) *knownEngine {
	x := &r.engines[number%uint64(len(r.engines))]
	if number == 0 || x.number != number {
		return nil
	}
	return x
}

func list(u *unpacker) []decide.Candidate {
	if n := u.upTo(listMost); n > 0 {
		return make([]decide.Candidate, n)
	}
	return nil
}
