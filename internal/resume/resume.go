// SPDX-License-Identifier: Apache-2.0

// Package resume lets a client's stream of chat or completion chunks go on at another engine, after the engine that
// made it has died. A [Stream] reads the first engine's events, keeps the token ids in them, and takes them out of what
// the client gets. From the ids it makes the prompt with which another engine goes on, and it turns that engine's
// events into those that the first engine would have sent.
//
// Whole events are passed on, never a part of one: what the client has and what the next engine is asked for then
// always fit together.
//
// The shapes are those of vLLM 0.32.0 with return_token_ids (vllm/entrypoints/openai/chat_completion/serving.py and
// completion/serving.py); docs/reliability/rescue.md has examples.
package resume

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"unsafe"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// Config is what a Stream must know of the client's request.
type Config struct {
	Chat        bool // chat chunks; else completion chunks
	KeepIDs     bool // the client asked for return_token_ids itself
	KeepUsage   bool // the client asked for stream_options.include_usage
	FailureStop string
	Usage       func(event []byte) // gets an event with the counts that the client did not ask for; nil allowed

	// StopReach is how many characters the longest stop string has, less one; 0 without stop strings. Engines hold so
	// many characters of the text back, unless StopShown says that the client wants the stop string too.
	StopReach int
	StopShown bool

	// Asked is the client's prompt as it stands in its request: a list of token ids, or what says nothing of them.
	Asked []byte

	// Limit is how many tokens of output the engine may make; 0: it is not known. A stream with more cannot go on
	// elsewhere.
	Limit int
}

// Stream is one client's stream, over all engines that make it. It is used by one goroutine.
type Stream struct {
	Config
	Deciding bool // the response decides whether a prefill is needed

	ids     []uint32 // of the prompt and of the output
	prompt  int      // how many of ids are the prompt's
	sent    int      // characters of text that the client has
	over    bool     // the client has the event with the finish reason
	counted bool     // and the one with the counts, if it wants them
	done    bool     // and the stream's end
	lost    string   // why the stream cannot go on elsewhere, "" if it can
	marks   []mark   // where another engine may go on; the first is the earliest that can still be needed
	head    []byte   // how an event begins, up to its choices
	choice  []byte   // of a chat: the choice of an event with text
	fault   []byte   // see Fault
	detail  string   // of a chat: what its counts in events with tokens have more than a completion's

	// of a stream that goes on
	later bool
	given int // tokens of the output in this engine's prompt
	at    int // where in the whole text this engine's next characters stand
	known int // how many of ids this engine has confirmed
}

// mark is a place between two tokens at which the text is whole: no byte of a character is missing.
type mark struct {
	end  int // how many of Stream.ids are before it
	text int // characters up to here, also those that are held back
}

// ErrGaveUp is the error of a stream whose engine says that it gives up.
var ErrGaveUp = errors.New("resume: the engine gave up")

// ErrDiverged is the error of a stream whose next engine made other tokens than the first one.
var ErrDiverged = errors.New("resume: the engines differ")

// Why a stream cannot go on elsewhere.
const (
	noIDs  = "no_token_ids" // the engine does not tell them
	parser = "parser"       // it changes the text on its way, as for reasoning and tools
	shape  = "shape"        // the events have another shape than those that this package knows
)

// New returns a stream.
func New(c Config) *Stream { return &Stream{Config: c} }

// Tokens returns how many tokens of output are known.
func (s *Stream) Tokens() int { return len(s.ids) - s.prompt }

// Fault returns the data of the error event with which the engine gave up, nil if there was none.
func (s *Stream) Fault() []byte { return s.fault }

// Given returns how many of them are in the prompt of the engine that goes on.
func (s *Stream) Given() int { return s.given }

// Length returns how many tokens Prompt has.
func (s *Stream) Length() int { return s.known }

// Over reports whether the client has everything but the stream's end.
func (s *Stream) Over() bool { return s.over && (s.counted || !s.KeepUsage) }

// Prompt returns the token ids of prompt and output with which another engine goes on, a JSON array.
func (s *Stream) Prompt() []byte { return appendIDs(nil, s.ids[:s.known]) }

// Next returns a stream that goes on where this one was cut, or why it cannot. s is not changed, so that several
// engines can be tried one after the other.
//
// The engine gets the prompt and the output up to the last mark before which the client has all text. What follows
// until the cut it makes again, and the client does not get it twice. Of a prompt that ends within a character vLLM
// would return the whole prompt's text with the next token; and stop strings are looked for in an engine's own output
// only, so one that began before the cut must lie in it wholly.
func (s *Stream) Next() (next *Stream, reason string) {
	switch {
	case s.lost != "":
		return nil, s.lost
	case s.prompt == 0:
		return nil, noIDs
	case s.head == nil || s.Chat && s.choice == nil && !s.over:
		return nil, shape
	}
	n := *s
	n.ids, n.marks = slices.Clip(s.ids), slices.Clone(s.marks)
	m := mark{end: s.prompt}
	for _, at := range s.marks {
		if at.text <= s.settled() {
			m = at
		}
	}
	n.fault = nil
	n.later, n.given, n.at, n.known = true, m.end-s.prompt, m.text, m.end
	return &n, ""
}

// held is how many characters engines hold back.
func (s *Stream) held() int {
	if s.StopShown {
		return 0
	}
	return s.StopReach
}

// settled is up to where no stop string can begin that is not complete yet, or is the one that ended the text.
func (s *Stream) settled() int {
	if s.over && s.StopShown {
		return s.sent - s.StopReach - 1
	}
	return s.sent + s.held() - s.StopReach
}

// note keeps a place to go on from, and drops those that are not needed any more.
func (s *Stream) note(text int) {
	s.marks = append(s.marks, mark{end: len(s.ids), text: text})
	for len(s.marks) > 1 && s.marks[1].text <= s.settled() {
		s.marks = s.marks[1:]
	}
}

// Reader returns a reader of an engine's events as the client gets them. At the end of a stream that is not whole its
// error is not io.EOF.
func (s *Stream) Reader(src io.Reader) io.Reader { return &reader{s: s, src: src} }

type reader struct {
	s     *Stream
	src   io.Reader
	in    []byte // read, and not yet a whole event
	at    int    // how much of that has been searched for the event's end
	out   []byte
	taken int // of out
	err   error
}

const (
	readSize  = 4 << 10
	maxReused = 16 << 10 // the largest buffer that is kept: streams are many and last long

	// maxEvent is the largest event. The first one may have the ids of a prompt of two million tokens.
	maxEvent = 16 << 20
	// maxTokens is how many tokens of output are kept at most.
	maxTokens = 1 << 20
)

// Read implements io.Reader. Bytes and an error never come together.
func (r *reader) Read(p []byte) (int, error) {
	for r.taken == len(r.out) {
		if r.err != nil {
			return 0, r.err
		}
		if r.out, r.taken = r.out[:0], 0; cap(r.out) > maxReused {
			r.out = nil
		}
		r.fill()
	}
	n := copy(p, r.out[r.taken:])
	r.taken += n
	return n, nil
}

func (r *reader) fill() {
	r.in = slices.Grow(r.in, readSize)
	n, err := r.src.Read(r.in[len(r.in) : len(r.in)+readSize])
	r.in = r.in[:len(r.in)+n]
	if len(r.in) > maxEvent {
		r.err = sse.ErrTooLarge
		return
	}
	rest := r.in
	for !r.s.done {
		event, after, ok := sse.NextFrom(rest, r.at)
		if !ok {
			r.at = max(0, len(rest)-2)
			break
		}
		r.at = 0
		whole := rest[:len(rest)-len(after)]
		rest = after
		if r.out, r.err = r.s.pass(r.out, whole, sse.Data(event)); r.err != nil {
			return
		}
	}
	switch {
	case len(rest) == len(r.in): // a large event is not moved for each piece of it
	case cap(r.in) > maxReused && len(rest) <= readSize:
		r.in = bytes.Clone(rest)
	default:
		r.in = append(r.in[:0], rest...)
	}
	switch {
	case r.s.done:
		r.err = io.EOF
	case errors.Is(err, io.EOF) && r.s.lost != "": // of an engine that ends its streams in another way
		r.out, r.err = append(r.out, r.in...), err
	case errors.Is(err, io.EOF):
		r.err = io.ErrUnexpectedEOF
	default:
		r.err = err
	}
}

// pass appends what the client gets for an event.
func (s *Stream) pass(dst, event, data []byte) ([]byte, error) {
	switch {
	case len(data) == 0:
		return append(dst, event...), nil // a comment
	case bytes.Equal(data, sse.Done):
		if !s.over && s.lost == "" && s.later {
			return dst, io.ErrUnexpectedEOF
		}
		s.done = true
		return append(dst, event...), nil
	}
	changed, err := s.chunk(data)
	if err != nil || changed == nil {
		return dst, err
	}
	if bytes.Equal(changed, data) {
		return append(dst, event...), nil
	}
	return sse.AppendEvent(dst, event, changed), nil
}

// lose notes that the stream cannot go on elsewhere.
func (s *Stream) lose(reason string) {
	if s.lost == "" {
		s.lost = reason
		s.ids, s.marks = nil, nil
	}
}

// chunk returns an event's data for the client, nil if it gets none.
func (s *Stream) chunk(data []byte) ([]byte, error) {
	doc := view(data)
	choices := gjson.Get(doc, "choices")
	reason := gjson.Get(doc, "choices.0.finish_reason")
	stop := gjson.Get(doc, "choices.0.stop_reason").String()
	switch {
	case reason.String() == "cache_threshold" && (s.Deciding || !s.later):
		return data, nil // an engine that asks for a prefill: nobody reads on
	case s.lost != "" && !s.later && verdict.IsError(data):
		return data, nil
	case verdict.IsError(data):
		s.fault = bytes.Clone(data)
		return nil, ErrGaveUp
	case s.lost != "" && !s.later: // the client gets what it would get without this package
	case verdict.Fails(verdict.FinishReason, reason.String()), reason.String() == "cache_threshold",
		s.FailureStop != "" && stop == s.FailureStop:
		return nil, ErrGaveUp
	}
	switch {
	case !choices.IsArray() || choices.Index == 0 || gjson.Get(doc, "choices.1").Exists(),
		s.later && gjson.Get(doc, "choices.0.index").Int() != 0:
		if s.later {
			return nil, ErrDiverged
		}
		s.lose(shape)
		return data, nil
	}
	c := &chunk{data: data, at: choices.Index, end: choices.Index + len(choices.Raw), reason: reason}
	c.key = bytes.LastIndexByte(data[:max(0, bytes.LastIndexByte(data[:c.at], '"'))], '"')
	if c.key < 0 {
		s.lose(shape)
		return data, nil
	}
	c.none = !gjson.Get(doc, "choices.0").Exists()
	if s.later {
		return s.goOn(c)
	}
	return s.first(c), nil
}

// view reads bytes as a string for gjson without a copy; the bytes must not change meanwhile.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
