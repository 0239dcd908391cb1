// SPDX-License-Identifier: Apache-2.0

package resume

import (
	"bytes"
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
)

// chunk is one event's data.
type chunk struct {
	data    []byte
	key, at int // where the key of its choices begins, and their array
	end     int // of the array
	none    bool
	reason  gjson.Result // finish_reason
}

func (c *chunk) get(path string) gjson.Result { return gjson.Get(view(c.data), path) }

// edits change values of a JSON text. They are made in the order in which they stand in it.
type edits struct {
	src  []byte
	out  []byte
	from int
}

// set replaces a value that gjson found in src.
func (e *edits) set(v gjson.Result, raw []byte) {
	if v.Index < e.from || v.Index == 0 {
		return
	}
	e.out = append(append(e.out, e.src[e.from:v.Index]...), raw...)
	e.from = v.Index + len(v.Raw)
}

func (e *edits) bytes() []byte { return append(e.out, e.src[e.from:]...) }

var null = []byte("null")

// first reads an event of the first engine, and takes out what the client has not asked for.
func (s *Stream) first(c *chunk) []byte {
	if s.head == nil {
		s.head = bytes.Clone(c.data[:c.key])
	}
	if c.none {
		return s.counts(c.data, c.get("usage").IsObject())
	}
	e := edits{src: c.data}
	textAt, promptAt := "choices.0.text", "choices.0.prompt_token_ids"
	if s.Chat {
		textAt, promptAt = "choices.0.delta.content", "prompt_token_ids"
	}
	text, prompt, ids := c.get(textAt), c.get(promptAt), c.get("choices.0.token_ids")
	if !s.KeepIDs {
		s.withoutIDs(&e, prompt, ids)
	}
	made, ok := numbers(ids)
	n := len(made)
	if prompt.IsArray() && s.prompt == 0 && s.lost == "" && ok {
		s.ids, ok = numbers(prompt)
		s.prompt = len(s.ids)
		ok = ok && s.sameAsAsked()
	}
	if !ok || s.tooMany(n) {
		s.lose(shape)
	}
	s.judge(c, text, n)
	if s.lost == "" {
		s.take(text.Raw, made, c.reason.Type == gjson.Null)
		s.over = s.over || c.reason.Type == gjson.String
	}
	if s.Chat && n > 0 && !s.KeepIDs && c.get("choices.0.delta").Raw == "{}" && c.reason.Type == gjson.Null {
		return nil // made only for the ids
	}
	out := e.bytes()
	if s.Chat && s.choice == nil && text.Exists() && n > 0 && c.reason.Type == gjson.Null {
		s.choice = bytes.Clone([]byte(gjson.Get(view(out), "choices.0").Raw))
		if details := gjson.Get(view(out), "usage.completion_tokens_details"); details.Exists() {
			s.detail = `,"completion_tokens_details":` + strings.Clone(details.Raw)
		}
	}
	return out
}

func (s *Stream) withoutIDs(e *edits, prompt, ids gjson.Result) {
	if s.Chat { // the prompt's stand after the choices
		prompt, ids = ids, prompt
	}
	for _, v := range []gjson.Result{prompt, ids} {
		if v.IsArray() {
			e.set(v, null)
		}
	}
}

// judge loses a stream whose tokens and text cannot be followed.
func (s *Stream) judge(c *chunk, text gjson.Result, ids int) {
	switch {
	case c.get("choices.0.index").Int() != 0, c.get("choices.0.logprobs").IsObject():
		s.lose(shape)
	case ids == 0 && len(text.Str) > 0, ids > 0 && s.prompt == 0:
		s.lose(noIDs)
	case s.Chat:
		c.get("choices.0.delta").ForEach(func(key, value gjson.Result) bool {
			if key.Str != "role" && key.Str != "content" && value.Type != gjson.Null {
				s.lose(parser)
			}
			return true
		})
		if ids > 0 && text.Type != gjson.String {
			s.lose(parser)
		}
	case text.Type != gjson.String:
		s.lose(shape)
	}
}

// sameAsAsked reports whether the engine's prompt is the client's, as far as that is known. An engine that has another
// one, or its response to another request, must not have a third engine go on with that.
func (s *Stream) sameAsAsked() bool {
	if len(s.Asked) == 0 || s.Asked[0] != '[' {
		return true
	}
	var asked []uint32
	return json.Unmarshal(s.Asked, &asked) == nil && slices.Equal(asked, s.ids)
}

// tooMany reports whether n more tokens are more than any engine may make.
func (s *Stream) tooMany(n int) bool {
	return s.Tokens()+n > min(cmp.Or(s.Limit, maxTokens), maxTokens)
}

// take notes new tokens and their text. A place after several tokens is none to go on from: the last of them may be a
// part of a character.
func (s *Stream) take(text string, ids []uint32, open bool) {
	s.ids = append(s.ids, ids...)
	s.known = len(s.ids)
	chars := characters(text)
	s.at += chars
	s.sent = max(s.sent, s.at)
	if len(ids) == 1 && chars > 0 && open {
		s.note(s.at + s.held())
	}
}

// goOn reads an event of another engine, which answers as /v1/completions does.
func (s *Stream) goOn(c *chunk) ([]byte, error) {
	tail := s.counts(c.data[c.end:], false)
	if i := len(tail) - len("}}"); !c.none && i > 0 && string(tail[i:]) == "}}" { // the counts of an event with a token
		tail = append(append(bytes.Clone(tail[:i]), s.detail...), tail[i:]...)
	}
	if c.none {
		if out := s.counts(c.data, c.get("usage").IsObject()); out == nil {
			return nil, nil
		}
		return s.event("[]", tail), nil
	}
	text, ids := c.get("choices.0.text"), c.get("choices.0.token_ids")
	made, ok := numbers(ids)
	if prompt, told := numbers(c.get("choices.0.prompt_token_ids")); len(prompt) > 0 || !told {
		ok = ok && slices.Equal(prompt, s.ids[:s.prompt+s.given])
	}
	if !ok || text.Type != gjson.String || len(made) == 0 && len(text.Str) > 0 {
		return nil, ErrDiverged
	}
	fresh, ok := s.confirm(made)
	ended := c.reason.Type == gjson.String
	if !ok || ended && s.known < len(s.ids) || s.over && len(fresh) > 0 || s.tooMany(len(fresh)) {
		return nil, ErrDiverged
	}
	if s.over {
		return nil, nil // the client has the last token
	}
	skip := min(max(s.sent-s.at, 0), characters(text.Raw))
	raw := withoutFirst(text.Raw, skip)
	if len(fresh) == 0 && !ended {
		if s.at += skip; raw != `""` {
			return nil, ErrDiverged // other text for the same tokens
		}
		return nil, nil
	}
	s.take(text.Raw, fresh, len(made) == 1 && !ended)
	s.over = ended
	shown := null
	if s.KeepIDs {
		shown = appendIDs(nil, fresh)
	}
	return s.event("["+string(s.shaped(c, text, ids, raw, shown))+"]", tail), nil
}

// confirm compares tokens with those that are known, and returns those that are not.
func (s *Stream) confirm(made []uint32) (fresh []uint32, ok bool) {
	n := min(len(made), len(s.ids)-s.known)
	if !slices.Equal(made[:n], s.ids[s.known:s.known+n]) {
		return nil, false
	}
	s.known += n
	return made[n:], true
}

// shaped returns the choice as the client's API has it.
func (s *Stream) shaped(c *chunk, text, ids gjson.Result, raw string, shown []byte) []byte {
	choice := c.get("choices.0")
	if !s.Chat {
		e := edits{src: c.data, from: choice.Index}
		e.set(text, []byte(raw))
		if prompt := c.get("choices.0.prompt_token_ids"); prompt.Index < ids.Index {
			e.set(prompt, null)
			e.set(ids, shown)
		} else {
			e.set(ids, shown)
			e.set(prompt, null)
		}
		return append(e.out, c.data[e.from:choice.Index+len(choice.Raw)]...)
	}
	doc := view(s.choice)
	e := edits{src: s.choice}
	e.set(gjson.Get(doc, "delta.content"), []byte(raw))
	reason := []byte(c.reason.Raw)
	if c.reason.Type == gjson.String {
		reason = append(reason, `,"stop_reason":`...)
		if stop := c.get("choices.0.stop_reason"); stop.Exists() {
			reason = append(reason, stop.Raw...)
		} else {
			reason = append(reason, null...)
		}
	}
	e.set(gjson.Get(doc, "finish_reason"), reason)
	e.set(gjson.Get(doc, "token_ids"), shown)
	return e.bytes()
}

// event puts an event of the client's stream together.
func (s *Stream) event(choices string, tail []byte) []byte {
	out := append(append([]byte(nil), s.head...), `"choices":`...)
	return append(append(out, choices...), tail...)
}

// counts corrects the counts of a piece of an event. only says that the event has nothing else, and then it is dropped
// if the client did not ask for it.
func (s *Stream) counts(b []byte, only bool) []byte {
	s.counted = s.counted || only
	if only && !s.KeepUsage && s.later {
		if s.Usage != nil {
			s.Usage(s.counts(b, false))
		}
		return nil
	}
	at := bytes.Index(b, []byte(`"usage":{`))
	if s.given == 0 || at < 0 {
		return b
	}
	for name, by := range map[string]int{
		`"prompt_tokens":`: -s.given, `"completion_tokens":`: s.given, `"cached_tokens":`: -s.given,
	} {
		i := bytes.Index(b[at:], []byte(name))
		if i < 0 {
			continue
		}
		i += at + len(name)
		n := 0
		for i+n < len(b) && b[i+n] >= '0' && b[i+n] <= '9' {
			n++
		}
		v, err := strconv.Atoi(string(b[i : i+n]))
		if err != nil {
			continue
		}
		changed := strconv.AppendInt(bytes.Clone(b[:i]), int64(max(v+by, 0)), 10)
		b = append(changed, b[i+n:]...)
	}
	return b
}

// numbers reads a JSON array of token ids; null is none.
func numbers(v gjson.Result) (ids []uint32, ok bool) {
	if v.Type == gjson.Null {
		return nil, true
	}
	err := json.Unmarshal([]byte(v.Raw), &ids)
	return ids, err == nil
}

// appendIDs appends token ids as a JSON array.
func appendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}

// characters counts the characters of a JSON string, as Python counts them.
func characters(raw string) int {
	n := 0
	if !strings.HasPrefix(raw, `"`) { // null, or none
		return 0
	}
	for i := 1; i < len(raw)-1; n++ {
		i += width(raw[i:])
	}
	return n
}

// withoutFirst takes the first characters off a JSON string, whose other bytes stay as they are.
func withoutFirst(raw string, n int) string {
	if n == 0 {
		return raw
	}
	i := 1
	for ; n > 0 && i < len(raw)-1; n-- {
		i += width(raw[i:])
	}
	return `"` + raw[i:]
}

// width is how many bytes the first character of a JSON string's inside takes.
func width(s string) int {
	switch {
	case s[0] != '\\':
		_, n := utf8.DecodeRuneInString(s)
		return n
	case len(s) < 6 || s[1] != 'u':
		return 2
	case len(s) >= 12 && (s[2] == 'd' || s[2] == 'D') && (s[3] == '8' || s[3] == '9' || s[3]|32 == 'a' ||
		s[3]|32 == 'b') && s[6] == '\\' && s[7] == 'u':
		return 12 // two halves of one character
	}
	return 6
}
