// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// Verdict is the result of one synthetic probe.
type Verdict string

// Verdicts of a probe.
const (
	Right Verdict = "right" // the response is that of another engine, or differs from it by a tie of tokens
	Wrong Verdict = "wrong" // it differs from that of another engine, and of a second one where there is one
	// Inconclusive: the pair did not serve the probe together, or the engines that were asked to compare do not agree
	Inconclusive Verdict = "inconclusive"
)

// Result is one synthetic probe of a pair.
type Result struct {
	Prefill, Decode string // endpoint IDs
	Verdict         Verdict
	// Odd is the engine whose response differs from those of the pair and of another engine, all asked the same; "" for
	// none. It computes prompts wrongly, or otherwise than the rest of the fleet.
	Odd string
}

var (
	errNoPair      = errors.New("attest: no two engines can form a pair")
	errNoReference = errors.New("attest: no engine can serve alone, and there is no second pair to compare with")
	errNotJSON     = errors.New("attest: the response to a synthetic probe is not that of a completion")
)

// maxResponse is the largest response that is read, in bytes.
const maxResponse = 1 << 20

// response is what is compared.
type response struct {
	text   string
	tokens []string
	logs   []float64
	top    []map[string]float64
}

// same reports whether two responses to one prompt come from the same KV. tolerance is in nats. Kernels that differ (a
// prompt in one piece or in several, another batch, another parallel size) give logprobs that differ a little, so two
// tokens may change places that are within the tolerance of each other; what follows then differs, too, and tells
// nothing. Wrong KV shows in the first token's logprob, mostly before it shows in the text.
func (r *response) same(ref *response, tolerance float64) bool {
	if len(r.tokens) == 0 || len(ref.tokens) == 0 {
		return r.text == ref.text
	}
	for i, token := range ref.tokens {
		if i >= len(r.tokens) {
			return i > 0 // the end of the text was a tie, or came sooner by the same tokens
		}
		if i == 0 && token == r.tokens[0] && !near(logAt(r.logs, 0), logAt(ref.logs, 0), tolerance) {
			return false
		}
		if token != r.tokens[i] {
			if i >= len(ref.top) {
				return false
			}
			other, listed := ref.top[i][r.tokens[i]]
			return listed && near(logAt(ref.logs, i), other, tolerance)
		}
	}
	return true
}

func near(a, b, tolerance float64) bool {
	return math.IsNaN(a) || math.IsNaN(b) || math.Abs(a-b) <= tolerance
}

// logAt returns NaN where an engine gives no logprob.
func logAt(logs []float64, i int) float64 {
	if i >= len(logs) {
		return math.NaN()
	}
	return logs[i]
}

// prompt returns a text that is random from its first character, so that no cache has even its first block.
func prompt(characters int) string {
	b := strings.Builder{}
	for b.Len() < characters {
		b.WriteString(rand.Text() + " ")
	}
	return b.String()[:characters]
}

// ask sends a prompt to a pair, or to pick.Decode alone, and returns the response and how it was served.
func (p *Prober) ask(ctx context.Context, pick pdflow.Pick, text string) (*response, pdflow.Mode, error) {
	body := struct {
		Model       string `json:"model,omitempty"`
		Prompt      string `json:"prompt"`
		MaxTokens   int    `json:"max_tokens"`
		Temperature int    `json:"temperature"`
		Logprobs    int    `json:"logprobs,omitempty"`
		Salt        string `json:"cache_salt,omitempty"`
	}{Model: p.o.Model, Prompt: text, MaxTokens: p.o.MaxTokens, Logprobs: p.o.Logprobs}
	if pick.Prefill.URL == nil && !p.store { // an engine of the pair must not find its own part of the probe
		body.Salt = "attest-" + text[:min(len(text), 16)]
	}
	raw, _ := json.Marshal(body) // cannot fail: these are strings and numbers
	ctx, cancel := context.WithTimeout(ctx, p.o.Timeout)
	defer cancel()
	var header http.Header
	if p.o.Header != nil {
		header = p.o.Header()
	}
	resp, err := p.o.Flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Header: header, Body: raw,
		Pick: &pick, AnyPair: pick.Prefill.URL == nil && slices.ContainsFunc(p.o.Alone,
			func(e discovery.Endpoint) bool { return e.ID == pick.Decode.ID })})
	if err != nil {
		return nil, "", err
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, "", err
	}
	if resp.Status != http.StatusOK {
		return nil, "", fmt.Errorf("attest: an engine answered a synthetic probe with %d", resp.Status)
	}
	r, err := parse(data)
	return r, resp.Mode, err
}

func parse(data []byte) (*response, error) {
	var a struct {
		Choices []struct {
			Text     *string `json:"text"`
			Logprobs *struct {
				Tokens []string             `json:"tokens"`
				Logs   []*float64           `json:"token_logprobs"`
				Top    []map[string]float64 `json:"top_logprobs"`
			} `json:"logprobs"`
		} `json:"choices"`
	}
	if json.Unmarshal(data, &a) != nil || len(a.Choices) != 1 || a.Choices[0].Text == nil {
		return nil, errNotJSON
	}
	r := &response{text: *a.Choices[0].Text}
	if l := a.Choices[0].Logprobs; l != nil {
		r.tokens, r.top = l.Tokens, l.Top
		for _, x := range l.Logs {
			if x == nil {
				r.logs = append(r.logs, math.NaN())
				continue
			}
			r.logs = append(r.logs, *x)
		}
	}
	return r, nil
}

// Probe sends one synthetic probe and lets the estimator take its result. An error says that there is none: no pair, no
// response, or nothing to compare with. It is not safe for concurrent use, with Run neither.
func (p *Prober) Probe(ctx context.Context) (Result, error) {
	p.follow()
	prefill, decode, ok := p.estimator.Next()
	if !ok {
		return Result{}, errNoPair
	}
	r := Result{Prefill: prefill, Decode: decode, Verdict: Inconclusive}
	pair := pdflow.Pick{Prefill: p.fleet[prefill], Decode: p.fleet[decode]}
	text := prompt(p.o.Characters)
	var err error
	if r.Verdict, r.Odd, err = p.compare(ctx, pair, text); err != nil || r.Verdict == Inconclusive {
		return r, err
	}
	p.mu.Lock()
	named, released := p.estimator.Record(prefill, decode, r.Verdict == Right)
	p.findings = p.estimator.Named()
	p.mu.Unlock()
	p.tell(named, released)
	return r, nil
}

// compare asks the pair and a reference. Where these differ, it asks a second reference, so that one engine that
// computes wrongly by itself does not make each pair look wrong.
func (p *Prober) compare(ctx context.Context, pair pdflow.Pick, text string) (Verdict, string, error) {
	refs := p.references(pair)
	if len(refs) == 0 {
		return Inconclusive, "", errNoReference
	}
	var first *response
	var err error
	if p.store {
		// P computes the prompt for this request and stores its KV. Asked after the pair, it might load what it stored.
		if first, _, err = p.ask(ctx, refs[0], text); err != nil {
			return Inconclusive, "", err
		}
	}
	got, mode, err := p.ask(ctx, pair, text)
	if err != nil || mode != pdflow.ModeDisaggregated {
		return Inconclusive, "", err
	}
	if first == nil {
		if first, _, err = p.ask(ctx, refs[0], text); err != nil {
			return Inconclusive, "", err
		}
	}
	switch {
	case got.same(first, p.o.Tolerance):
		return Right, "", nil
	case len(refs) == 1:
		return Wrong, "", nil
	}
	second, _, err := p.ask(ctx, refs[1], text)
	switch {
	case err != nil:
		return Inconclusive, "", err
	case second.same(first, p.o.Tolerance):
		return Wrong, "", nil
	case second.same(got, p.o.Tolerance):
		return Right, refs[0].Decode.ID, nil
	}
	return Inconclusive, "", nil
}
