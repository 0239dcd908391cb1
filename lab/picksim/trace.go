// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
)

// entry is one request of a trace: a line of JSON. Its prompt is a list of segments. Equal ids stand for equal texts,
// so prompts that begin with the same segments share a prefix.
//
// Lines of Mooncake's published traces (timestamp in milliseconds, input_length and output_length in tokens, hash_ids
// for blocks of 512 tokens) are read too.
type entry struct {
	At       float64   `json:"at"` // seconds from the beginning
	Session  string    `json:"session,omitempty"`
	Segments []segment `json:"segments"`
	Output   int       `json:"output"` // tokens

	Timestamp    float64 `json:"timestamp,omitempty"`
	InputLength  int     `json:"input_length,omitempty"`
	OutputLength int     `json:"output_length,omitempty"`
	HashIDs      []int64 `json:"hash_ids,omitempty"`
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

// check turns an entry of Mooncake's form into the other one, and returns an error if the entry is wrong.
func (e *entry) check() error {
	if len(e.HashIDs) > 0 {
		e.At, e.Output = e.Timestamp/1000, e.OutputLength
		left := e.InputLength
		for _, id := range e.HashIDs {
			n := min(left, mooncakeBlock)
			e.Segments = append(e.Segments, segment{"block-" + strconv.FormatInt(id, 10), n * tokenBytes})
			left -= n
		}
		e.Timestamp, e.InputLength, e.OutputLength, e.HashIDs = 0, 0, 0, nil
	}
	size := 0
	for _, s := range e.Segments {
		if s.Bytes < 0 || s.Bytes > promptMost {
			return errors.New("a segment is smaller than 0 bytes or larger than 4 MiB")
		}
		size += s.Bytes
	}
	switch {
	case size == 0 || size > promptMost:
		return errors.New("the prompt is empty or above 4 MiB")
	case e.Output < 1 || e.Output > outputMost:
		return errors.New("output is not 1 to 1,048,576 tokens")
	case !(e.At >= 0 && e.At < 1e9):
		return errors.New("the time is not 0 or later")
	}
	return nil
}

func readTrace(name string) ([]entry, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var all []entry
	lines := bufio.NewScanner(f)
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
	if len(all) == 0 {
		return nil, errors.New("the trace is empty")
	}
	byTime(all)
	return all, nil
}

func writeTrace(name string, trace []entry) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	enc := json.NewEncoder(w)
	for i := range trace {
		if err = enc.Encode(&trace[i]); err != nil {
			break
		}
	}
	return errors.Join(err, w.Flush(), f.Close())
}

func byTime(trace []entry) {
	slices.SortStableFunc(trace, func(a, b entry) int { return cmp.Compare(a.At, b.At) })
}

// load describes a generated trace. It has conversations of some turns, each with one of a few system prompts, of which
// some are far more popular than others, and single prompts that share nothing.
type load struct {
	rate, seconds float64
	systems       int
	systemBytes   int     // of the largest system prompt; the smallest has a quarter of it
	turns         int     // at most
	think         float64 // seconds between a response's request and the next, on average
	single        float64 // share of requests whose prompt shares nothing
}

func usualLoad() load {
	return load{rate: 12, seconds: 240, systems: 24, systemBytes: 24 << 10, turns: 6, think: 12, single: .25}
}

func (g load) generate(seed uint64) []entry {
	r := rand.New(rand.NewPCG(seed, 1)) //nolint:gosec // the same trace each time
	sizes := make([]int, g.systems)
	shares := make([]float64, g.systems)
	sum := 0.0
	for i := range sizes {
		sizes[i] = g.systemBytes/4 + r.IntN(g.systemBytes*3/4)
		sum += 1 / float64(i+1)
		shares[i] = sum
	}
	var all []entry
	n := 0
	for at := r.ExpFloat64() / g.rate; at < g.seconds; at += r.ExpFloat64() / g.rate {
		n++
		session := "s" + strconv.Itoa(n)
		if r.Float64() < g.single {
			all = append(
				all, entry{At: at, Session: session, Segments: []segment{{session, 1000 + r.IntN(12_000)}},
					Output: output(r)},
			)
			continue
		}
		system, _ := slices.BinarySearch(shares, r.Float64()*sum)
		segments := []segment{{"system" + strconv.Itoa(system), sizes[system]}}
		when := at
		for turn := range 1 + r.IntN(g.turns) {
			segments = append(segments, segment{fmt.Sprintf("%s question %d", session, turn), 100 + r.IntN(1500)})
			out := output(r)
			all = append(all, entry{At: when, Session: session, Segments: slices.Clone(segments), Output: out})
			segments = append(segments, segment{fmt.Sprintf("%s answer %d", session, turn), out * tokenBytes})
			when += 4 + r.ExpFloat64()*g.think
		}
	}
	byTime(all)
	return all
}

// output returns the length of a response in tokens. Most are short, some are long.
func output(r *rand.Rand) int { return int(min(max(math.Exp(4.7+.7*r.NormFloat64()), 8), 1200)) }
