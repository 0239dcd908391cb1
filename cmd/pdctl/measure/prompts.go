// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
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

// Generator makes prompts of random words, some of which begin alike. [Generator.Sized] asks a server how many tokens a
// word is; without it, a word counts as one. Each target has prompts of its own, of the same lengths, so that neither
// finds the other's prompts in a cache that both may use.
type Generator struct {
	Seed         uint64
	Path         string // Chat or Completions
	Prefixes     int    // how many prefixes there are; a request has one of them, drawn at random
	PrefixTokens int    // length of a prefix
	PromptTokens int    // length of what follows it, of each request its own
	MaxTokens    int
	IgnoreEOS    bool // ask for exactly MaxTokens, which vLLM and SGLang can

	PerWord float64 // tokens of a word on average; 0: 1
	Around  float64 // tokens that a prompt has besides its words, those of a chat template
}

// count is how many words have so many tokens.
func (g Generator) count(tokens float64) int { return int(math.Round(tokens / cmp.Or(g.PerWord, 1))) }

// Sized returns the generator for a server's tokenizer. It sends two short requests, and compares what the usage of
// their responses says with their words. If a server tells no usage, the generator stays as it is.
func (g Generator) Sized(ctx context.Context, o Options) Generator {
	r := &run{Options: o, client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: o.Timeout}}
	const times = 3
	tokens := func(times int) float64 {
		text := strings.TrimSpace(strings.Repeat(strings.Join(words, " ")+" ", times))
		return float64(r.ask(ctx, o.Targets[0], g.asks(text, 1), time.Now()).promptTokens)
	}
	one := tokens(1)
	if one <= 0 {
		return g
	}
	g.PerWord = one / float64(len(words))
	if more := tokens(times) - one; more > 0 {
		g.PerWord = more / float64((times-1)*len(words))
		g.Around = max(one-g.PerWord*float64(len(words)), 0)
	}
	return g
}

// asks is a request for a text.
func (g Generator) asks(text string, maxTokens int) Prompt {
	p := Prompt{Path: g.Path, Body: map[string]any{"max_tokens": maxTokens, "temperature": 0}}
	if g.Path == Completions {
		p.Body["prompt"] = text
	} else {
		p.Body["messages"] = []map[string]string{{"role": "user", "content": text}}
	}
	return p
}

// Prompt returns the n-th prompt of a target.
func (g Generator) Prompt(target, n int) Prompt {
	own := g.rand(target, 1+uint64(n)) // number 0 and those from prefixes on belong to no request
	var text strings.Builder
	if g.PrefixTokens > 0 && g.Prefixes > 0 {
		write(&text, g.rand(target, prefixes+own.Uint64N(uint64(g.Prefixes))), g.count(float64(g.PrefixTokens)))
	}
	write(&text, own, max(g.count(float64(g.PromptTokens)-g.Around), 1))
	p := g.asks(text.String(), g.MaxTokens)
	if g.IgnoreEOS {
		p.Body["ignore_eos"] = true
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
