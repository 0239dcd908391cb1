// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// Trace is a list of requests, in the order of time.
type Trace struct {
	entries  []entry
	requests int     // how many of them to send: more than there are repeats the trace
	speed    float64 // so many times as fast as it was
}

// entry is one request of a trace: a line of JSON. Its prompt is a list of segments. Equal ids stand for equal texts,
// so prompts that begin with the same segments share a prefix. Lines of Mooncake's published traces are read, too:
// their prompts are blocks of 512 tokens, and equal hash ids stand for equal texts.
type entry struct {
	At       float64   `json:"at"` // seconds from the beginning
	Session  string    `json:"session,omitempty"`
	Segments []segment `json:"segments,omitempty"`
	Answer   string    `json:"answer,omitempty"` // the id of the segment that later prompts have for the response
	Output   int       `json:"output,omitempty"` // tokens

	Timestamp    float64 `json:"timestamp,omitempty"` // milliseconds
	InputLength  int     `json:"input_length,omitempty"`
	OutputLength int     `json:"output_length,omitempty"`
	HashIDs      []int32 `json:"hash_ids,omitempty"`

	// Of a recorded request: what its client was promised, and that its length is an estimate.
	class     decide.Class
	estimated bool
}

type segment struct {
	ID    string `json:"id"`
	Bytes int    `json:"bytes"`
}

const (
	tokenBytes    = 4
	mooncakeBlock = 512     // tokens
	promptMost    = 4 << 20 // bytes
	outputMost    = 1 << 20 // tokens
)

// check returns an error if the entry is wrong. It moves Mooncake's members to those of the other form, except the
// hash ids.
func (e *entry) check() error {
	size := 0
	if len(e.HashIDs) > 0 {
		e.At, e.Output = e.Timestamp/1000, e.OutputLength
		size = e.InputLength * tokenBytes
		if (e.InputLength+mooncakeBlock-1)/mooncakeBlock != len(e.HashIDs) {
			return errors.New("hash_ids does not have an id for each 512 tokens of input_length")
		}
	}
	for _, s := range e.Segments {
		if s.Bytes < 0 || s.Bytes > promptMost {
			return errors.New("a segment is smaller than 0 bytes or larger than 4 MiB")
		}
		size += s.Bytes
	}
	switch {
	case size <= 0 || size > promptMost:
		return errors.New("the prompt is empty or above 4 MiB")
	case e.Output < 1 || e.Output > outputMost:
		return errors.New("output is not 1 to 1,048,576 tokens")
	case !(e.At >= 0 && e.At < 1e9):
		return errors.New("the time is not 0 or later")
	case len(e.HashIDs) > 0 && len(e.Segments) > 0:
		return errors.New("it has both hash_ids and segments")
	}
	return nil
}

// pieces calls yield with each segment of the prompt: a number that stands for its text, and its bytes.
func (e *entry) pieces(yield func(id uint64, size int)) {
	left := e.InputLength
	for _, id := range e.HashIDs {
		n := min(left, mooncakeBlock)
		yield(mix(uint64(id), 1), n*tokenBytes)
		left -= n
	}
	for _, s := range e.Segments {
		yield(hashOf(s.ID), s.Bytes)
	}
}

// size is the length of the prompt in bytes.
func (e *entry) size() (n int) {
	e.pieces(func(_ uint64, size int) { n += size })
	return n
}

// ReadTrace reads a trace: JSON objects, one a line, as Write writes them or as Mooncake has published them.
func ReadTrace(from io.Reader) (*Trace, error) {
	var all []entry
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 16<<20)
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var e entry
		err := json.Unmarshal(lines.Bytes(), &e)
		if err == nil {
			err = e.check()
		}
		if err != nil {
			return nil, fmt.Errorf("line %d of the trace: %w", n, err)
		}
		all = append(all, e)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return newTrace(all)
}

func newTrace(all []entry) (*Trace, error) {
	if len(all) == 0 {
		return nil, errors.New("the trace is empty")
	}
	slices.SortStableFunc(all, func(a, b entry) int { return cmp.Compare(a.At, b.At) })
	return &Trace{entries: all, requests: len(all), speed: 1}, nil
}

// Write writes the trace as JSON lines.
func (t *Trace) Write(to io.Writer) error {
	enc := json.NewEncoder(to)
	for i := range t.entries {
		if err := enc.Encode(&t.entries[i]); err != nil {
			return err
		}
	}
	return nil
}

// Requests is how many requests the trace sends.
func (t *Trace) Requests() int { return t.requests }

// Repeat lets the trace send so many requests. Beyond its end it begins anew, with other texts of the same lengths.
func (t *Trace) Repeat(requests int) error {
	if requests < 1 {
		return errors.New("the number of requests is 1 or more")
	}
	t.requests = requests
	return nil
}

// Speed lets the requests come so many times as fast.
func (t *Trace) Speed(times float64) error {
	if !(times > 0 && times < 1e6) {
		return errors.New("the speed is a number above 0")
	}
	t.speed = times
	return nil
}

// at returns the request with number i, the time when it comes, and how often the trace has begun anew before.
func (t *Trace) at(i int) (e *entry, at float64, round int) {
	n := len(t.entries)
	e, round = &t.entries[i%n], i/n
	last := t.entries[n-1].At
	whole := last + last/float64(max(n-1, 1)) // a round, with a usual pause after it
	return e, (e.At + float64(round)*whole) / t.speed, round
}

// conversations is the trace conversation_trace.jsonl of Mooncake (see NOTICE): a line for each request, with its time
// in milliseconds, the tokens of prompt and response, and the hash ids of the prompt's blocks as ranges, first+number.
//
//go:embed conversation.txt.gz
var conversations []byte

// Mooncake returns the trace of conversations that was published with Mooncake (FAST '25): 12,031 requests in an hour,
// with prompts of 12,035 tokens on average and responses of 343.
func Mooncake() (*Trace, error) {
	unzip, err := gzip.NewReader(bytes.NewReader(conversations))
	if err != nil {
		return nil, err
	}
	var all []entry
	lines := bufio.NewScanner(unzip)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) < 4 {
			return nil, errors.New("the trace is broken")
		}
		e := entry{}
		e.Timestamp, _ = strconv.ParseFloat(words[0], 64)
		e.InputLength, _ = strconv.Atoi(words[1])
		e.OutputLength, _ = strconv.Atoi(words[2])
		for _, word := range words[3:] {
			first, number, _ := strings.Cut(word, "+")
			id, _ := strconv.Atoi(first)
			n, _ := strconv.Atoi(number)
			for k := range n {
				e.HashIDs = append(e.HashIDs, int32(id+k))
			}
		}
		if err := e.check(); err != nil { // what did not parse is 0
			return nil, err
		}
		all = append(all, e)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return newTrace(all)
}
