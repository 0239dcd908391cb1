// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/prompttokens"
)

// watchEvery is how often a view is looked at.
const watchEvery = 2 * time.Millisecond

// view is an index and its reader, as a gateway has them, and what it claims over time.
type view struct {
	engine discovery.Endpoint
	model  string
	index  *kvindex.Index
	reader *kvevents.Subscriber
	tokens *prompttokens.Client
	stop   context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	claims  []claim
	truth   []uint32      // a prompt, of which the engine holds
	holds   int           // tokens
	wrong   time.Duration // how long the index claimed to be exact and something else
	watched bool          // truth and wrong are kept
}

// claim is a time from which on the index claims to be exact, or not.
type claim struct {
	at    time.Time
	exact bool
}

// watch begins to follow an engine.
func watch(ctx context.Context, e discovery.Endpoint, model string) (*view, error) {
	set, err := static.NewSet(e)
	if err != nil {
		return nil, err
	}
	v := &view{engine: e, model: model, index: kvindex.New()}
	v.reader, err = kvevents.New(v.index.Sink(), &kvevents.Options{Model: model, Client: http.DefaultTransport})
	if err != nil {
		return nil, err
	}
	v.tokens = prompttokens.New(set, &prompttokens.Options{Timeout: 10 * time.Second})
	ctx, v.stop = context.WithCancel(ctx)
	v.work.Go(func() { _ = v.reader.Run(ctx, set) })
	v.work.Go(func() {
		for last := time.Now(); ctx.Err() == nil; time.Sleep(watchEvery) {
			now := time.Now()
			v.look(now, now.Sub(last))
			last = now
		}
	})
	return v, nil
}

func (v *view) close() {
	v.stop()
	v.work.Wait()
	v.tokens.Close()
}

// look notes what the index claims now.
func (v *view) look(now time.Time, since time.Duration) {
	v.mu.Lock()
	defer v.mu.Unlock()
	exact := v.index.State(v.engine.ID).State == kvindex.Exact
	if n := len(v.claims); n == 0 || v.claims[n-1].exact != exact {
		v.claims = append(v.claims, claim{now, exact})
	}
	if v.watched && exact && v.held(v.truth) != v.holds {
		v.wrong += since
	}
}

// changed returns when the index claimed first, after a time, to be exact or not.
func (v *view) changed(exact bool, after time.Time) (time.Time, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, c := range v.claims {
		if c.exact == exact && (i == len(v.claims)-1 || v.claims[i+1].at.After(after)) {
			if c.at.Before(after) {
				return after, true
			}
			return c.at, true
		}
	}
	return time.Time{}, false
}

// knows says what is true from now on: the engine holds so much of a prompt.
func (v *view) knows(prompt []uint32, holds int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.truth, v.holds, v.watched = prompt, holds, true
}

// lied returns how long the index claimed what is not true since it was asked last.
func (v *view) lied() time.Duration {
	v.mu.Lock()
	defer v.mu.Unlock()
	wrong := v.wrong
	v.wrong, v.watched = 0, false
	return wrong
}

// held is what the index says that the engine holds of a prompt.
func (v *view) held(prompt []uint32) (tokens int) {
	for _, hit := range v.index.Match(&kvindex.Query{Model: v.model, Tokens: prompt}, nil) {
		tokens = hit.Device
	}
	return tokens
}

// settled is how long after a response the events of its request have come.
const settled = 200 * time.Millisecond

// compare sends a request, and compares what was predicted with what was cached.
func (v *view) compare(ctx context.Context, prompt string, found *result) error {
	body, ids, err := v.request(ctx, prompt, 24)
	if err != nil {
		return err
	}
	exact := v.index.State(v.engine.ID).State == kvindex.Exact
	predicted := v.held(ids)
	cached, n, err := ask(ctx, v.engine.URL.String(), body)
	if err != nil {
		return err
	}
	if n != len(ids) {
		return fmt.Errorf("the engine counts %d tokens of a prompt that it rendered as %d", n, len(ids))
	}
	found.Requests++
	found.Cached += cached
	found.Prompt += n
	if exact {
		found.Exact++
		if cached == predicted {
			found.Right++
		} else {
			found.Wrong = append(found.Wrong, fmt.Sprintf("request %d: predicted %d, cached %d, of %d tokens",
				found.Requests, predicted, cached, n))
		}
	}
	time.Sleep(settled)
	return nil
}

// request makes a request, and asks the engine for the tokens of its prompt.
func (v *view) request(ctx context.Context, prompt string, length int) (body []byte, ids []uint32, err error) {
	body, err = json.Marshal(map[string]any{"model": v.model, "prompt": prompt, "max_tokens": length, "temperature": 0})
	if err != nil {
		return nil, nil, err
	}
	request, err := connector.ParseRequest(connector.APICompletions, body)
	if err != nil {
		return nil, nil, err
	}
	exact := false
	for range 3 { // a connection to an engine that was killed meanwhile breaks
		if ids, exact, err = v.tokens.Tokens(ctx, request); err == nil {
			break
		}
	}
	if err == nil && !exact {
		err = errors.New("the prompt's tokens are not known exactly")
	}
	return body, ids, err
}

// answer is an engine's response.
type answer struct {
	Choices []struct{ Text string }
	Usage   struct {
		Prompt  int `json:"prompt_tokens"`
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

func ask(ctx context.Context, url string, body []byte) (cached, prompt int, err error) {
	a, err := complete(ctx, url, body)
	return a.Usage.Details.Cached, a.Usage.Prompt, err
}

func complete(ctx context.Context, url string, body []byte) (a answer, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return a, errors.Join(err, fmt.Errorf("the response has status %d", resp.StatusCode))
	}
	return a, json.Unmarshal(text, &a)
}

// prompts are prompts of which many begin as earlier ones do.
type prompts struct {
	random  *rand.Rand
	longest int
	known   []string
}

func (r *run) prompts() *prompts {
	return &prompts{random: rand.New(rand.NewPCG(r.seed, 1)), longest: r.longest} //nolint:gosec // the same again
}

func (p *prompts) next() string {
	n := 40 + p.random.IntN(p.longest-40)
	text := ""
	if len(p.known) > 0 && p.random.IntN(3) > 0 {
		old := p.known[p.random.IntN(len(p.known))]
		text = old[:p.random.IntN(len(old)+1)]
	}
	prompt := p.fresh(text, max(n, len(text)))
	p.known = append(p.known, prompt)
	return prompt
}

// fresh goes on with a text to a length.
func (p *prompts) fresh(text string, length int) string {
	var b strings.Builder
	b.WriteString(text)
	for b.Len() < length {
		fmt.Fprintf(&b, "%x ", p.random.Uint32())
	}
	return b.String()[:length]
}
