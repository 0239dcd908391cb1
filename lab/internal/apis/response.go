// SPDX-License-Identifier: Apache-2.0

package apis

import (
	"bufio"
	"errors"
	"io"
	"strings"

	"github.com/tidwall/gjson"
)

// Said is what a response of any API says, whole or streamed. Texts and Logprobs are by the number of the prompt.
type Said struct {
	Texts map[int]string
	// Logprobs are all numbers in the log probabilities, of the prompt and of the text, token ids among them.
	Logprobs map[int][]float64
	// PromptTokens are all tokens of all prompts, cached or not.
	PromptTokens int
	// CachedTokens are those that the engine reports as cached; chat and completions only.
	CachedTokens int
	End          string // finish_reason, stop_reason or status, where it is told
	Events       int    // of a stream, [DONE] among them
	Whole        bool   // it came to its own end: the whole document, or the stream's last event
	Failed       bool   // it tells an error
	Err          error  // that error, or why it could not be read to its end
}

// Text is the text for the first prompt.
func (s *Said) Text() string { return s.Texts[0] }

// Read reads a response. onEvent, if not nil, is called after each event of a stream but [DONE]. A stream that ends
// without its last event is not Whole, and has no error for that.
func Read(body io.Reader, streamed bool, onEvent func()) *Said {
	s := &Said{Texts: map[int]string{}, Logprobs: map[int][]float64{}}
	if !streamed {
		var content []byte
		if content, s.Err = io.ReadAll(body); s.Err == nil {
			s.Whole = gjson.ValidBytes(content)
			s.add(string(content))
		}
		return s
	}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for s.Err == nil && lines.Scan() {
		data, found := strings.CutPrefix(lines.Text(), "data: ")
		if !found {
			continue
		}
		if s.Events++; data == "[DONE]" {
			s.Whole = true
			continue
		}
		if s.add(data); onEvent != nil && s.Err == nil {
			onEvent()
		}
	}
	if s.Err == nil {
		s.Err = lines.Err()
	}
	return s
}

// add adds a response, a list of responses to several prompts, or an event.
func (s *Said) add(text string) {
	doc := gjson.Parse(text)
	switch {
	case !gjson.Valid(text):
		s.Err = errors.New("the response is no JSON")
	case doc.IsArray():
		for i, one := range doc.Array() {
			s.addOne(one, i)
		}
	default:
		s.addOne(doc, int(doc.Get("index").Int()))
	}
}

// addOne adds one response or event. prompt is its number where the API says it outside of choices.
func (s *Said) addOne(doc gjson.Result, prompt int) {
	kind := doc.Get("type").String()
	if e := doc.Get("error"); e.IsObject() || kind == "error" || kind == "response.failed" {
		s.Failed, s.Err = true, errors.New("error: "+e.Get("message").String())
		return
	}
	for _, holder := range []string{"usage", "response.usage", "message.usage"} {
		s.count(doc.Get(holder))
	}
	switch meta := doc.Get("meta_info"); {
	case meta.Exists(): // SGLang's own API: each event has the whole text so far
		if _, streamed := s.Texts[prompt]; !streamed {
			s.PromptTokens += int(meta.Get("prompt_tokens").Int())
		}
		s.note(doc)
		s.Texts[prompt] = doc.Get("text").String()
		s.Logprobs[prompt] = append(numbersIn(meta.Get("input_token_logprobs")),
			numbersIn(meta.Get("output_token_logprobs"))...)
	case kind == "message_stop", kind == "response.completed", kind == "response.incomplete":
		s.Whole = true
		s.note(doc.Get("response"))
	case strings.HasPrefix(kind, "response."):
		if kind == "response.output_text.delta" {
			s.Texts[0] += doc.Get("delta").String()
		}
	default:
		s.take(doc, 0)
	}
}

// count notes the tokens of the prompts. Messages does not count the cached ones in input_tokens.
func (s *Said) count(usage gjson.Result) {
	n := 0
	for _, name := range []string{"prompt_tokens", "input_tokens", "cache_creation_input_tokens",
		"cache_read_input_tokens"} {
		n += int(usage.Get(name).Int())
	}
	s.PromptTokens = max(s.PromptTokens, n)
	s.CachedTokens = max(s.CachedTokens, int(usage.Get("prompt_tokens_details.cached_tokens").Int()))
}

// take adds the text of a document, by the members in which the APIs keep it.
func (s *Said) take(doc gjson.Result, prompt int) {
	s.note(doc)
	for _, choice := range doc.Get("choices").Array() {
		n := int(choice.Get("index").Int())
		s.take(choice, n)
		s.Logprobs[n] = append(s.Logprobs[n], numbersIn(choice.Get("logprobs"))...)
	}
	for _, member := range []string{"output", "content"} {
		if list := doc.Get(member); list.IsArray() {
			for _, item := range list.Array() {
				s.take(item, prompt)
			}
		}
	}
	for _, member := range []string{"message", "delta"} {
		if v := doc.Get(member); v.IsObject() {
			s.take(v, prompt)
		}
	}
	if v := doc.Get("content"); v.Type == gjson.String {
		s.Texts[prompt] += v.String()
	}
	if v := doc.Get("text"); v.Type == gjson.String {
		s.Texts[prompt] += v.String()
	} else if ids := doc.Get("token_ids"); ids.IsArray() {
		for _, id := range ids.Array() {
			s.Texts[prompt] += string(rune(id.Int())) // engines that answer with ids alone write ASCII only
		}
	}
}

// note notes how the response says that it ended.
func (s *Said) note(doc gjson.Result) {
	for _, member := range []string{"finish_reason", "stop_reason", "status", "meta_info.finish_reason.type"} {
		if v := doc.Get(member); v.Type == gjson.String && v.String() != "in_progress" {
			s.End = v.String()
		}
	}
}

// numbersIn returns all numbers in a JSON value, in their order.
func numbersIn(value gjson.Result) (found []float64) {
	switch {
	case value.Type == gjson.Number:
		return []float64{value.Num}
	case value.IsObject(), value.IsArray():
		value.ForEach(func(_, inner gjson.Result) bool {
			found = append(found, numbersIn(inner)...)
			return true
		})
	}
	return found
}
