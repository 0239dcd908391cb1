// SPDX-License-Identifier: Apache-2.0

package resume_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
)

func tokensOf(s string) []int {
	all := make([]int, len(s))
	for i := range len(s) {
		all[i] = int(s[i])
	}
	return all
}

// run is one stream with its breaks.
type run struct {
	engine
	cuts []int // after how many bytes each engine breaks
	keep bool  // the client asked for token ids
}

func (r *run) config() resume.Config {
	c := resume.Config{Chat: r.chat, KeepIDs: r.keep, KeepUsage: r.usage, StopShown: r.shown}
	for _, s := range r.stop {
		c.StopReach = max(c.StopReach, len([]rune(s))-1)
	}
	return c
}

// undisturbed is what the client gets without a break, which is what it gets without this package.
func (r *run) undisturbed() string {
	e := r.engine
	e.id, e.ids = "first", r.keep
	return e.stream(0)
}

// play lets the client read over all breaks. dead says which error a break is.
func (r *run) play(t *testing.T, dead error) string {
	t.Helper()
	s := resume.New(r.config())
	e := r.engine
	e.id, e.ids = "first", true
	var got strings.Builder
	src := e.stream(0)
	for n := 0; ; n++ {
		require.Less(t, n, 10, "the stream does not end: %s", got.String())
		if n < len(r.cuts) {
			src = src[:min(r.cuts[n], len(src))]
		}
		body, err := io.ReadAll(s.Reader(io.MultiReader(strings.NewReader(src), iotest.ErrReader(dead))))
		got.Write(body)
		if err == nil {
			return got.String()
		}
		if s.Over() {
			return got.String() + "data: [DONE]\n\n"
		}
		next, reason := s.Next()
		require.Empty(t, reason, got.String())
		var prompt []int
		require.NoError(t, json.Unmarshal(next.Prompt(), &prompt))
		given := len(prompt) - len(e.prompt)
		require.Equal(t, next.Given(), given)
		require.Len(t, prompt, next.Length())
		require.Equal(t, append(append([]int{}, e.prompt...), e.output[:given]...), prompt)
		e.id, e.chat = "other", false
		src, s = e.stream(given), next
	}
}

var errReset = errors.New("connection reset by peer")

func TestEveryCutGivesTheUndisturbedBytes(t *testing.T) {
	const plain = "Rivers begin as springs."
	const parts = "caf\u00e9 \u20ac5 \U0001f600 \xc3\xc3\xa9 \xe2\x82 end"
	shapes := map[string]engine{
		"plain":            {output: tokensOf(plain)},
		"usage":            {output: tokensOf(plain), usage: true},
		"usage everywhere": {output: tokensOf(plain), usage: true, each: true},
		"escapes":          {output: tokensOf("a\"b\\c\nd\te\x01 </x>")},
		"characters":       {output: tokensOf(parts), usage: true},
		"stop that comes":  {output: tokensOf(plain), stop: []string{"as s", "nowhere"}},
		"stop that stays":  {output: tokensOf(plain), stop: []string{"as s", "nowhere"}, shown: true, usage: true},
		"stop not":         {output: tokensOf(parts), stop: []string{"n\u00e9ver to be"}},
		"one token":        {output: tokensOf("x"), usage: true},
	}
	for name, e := range shapes {
		e.prompt = tokensOf("The prompt")
		for _, chat := range []bool{false, true} {
			for _, keep := range []bool{false, true} {
				r := run{engine: e, keep: keep}
				r.chat = chat
				want, first := r.undisturbed(), r.withIDs()
				for at := r.floor(first); at < len(first); at++ {
					if at%11 > 0 && !strings.Contains(first[at-2:min(at+2, len(first))], "\n\n") {
						continue // all places around events' ends, and some within
					}
					r.cuts = []int{at}
					require.Equal(t, want, r.play(t, errReset), "%s, chat %v, ids %v, cut after %d bytes", name, chat,
						keep, at)
				}
			}
		}
	}
}

// floor is how much of a stream has come before any of it reaches the client: its first token.
func (r *run) floor(first string) int {
	n := strings.Index(first, "\n\n") + 2
	if r.chat {
		n += strings.Index(first[n:], "\n\n") + 2
	}
	return n
}

// withIDs is what the first engine writes.
func (r *run) withIDs() string {
	e := r.engine
	e.id, e.ids = "first", true
	return e.stream(0)
}

func TestSeveralCutsAndJoinedTokens(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for i := range 1500 {
		r := randomRun(random)
		got := r.play(t, io.EOF) // an engine that closes its connection well is dead too
		require.Equal(t, joined(r.undisturbed()), joined(got), "run %d", i)
	}
}

func randomRun(random *rand.Rand) *run {
	r := &run{keep: random.IntN(2) == 0}
	r.prompt = tokensOf("p\u00e9"[:1+random.IntN(3)])
	alphabet := []string{"a", "b", "\"", "\\", "\n", "\u00e9", "\u20ac", "\U0001f600", "\xc3", "\xff"}
	var out strings.Builder
	for range 3 + random.IntN(30) {
		out.WriteString(alphabet[random.IntN(len(alphabet))])
	}
	r.output = tokensOf(out.String())
	r.chat, r.usage, r.shown = random.IntN(2) == 0, random.IntN(2) == 0, random.IntN(4) == 0
	for range random.IntN(3) {
		r.stop = append(r.stop, []string{"ab", "ba\"", "bbb", "\u00e9a", "never seen"}[random.IntN(5)])
	}
	seed := random.IntN(1000)
	r.join = func(i int) bool { return seed%3 == 0 && (i*7919+seed)%5 == 0 }
	first := r.withIDs()
	for n := range 1 + random.IntN(3) {
		at := random.IntN(len(first))
		if n == 0 {
			at = max(at, r.floor(first))
		}
		r.cuts = append(r.cuts, at)
	}
	return r
}

// joined is all that a stream says, however its tokens are spread over events.
func joined(body string) string {
	var text, ids, rest strings.Builder
	for event := range strings.SplitSeq(strings.TrimSpace(body), "\n\n") {
		data := strings.TrimPrefix(event, "data: ")
		var c struct {
			ID      string
			Choices []struct {
				Text  string
				Delta struct {
					Role, Content string
				}
				Finish string `json:"finish_reason"`
				Stop   any    `json:"stop_reason"`
				IDs    []int  `json:"token_ids"`
			}
			Prompt []int `json:"prompt_token_ids"`
			Usage  any
			Print  string `json:"system_fingerprint"`
		}
		if json.Unmarshal([]byte(data), &c) != nil {
			rest.WriteString(data)
			continue
		}
		for _, ch := range c.Choices {
			text.WriteString(ch.Text + ch.Delta.Content)
			for _, id := range ch.IDs {
				fmt.Fprint(&ids, id, " ")
			}
			if ch.Finish != "" || ch.Delta.Role != "" {
				fmt.Fprint(&rest, ch.Delta.Role, ch.Finish, ch.Stop, c.Usage, c.Print)
			}
		}
		if len(c.Choices) == 0 {
			fmt.Fprint(&rest, data)
		}
		if c.ID != "first" {
			fmt.Fprint(&rest, "id ", c.ID)
		}
	}
	return text.String() + "\n" + ids.String() + "\n" + rest.String()
}

func FuzzStream(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Add(uint64(77), uint64(9))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		r := randomRun(rand.New(rand.NewPCG(a, b)))
		require.Equal(t, joined(r.undisturbed()), joined(r.play(t, errReset)))
	})
}

// FuzzReader reads whatever an engine may send: it must not panic, and what it asks another engine for must be JSON.
func FuzzReader(f *testing.F) {
	for _, chat := range []bool{false, true} {
		r := run{engine: engine{prompt: tokensOf("p"), output: tokensOf("abc"), chat: chat, usage: true}}
		f.Add(r.withIDs(), r.withIDs(), chat)
	}
	f.Add("data: {\"choices\":[{}]}\n\ndata: {\"choices\":[]}\n\n", "data: {\"choices\":[{\"text\":\"\\\"}]}\n\n", true)
	f.Fuzz(readAnything)
}

func readAnything(t *testing.T, first, second string, chat bool) {
	s := resume.New(resume.Config{Chat: chat, StopReach: 2})
	_, _ = io.ReadAll(s.Reader(strings.NewReader(first)))
	next, reason := s.Next()
	if next == nil {
		require.NotEmpty(t, reason)
		return
	}
	require.True(t, json.Valid(next.Prompt()), "%s", next.Prompt())
	_, _ = io.ReadAll(next.Reader(strings.NewReader(second)))
}

func TestGarbledStreams(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	garble := func(s string) string {
		b := []byte(s)
		for range random.IntN(4) {
			i, j := random.IntN(len(b)), random.IntN(len(b))
			switch random.IntN(4) {
			case 0:
				b[i] = b[j]
			case 1:
				b = append(b[:i:i], b[min(i+random.IntN(20), len(b)):]...)
			case 2:
				b = append(b[:i:i], append([]byte(s[:j%40]), b[i:]...)...)
			default:
				b[i] = byte(random.IntN(256))
			}
			if len(b) == 0 {
				return s
			}
		}
		return string(b)
	}
	for range 4000 {
		r := run{engine: engine{prompt: tokensOf("p"), output: tokensOf("ab\u00e9"), chat: random.IntN(2) == 0,
			usage: true}}
		e := r.engine
		e.ids, e.chat = true, false
		readAnything(t, garble(r.withIDs()), garble(e.stream(0)), r.chat)
	}
}

// readTo reads a stream of the first engine as far as it goes.
func readTo(c resume.Config, events ...string) (s *resume.Stream, got string, err error) {
	s = resume.New(c)
	b, err := io.ReadAll(s.Reader(strings.NewReader(strings.Join(events, "\n\n") + "\n\n")))
	return s, string(b), err
}

const firstToken = `data: {"id":"c","choices":[{"index":0,"text":"a","finish_reason":null,"prompt_token_ids":[1],` +
	`"token_ids":[5]}]}`

// An engine that makes more tokens than it may fills no memory.
func TestMoreTokensThanTheLimitAreNotKept(t *testing.T) {
	next := `data: {"id":"c","choices":[{"index":0,"text":"b","finish_reason":null,"token_ids":[6,7]}]}`
	for limit, want := range map[int]string{0: "", 3: "", 2: "shape"} {
		s, _, _ := readTo(resume.Config{Limit: limit}, firstToken, next)
		_, reason := s.Next()
		assert.Equal(t, want, reason, limit)
	}
	s, _, _ := readTo(resume.Config{Limit: 2}, firstToken)
	later, reason := s.Next()
	require.Empty(t, reason)
	_, err := io.ReadAll(later.Reader(strings.NewReader(next + "\n\n" + next + "\n\n")))
	assert.ErrorIs(t, err, resume.ErrDiverged)
}

// An event is held until it is whole, and no longer than 16 MiB.
func TestAnEventIsHeldUpToALimit(t *testing.T) {
	for size, want := range map[int]error{12 << 20: io.ErrUnexpectedEOF, 17 << 20: sse.ErrTooLarge} {
		_, _, err := readTo(resume.Config{}, firstToken, ": "+strings.Repeat("x", size))
		assert.ErrorIs(t, err, want, size)
	}
}

// The error of one engine is not the next one's.
func TestTheNextEngineHasNoFault(t *testing.T) {
	s, _, err := readTo(resume.Config{}, firstToken, `data: {"error":{"message":"first"}}`)
	require.ErrorIs(t, err, resume.ErrGaveUp)
	require.Contains(t, string(s.Fault()), "first")
	later, reason := s.Next()
	require.Empty(t, reason)
	_, err = io.ReadAll(later.Reader(strings.NewReader(
		`data: {"choices":[{"index":0,"text":"","finish_reason":"abort"}]}` + "\n\n")))
	require.ErrorIs(t, err, resume.ErrGaveUp)
	assert.Empty(t, later.Fault())
}

// JSON may stand on several lines of data.
func TestAnEventOfSeveralLinesStaysOne(t *testing.T) {
	event := strings.Replace(firstToken, `,"choices":`, ",\ndata: \"choices\":", 1)
	_, got, _ := readTo(resume.Config{}, "id: 7\n"+event)
	assert.Equal(t, "id: 7\n"+strings.NewReplacer("[1]", "null", "[5]", "null").Replace(event)+"\n\n", got)
}

// The role's chunk may have null where others have "": no text of a rescued stream may be lost by it.
func TestContentThatIsNullIsNoText(t *testing.T) {
	chat := func(delta, more string) string {
		return `data: {"id":"c","choices":[{"index":0,"delta":` + delta + `,"finish_reason":null` + more
	}
	role := chat(`{"role":"assistant","content":null}`, `}],"prompt_token_ids":[1]}`)
	two := chat(`{"content":"ab"}`, `,"token_ids":[5,6]}]}`)
	s, _, err := readTo(resume.Config{Chat: true}, role, two)
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	later, reason := s.Next()
	require.Empty(t, reason)
	again := func(text string, id int) string {
		return fmt.Sprintf(`data: {"choices":[{"index":0,"text":%q,"finish_reason":null,"token_ids":[%d]}]}`+"\n\n",
			text, id)
	}
	got, _ := io.ReadAll(later.Reader(strings.NewReader(again("a", 5) + again("b", 6) + again("cd", 7))))
	assert.Contains(t, string(got), `"content":"cd"`)
}

// A large event is searched for its end once, in however many pieces it comes: else one of 7 MB, the ids of a prompt of
// a million tokens, would cost seconds.
func TestALargeEventIsSearchedOnce(t *testing.T) {
	took := func(times, size int) time.Duration {
		in := `data: {"choices":[{"text":"` + strings.Repeat("a", size) + `"}]}` + "\n\ndata: [DONE]\n\n"
		begun := time.Now()
		for range times {
			n, err := io.Copy(io.Discard,
				struct{ io.Reader }{resume.New(resume.Config{}).Reader(strings.NewReader(in))})
			require.NoError(t, err)
			require.Positive(t, n)
		}
		return time.Since(begun)
	}
	var small, large time.Duration
	for range 8 { // other programs may take the processor at any time
		small, large = took(32, 384<<10), took(1, 12<<20)
		if large < 6*small {
			return
		}
	}
	assert.Failf(t, "too slow", "%s for one event, %s for 32 that are as large together; searched again for each "+
		"piece it is 30 times as long", large, small)
}

// The first event has the ids of the prompt, and may be large; the buffer for it is not kept while the stream runs.
func TestALargeEventLeavesNoMemoryBehind(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	next, engine := io.Pipe()
	r := resume.New(resume.Config{}).Reader(next)
	before := heap()
	go func() {
		_, _ = io.WriteString(engine, ":")
		for range 8 {
			_, _ = io.WriteString(engine, strings.Repeat("a", 1<<20))
		}
		_, _ = io.WriteString(engine, "\n\n")
		_, _ = io.WriteString(engine, ":b\n\n")
	}()
	got := make([]byte, 4<<10)
	for n := 0; !bytes.HasSuffix(got[:n], []byte(":b\n\n")); {
		var err error
		n, err = r.Read(got)
		require.NoError(t, err)
	}
	require.Less(t, heap()-before, int64(1<<20))
	runtime.KeepAlive(r)
	require.NoError(t, engine.Close())
}

// An engine that computes another prompt than the client's, or than the one to go on with, tells so by its ids: no
// other engine goes on with what it says, and it goes on with no stream.
func TestAnotherPromptIsNotGoneOnWith(t *testing.T) {
	for prompt, want := range map[string]string{`"a"`: "", `[1]`: "", `[ 1 ]`: "", `[2]`: "shape", `[1,1]`: "shape"} {
		s, _, _ := readTo(resume.Config{Asked: []byte(prompt)}, firstToken)
		_, reason := s.Next()
		assert.Equal(t, want, reason, prompt)
	}
	for ids, want := range map[string]error{"null": nil, "[1,5]": nil, "[1]": resume.ErrDiverged,
		"[1,6]": resume.ErrDiverged, "[7,8,9]": resume.ErrDiverged} {
		s, _, _ := readTo(resume.Config{}, firstToken)
		later, reason := s.Next()
		require.Empty(t, reason)
		_, err := io.ReadAll(later.Reader(strings.NewReader(`data: {"id":"c","choices":[{"index":0,"text":"b",` +
			`"finish_reason":"stop","prompt_token_ids":` + ids + `,"token_ids":[6]}]}` + "\n\ndata: [DONE]\n\n")))
		assert.ErrorIs(t, err, want, ids)
	}
}
