// SPDX-License-Identifier: Apache-2.0

package verdict_test

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/internal/verdict"
)

const (
	tokens = `data: {"choices":[{"text":"a"}]}` + "\n\n"
	abort  = `data: {"choices":[{"text":"","finish_reason": "abort"}]}` + "\n\n"
	done   = "data: [DONE]\n\n"
)

// pass sends a stream through a tail in pieces of n bytes and returns what may go to the client.
func pass(stream string, n int) string {
	t := verdict.NewTail(true, "recomputed")
	var out strings.Builder
	for len(stream) > 0 {
		piece := stream[:min(n, len(stream))]
		stream = stream[len(piece):]
		if cut := t.Stream([]byte(piece), stream == ""); cut >= 0 {
			out.WriteString(piece[:cut])
			return out.String()
		}
		out.WriteString(piece)
	}
	return out.String()
}

// However the reads cut it, a stream in which the engine gave up never gets its [DONE].
func TestAStreamThatGaveUpIsNotDone(t *testing.T) {
	for name, c := range map[string]struct {
		stream string
		whole  bool
	}{
		"whole":   {tokens + done, true},
		"aborted": {tokens + abort + done, false},
		"recomputed": {tokens + `data: {"choices":[{"stop_reason":"recomputed"}]}` + "\n\n" + done,
			false},
		"the client's own words": {`data: {"choices":[{"text":"\"finish_reason\":\"abort\""}]}` + "\n\n" + done,
			true},
		"a stop string of that name": {`data: {"choices":[{"text":"abort"}]}` + "\n\n" + done, true},
	} {
		for n := 1; n <= len(c.stream); n++ {
			got := pass(c.stream, n)
			if c.whole {
				assert.Equal(t, c.stream, got, "%s in pieces of %d", name, n)
			} else {
				assert.NotContains(t, got, "[DONE]\n", "%s in pieces of %d", name, n)
			}
		}
	}
}

// A mark is found up to 2 KB before the end, whatever went by before it in pieces of any size, and farther where each
// event comes by itself.
func TestTheEndOfALongStreamIsKept(t *testing.T) {
	event := `data: {"choices":[{"text":"` + strings.Repeat("x", 100) + `"}]}` + "\n\n"
	for before := range 40 {
		stream := strings.Repeat(event, before) + abort + strings.Repeat(event, 14) + done
		for _, n := range []int{1, 7, 100, 300, 999, 1024, 2047, 2500, 3071, 3072, 3073, 4095, 4096, 6000} {
			assert.NotContains(t, pass(stream, n), "[DONE]\n", "in pieces of %d after %d events", n, before)
		}
		tail, cut := verdict.NewTail(true, ""), -1
		for _, piece := range slices.Concat(slices.Repeat([]string{event}, before), []string{abort},
			slices.Repeat([]string{event}, 40), []string{done}) {
			assert.Equal(t, -1, cut)
			cut = tail.Stream([]byte(piece), piece == done)
		}
		assert.Equal(t, 0, cut, "after %d events", before)
	}
}

// Each open stream holds a tail.
func TestATailIsSmall(t *testing.T) {
	event := []byte(`data: {"choices":[{"text":"` + strings.Repeat("x", 200) + `"}]}` + "\n\n")
	const tails = 1000
	held := make([]verdict.Tail, tails)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range held {
		held[i] = verdict.NewTail(true, "")
		for range 100 {
			held[i].Stream(event, false)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	assert.LessOrEqual(t, (after.HeapAlloc-before.HeapAlloc)/tails, uint64(1<<10+100), "four events")
	runtime.KeepAlive(held)
}

// Short events do not push out what the last of them say, nor does an event that comes in many pieces.
func TestTheLastEventsAreKept(t *testing.T) {
	usage := `data: {"choices":[],"usage":{}}` + "\n\n"
	for size := 1; size < 4000; size += 61 {
		event := `data: {"choices":[{"text":"` + strings.Repeat("x", size) + `"}]}` + "\n\n"
		long := `data: {"choices":[{"finish_reason":"abort","text":"` + strings.Repeat("y", min(size, 2900)) + `"}]}`
		for _, last := range [][]string{
			{abort, done},
			{abort, usage, done},
			{abort + usage, done},
			{abort[:20], abort[20:], usage[:10], usage[10:], done},
			append(strings.SplitAfter(long+"\n\n", "y"), done),
		} {
			tail, cut := verdict.NewTail(true, ""), -1
			for range 50 {
				assert.Equal(t, -1, tail.Stream([]byte(event), false))
			}
			for _, piece := range last {
				assert.Equal(t, -1, cut)
				cut = tail.Stream([]byte(piece), piece == done)
			}
			assert.Equal(t, 0, cut, "after events of %d bytes: %.60q", size, last)
		}
	}
}

// Each string is a piece of a stream.
func TestMarksOutsideOfTheLastBytes(t *testing.T) {
	event := func(n int) string {
		const begin, end = `data: {"choices":[{"text":"`, `"}]}` + "\n\n"
		return begin + strings.Repeat("x", n-len(begin)-len(end)) + end
	}
	last := `"abort","finish_reason":null}]}` + "\n\n"
	last += event(3072 - len(last)) // as much as is kept of a large piece
	for name, c := range map[string]struct {
		pieces []string
		whole  bool
	}{
		"more than 3 KB after the mark": {[]string{abort, event(1400), event(1400), event(1400), done}, false},
		"a large piece after the mark":  {[]string{event(100), abort, event(3900), event(3900), done}, false},
		"within a large piece": {[]string{event(100), event(3900) + abort + event(3900), event(3900), done},
			false},
		"early in the last piece": {[]string{event(100), abort + event(3900) + done}, false},
		"cut, before a large piece": {[]string{event(100), abort[:len(abort)-9], abort[len(abort)-9:] + event(3900),
			event(3900), done}, false},
		"cut, before a piece of as much as is kept": {[]string{event(3000) + abort[:len(abort)-9],
			abort[len(abort)-9:] + event(3072-9), event(3000), event(3000), done}, false},
		"the end of one piece is not the end of another": {[]string{event(3000), event(60), event(60), event(60),
			`data: {"choices":[{"text":"hi","finish_reason":`,
			`null}]}` + "\n\n" + event(1000) + `data: {"choices":[{"text":` + last, event(100), done}, true},
	} {
		tail, cut := verdict.NewTail(true, ""), -1
		for _, piece := range c.pieces {
			assert.Equal(t, -1, cut, name)
			cut = tail.Stream([]byte(piece), strings.HasSuffix(piece, done))
		}
		assert.Equal(t, c.whole, cut < 0, name)
	}
}

// Clients stop reading at [DONE]: it is held back also where more follows it in the same read.
func TestBytesBehindTheEndDoNotHideIt(t *testing.T) {
	for _, more := range []string{done, ": a comment that is longer than the end\n\n", strings.Repeat("x", 5000)} {
		tail := verdict.NewTail(true, "")
		assert.Equal(t, -1, tail.Stream([]byte(tokens+abort), false))
		assert.Zero(t, tail.Stream([]byte(done+more), false), "%.50q", more)
		tail = verdict.NewTail(true, "")
		assert.Equal(t, -1, tail.Stream([]byte(abort), false))
		assert.Equal(t, len(tokens), tail.Stream([]byte(tokens+done+more), false), "%.50q", more)
		tail = verdict.NewTail(true, "")
		assert.Equal(t, -1, tail.Stream([]byte(tokens+done+more), true))
	}
}

func TestWholeResponses(t *testing.T) {
	for body, want := range map[string]bool{
		`{"choices":[{"text":"a","finish_reason":"length"}]}`:              false,
		`{"choices":[{"text":"a","finish_reason" : "abort"}]}`:             true,
		`{"meta_info":{"finish_reason":{"type":"abort"}}}`:                 true,
		`{"choices":[{"text":"\"finish_reason\":\"abort\""}]}`:             false,
		`{"choices":[{"text":"` + strings.Repeat("x", 2000) + `"}],"a":1}`: false,
	} {
		for n := 1; n <= len(body); n += 7 {
			tail, found := verdict.NewTail(false, "recomputed"), false
			for rest := body; rest != "" && !found; {
				piece := rest[:min(n, len(rest))]
				rest = rest[len(piece):]
				found = tail.Whole([]byte(piece), rest == "") >= 0
			}
			assert.Equal(t, want, found, "%.60s in pieces of %d", body, n)
		}
	}
}

func TestEvents(t *testing.T) {
	for data, want := range map[string][2]bool{ // an error, a preamble
		`{"error":{"message":"x"}}`:                                           {true, false},
		`{"type":"error","error":{"type":"api_error"}}`:                       {true, false},
		`{"type":"response.failed","response":{"error":{}}}`:                  {true, false},
		`{"error":null,"choices":[]}`:                                         {false, false},
		`{"choices":[{"delta":{"content":"\"error\""}}]}`:                     {false, false},
		`{"choices":[{"delta":{"role":"assistant","content":""}}]}`:           {false, true},
		`{"choices":[{"delta":{"role":"assistant","content":"a"}}]}`:          {false, false},
		`{"choices":[{"delta":{"role":"assistant"},"finish_reason":"stop"}]}`: {false, false},
		`{"type":"message_start"}`:                                            {false, true},
	} {
		assert.Equal(t, want, [2]bool{verdict.IsError([]byte(data)), verdict.IsPreamble([]byte(data))}, data)
	}
}

func TestUsage(t *testing.T) {
	counts := `{"completion_tokens":3}`
	for end, want := range map[string]string{
		`"choices":[],"usage":` + counts + `}`:           counts,
		`"choices":[],"usage": ` + counts + `,"x":null}`: counts,
		`"usage":null}`: "",
		`"text":"\"usage\":{\"completion_tokens\":9}"}`: "",
		// too far from the end to be searched for
		`"usage":` + counts + strings.Repeat(" ", 3000):                   "",
		`"usage":{"completion_tokens":1}}` + "\n\n" + `"usage":` + counts: counts,
	} {
		got := verdict.Usage([]byte(end), "usage")
		assert.Equal(t, want == "", got == "", end)
		assert.True(t, strings.HasPrefix(got, want), "%s: %s", end, got)
	}
}

// Each piece of each stream is searched.
func TestASearchAllocatesNothing(t *testing.T) {
	event := `data: {"choices":[{"text":"a","finish_reason":null,"stop_reason":null}]}` + "\n\n"
	piece, outer := []byte(strings.Repeat(event, 200)), verdict.Outer{}
	tail := verdict.NewTail(true, "recomputed")
	tail.Stream(piece, false)
	assert.Zero(t, testing.AllocsPerRun(100, func() { tail.Stream(piece, false) }))
	assert.Zero(t, testing.AllocsPerRun(100, func() { outer.GaveUp(piece) }))
}
