// SPDX-License-Identifier: Apache-2.0

// Command kvtruth compares what the index of KV says of an engine with what the engine says itself: before each request
// it asks the index how many tokens of the prompt are cached, and after it reads cached_tokens of the response's usage.
//
//	go run ./lab/kvtruth -engine http://127.0.0.1:8000 -model tiny
//
// The engine must publish KV-cache events and say where (GET /kv_event_sources), have …/render or /tokenize, and count
// cached tokens (vLLM: --enable-prompt-tokens-details). Nobody else may send it requests meanwhile.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/prompttokens"
)

func main() {
	var r run
	engine := flag.String("engine", "", "the engine's `URL`")
	flag.StringVar(&r.model, "model", "tiny", "the model's `NAME`")
	flag.IntVar(&r.requests, "requests", 50, "how many requests")
	flag.IntVar(&r.longest, "longest", 600, "characters of the longest prompt")
	flag.Uint64Var(&r.seed, "seed", 1, "of the prompts")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	found, err := r.do(ctx, *engine)
	if err == nil {
		fmt.Println(found)
		err = found.judge()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "kvtruth:", err)
		os.Exit(1) //nolint:gocritic // the signal's handler ends with the process
	}
}

// run is what is to be done.
type run struct {
	model             string
	requests, longest int
	seed              uint64
}

// result is what was found.
type result struct {
	Requests int // in all
	Exact    int // for which the index claimed to be exact
	Right    int // of these: the index said what the response says
	Cached   int // tokens that responses call cached
	Prompt   int // tokens of all prompts
	Wrong    []string
}

// judge is an error where the index claimed to be exact and was wrong more often than once in a hundred times, or never
// claimed it.
func (r result) judge() error {
	if r.Exact == 0 || 100*r.Right < 99*r.Exact {
		return errors.New("the index is not what the engine counts")
	}
	return nil
}

func (r result) String() string {
	text := fmt.Sprintf("%d requests, %d with an exact state; of these %d predicted as the response says; "+
		"%d of %d prompt tokens were cached", r.Requests, r.Exact, r.Right, r.Cached, r.Prompt)
	return strings.Join(append([]string{text}, r.Wrong...), "\n")
}

func (r *run) do(ctx context.Context, url string) (*result, error) {
	e, err := discovery.New(url, discovery.RoleBoth)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(e)
	if err != nil {
		return nil, err
	}
	index := kvindex.New()
	reader, err := kvevents.New(index.Sink(), &kvevents.Options{Model: r.model, Client: http.DefaultTransport})
	if err != nil {
		return nil, err
	}
	following, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = reader.Run(following, set) }()
	defer func() { stop(); <-done }()
	for deadline := time.Now().Add(time.Minute); index.State(e.ID).State != kvindex.Exact; {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return nil, fmt.Errorf("the index is not exact: %s", index.State(e.ID).Reason)
		}
		time.Sleep(10 * time.Millisecond)
	}
	tokens := prompttokens.New(set, &prompttokens.Options{Timeout: 10 * time.Second})
	defer tokens.Close()
	found := &result{}
	random := rand.New(rand.NewPCG(r.seed, 1)) //nolint:gosec // the same prompts again
	var known []string
	for range r.requests {
		prompt := r.prompt(random, known)
		known = append(known, prompt)
		if err := r.one(ctx, e, index, tokens, prompt, found); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// prompt is a new prompt, or one that begins as an earlier one does.
func (r *run) prompt(random *rand.Rand, known []string) string {
	n := 40 + random.IntN(r.longest-40)
	text := ""
	if len(known) > 0 && random.IntN(3) > 0 {
		old := known[random.IntN(len(known))]
		text = old[:random.IntN(len(old)+1)]
	}
	var b strings.Builder
	b.WriteString(text)
	for b.Len() < n {
		fmt.Fprintf(&b, "%x ", random.Uint32())
	}
	return b.String()[:max(n, len(text))]
}

func (r *run) one(ctx context.Context, e discovery.Endpoint, index *kvindex.Index, tokens *prompttokens.Client,
	prompt string, found *result) error {
	body, err := json.Marshal(map[string]any{"model": r.model, "prompt": prompt, "max_tokens": 24, "temperature": 0})
	if err != nil {
		return err
	}
	request, err := connector.ParseRequest(connector.APICompletions, body)
	if err != nil {
		return err
	}
	ids, exact, err := tokens.Tokens(ctx, request)
	if err != nil {
		return err
	}
	predicted := 0
	state := index.State(e.ID)
	for _, hit := range index.Match(&kvindex.Query{Model: r.model, Tokens: ids}, nil) {
		predicted = hit.Device
	}
	cached, n, err := ask(ctx, e.URL.String(), body)
	if err != nil {
		return err
	}
	if n != len(ids) {
		return fmt.Errorf("the engine counts %d tokens of a prompt that it rendered as %d", n, len(ids))
	}
	found.Requests++
	found.Cached += cached
	found.Prompt += n
	if state.State != kvindex.Exact || !exact {
		return nil
	}
	found.Exact++
	if cached == predicted {
		found.Right++
	} else {
		found.Wrong = append(found.Wrong, fmt.Sprintf("request %d: predicted %d, cached %d, of %d tokens",
			found.Requests, predicted, cached, n))
	}
	time.Sleep(200 * time.Millisecond) // the events of a request come after its response
	return nil
}

func ask(ctx context.Context, url string, body []byte) (cached, prompt int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return 0, 0, err
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, 0, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0, 0, errors.Join(err, fmt.Errorf("the engine answered %d", resp.StatusCode))
	}
	var a struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	err = json.Unmarshal(answer, &a)
	return a.Usage.Details.Cached, a.Usage.Prompt, err
}
