// SPDX-License-Identifier: Apache-2.0

package resume_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// engine writes streams as vLLM 0.32.0 does. A token is a byte; the output is given, so every engine makes the same.
type engine struct {
	prompt []int
	output []int
	stop   []string
	shown  bool // include_stop_str_in_output
	chat   bool
	ids    bool // return_token_ids
	usage  bool
	each   bool           // continuous_usage_stats
	join   func(int) bool // whether the token comes in one event with the next
	id     string
}

type list []int

func (l list) MarshalJSON() ([]byte, error) {
	if l == nil {
		return []byte("null"), nil
	}
	return json.Marshal([]int(l))
}

// text is what tokens are as text: bytes that are no character become U+FFFD.
func text(tokens []int) string {
	b := make([]byte, len(tokens))
	for i, t := range tokens {
		b[i] = byte(t)
	}
	return strings.ToValidUTF8(string(b), "\ufffd")
}

// detokenizer is vLLM's FastIncrementalDetokenizer: text that ends with U+FFFD waits for more. After a prompt whose
// text ends so, the prompt's text comes with the next token.
type detokenizer struct {
	tokens []int
	prefix string
}

func newDetokenizer(prompt []int) *detokenizer {
	d := &detokenizer{tokens: slices.Clone(prompt)}
	if whole := text(prompt); !strings.HasSuffix(whole, "\ufffd") {
		d.prefix = whole
	}
	return d
}

func (d *detokenizer) next(token int) string {
	d.tokens = append(d.tokens, token)
	whole := text(d.tokens)
	if strings.HasSuffix(whole, "\ufffd") || len(whole) <= len(d.prefix) {
		return ""
	}
	piece := whole[min(len(d.prefix), len(whole)):]
	d.prefix = whole
	return piece
}

func quoted(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s)
	return strings.TrimSpace(b.String())
}

// stream is the response after given tokens of the output were moved into the prompt.
func (e *engine) stream(given int) string {
	var b strings.Builder
	prompt := append(slices.Clone(e.prompt), e.output[:given]...)
	object := "text_completion"
	if e.chat {
		object = "chat.completion.chunk"
	}
	head := fmt.Sprintf(`data: {"id":%q,"object":%q,"created":1,"model":"tiny","choices":[`, e.id, object)
	ids := func(tokens []int) string {
		if !e.ids {
			tokens = nil
		}
		raw, _ := json.Marshal(list(tokens))
		return string(raw)
	}
	if e.chat {
		fmt.Fprintf(&b, `%s{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,`+
			`"finish_reason":null}],"prompt_token_ids":%s,"prompt_text":null}`+"\n\n", head, ids(prompt))
	}
	hold := 0
	for _, s := range e.stop {
		hold = max(hold, utf8.RuneCountInString(s)-1)
	}
	if e.shown {
		hold = 0
	}
	d := newDetokenizer(prompt)
	var all []rune
	sent, made, ended := 0, 0, false
	var together []int
	for !ended {
		token := e.output[given+made]
		made++
		together = append(together, token)
		all = append(all, []rune(d.next(token))...)
		upTo := max(sent, len(all)-hold)
		reason, stop := "null", "null"
		for _, s := range e.stop {
			if at := strings.Index(string(all), s); at >= 0 {
				reason, stop, ended = `"stop"`, quoted(s), true
				upTo = utf8.RuneCountInString(string(all)[:at])
				if e.shown {
					upTo += utf8.RuneCountInString(s)
				}
				break
			}
		}
		if !ended && given+made == len(e.output) {
			reason, ended, upTo = `"length"`, true, len(all)
		}
		if !ended && e.join != nil && e.join(given+made) {
			continue
		}
		b.WriteString(head)
		piece := quoted(string(all[sent:max(sent, upTo)]))
		sent = max(sent, upTo)
		switch first := made == len(together); {
		case e.chat && ended:
			fmt.Fprintf(&b, `{"index":0,"delta":{"content":%s},"logprobs":null,"finish_reason":%s,"stop_reason":%s,`+
				`"token_ids":%s}]`, piece, reason, stop, ids(together))
		case e.chat:
			fmt.Fprintf(&b, `{"index":0,"delta":{"content":%s},"logprobs":null,"finish_reason":null,"token_ids":%s}]`,
				piece, ids(together))
		default:
			shown := prompt
			if !first {
				shown = nil
			}
			fmt.Fprintf(&b, `{"index":0,"text":%s,"logprobs":null,"finish_reason":%s,"stop_reason":%s,`+
				`"prompt_token_ids":%s,"token_ids":%s}]`, piece, reason, stop, ids(shown), ids(together))
		}
		if e.each {
			details := ""
			if e.chat {
				details = `,"completion_tokens_details":null`
			}
			fmt.Fprintf(&b, `,"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%s}`, len(prompt),
				len(prompt)+made, made, details)
		}
		if ended && !e.usage {
			b.WriteString(`,"system_fingerprint":"f"`)
		}
		b.WriteString("}\n\n")
		together = nil
	}
	if e.usage {
		fmt.Fprintf(&b, `%s],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d},`+
			`"system_fingerprint":"f"}`+"\n\n", head, len(prompt), len(prompt)+made, made)
	}
	return b.String() + "data: [DONE]\n\n"
}
