// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
)

// Prompt is a request's path and body, which lacks the model and how it is streamed.
type Prompt struct {
	Path string // "/v1/chat/completions" or "/v1/completions"
	Body map[string]any
}

// Paths of the two APIs.
const (
	Chat        = "/v1/chat/completions"
	Completions = "/v1/completions"
)

// Prompts gives the n-th prompt for a target, always the same one. It is called concurrently.
type Prompts interface {
	Prompt(target, n int) Prompt
}

// Generator makes prompts of random words, some of which begin alike. A word is about one token: what it really was,
// the server's usage says. Each target has prompts of its own, of the same lengths, so that neither finds the other's
// prompts in a cache that both may use.
type Generator struct {
	Seed         uint64
	Path         string // Chat or Completions
	Prefixes     int    // how many prefixes there are; a request has one of them, drawn at random
	PrefixTokens int    // length of a prefix
	PromptTokens int    // length of what follows it, of each request its own
	MaxTokens    int
	IgnoreEOS    bool // ask for exactly MaxTokens, which vLLM and SGLang can
}

// Prompt returns the n-th prompt of a target.
func (g Generator) Prompt(target, n int) Prompt {
	own := g.rand(target, 1+uint64(n)) // number 0 and those from prefixes on belong to no request
	var text strings.Builder
	if g.PrefixTokens > 0 && g.Prefixes > 0 {
		write(&text, g.rand(target, prefixes+own.Uint64N(uint64(g.Prefixes))), g.PrefixTokens)
	}
	write(&text, own, g.PromptTokens)
	p := Prompt{Path: g.Path, Body: map[string]any{"max_tokens": g.MaxTokens, "temperature": 0}}
	if g.IgnoreEOS {
		p.Body["ignore_eos"] = true
	}
	if g.Path == Completions {
		p.Body["prompt"] = text.String()
	} else {
		p.Body["messages"] = []map[string]string{{"role": "user", "content": text.String()}}
	}
	return p
}

const prefixes = 1 << 41

func (g Generator) rand(target int, n uint64) *rand.Rand {
	return rand.New(rand.NewPCG(g.Seed^uint64(target)<<62, n)) //nolint:gosec // a load, no secret
}

// words are common enough to be one token each in usual vocabularies.
var words = strings.Fields("the of and to in is that for it with as was on are be this by from at or an have not " +
	"they which one you were all her she there would their we him been has when who will no more if out so up said " +
	"what its about than into them can only other time new some could these two may first then do any like my now " +
	"over such our man me even most made after also did many off before must well back through years much where " +
	"your way down should because long each just state people those too world day good right still great old work")

func write(b *strings.Builder, rng *rand.Rand, n int) {
	for range n {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(words[rng.IntN(len(words))])
	}
}

// list are the prompts of a file, which are sent in their order, again and again.
type list []Prompt

func (l list) Prompt(_, n int) Prompt { return l[n%len(l)] }

// maxLine bounds a line of a file of prompts, in bytes.
const maxLine = 64 << 20

// ReadPrompts reads JSON lines: bodies of chats (with messages) and of completions (with prompt), with max_tokens and
// whatever else the server takes. Lines without max_tokens get the one given here. Errors name lines, not their text.
func ReadPrompts(in io.Reader, maxTokens int) (Prompts, error) {
	var all list
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		if strings.TrimSpace(lines.Text()) == "" {
			continue
		}
		var body map[string]json.RawMessage
		if json.Unmarshal(lines.Bytes(), &body) != nil || body == nil {
			return nil, fmt.Errorf("line %d is not a JSON object", n)
		}
		_, prompt := body["prompt"]
		_, messages := body["messages"]
		if prompt == messages {
			return nil, fmt.Errorf("line %d needs either prompt or messages", n)
		}
		p := Prompt{Path: Chat, Body: map[string]any{"max_tokens": maxTokens}}
		if prompt {
			p.Path = Completions
		}
		for name, value := range body {
			p.Body[name] = value
		}
		all = append(all, p)
	}
	if lines.Err() != nil {
		return nil, errors.New("it cannot be read, or a line is longer than 64 MiB")
	}
	if len(all) == 0 {
		return nil, errors.New("it has no prompt")
	}
	return all, nil
}
