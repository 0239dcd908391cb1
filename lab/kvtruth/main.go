// SPDX-License-Identifier: Apache-2.0

// Command kvtruth compares what the index of KV says of an engine with what the engine says itself: before each request
// it asks the index how many tokens of the prompt are cached, and after it reads cached_tokens of the response's usage.
//
//	go run ./lab/kvtruth -engine http://127.0.0.1:8000 -model tiny
//	go run ./lab/kvtruth -faults
//	go run ./lab/kvtruth -compare 2
//
// The engine must publish KV-cache events and say where (GET /kv_event_sources), have …/render or /tokenize, and count
// cached tokens (vLLM: --enable-prompt-tokens-details). Nobody else may send it requests meanwhile.
//
// With -faults the command starts a vLLM of lab/engines by itself, loses its events, kills it and starts it again, and
// prints how long the index claimed to be exact and was not, when it is exact again, and what its predictions are worth
// then. With -compare it sends the same conversations to some vLLMs through a gateway, once with each of the policies
// round-robin, prefix and kv, and prints how many tokens of their prompts were cached. PDKIT_ENGINES_DIR is where
// lab/engines/install.sh has put the engines.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/kvindex"
)

func main() {
	var r run
	url := flag.String("engine", "", "the engine's `URL`")
	faults := flag.Bool("faults", false, "play the faults with a real engine of this program's own")
	engines := flag.Int("compare", 0, "compare policies on `N` real engines of this program's own")
	only := flag.String("only", "", "play only the fault whose name contains `TEXT`")
	flag.StringVar(&r.model, "model", "tiny", "the model's `NAME`")
	flag.IntVar(&r.requests, "requests", 50, "how many requests, with -faults after each fault")
	flag.IntVar(&r.longest, "longest", 600, "characters of the longest prompt")
	flag.Uint64Var(&r.seed, "seed", 1, "of the prompts")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch {
	case *engines > 0:
		err = r.compare(ctx, *engines)
	case *faults:
		err = realFaults(ctx, &r, *only)
	default:
		var found *result
		if found, err = r.do(ctx, *url); err == nil {
			fmt.Println(found)
			err = found.judge()
		}
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

// do sends requests to an engine that says where it publishes.
func (r *run) do(ctx context.Context, url string) (*result, error) {
	e, err := discovery.New(url, discovery.RoleBoth)
	if err != nil {
		return nil, err
	}
	v, err := watch(ctx, e, r.model)
	if err != nil {
		return nil, err
	}
	defer v.close()
	if _, err := v.becomes(ctx, true, time.Now(), time.Minute); err != nil {
		return nil, err
	}
	found := &result{}
	prompts := r.prompts()
	for range r.requests {
		if err := v.compare(ctx, prompts.next(), found); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// becomes waits until the index claims that the engine's state is exact, or that it is not, and returns when it did so
// first after began.
func (v *view) becomes(ctx context.Context, exact bool, began time.Time, patience time.Duration) (time.Time, error) {
	for deadline := time.Now().Add(patience); ; {
		if at, ok := v.changed(exact, began); ok {
			return at, nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			status := v.index.State(v.engine.ID)
			return time.Time{}, fmt.Errorf("after %s the index is still %s: %s", patience, words[status.State],
				status.Reason)
		}
		time.Sleep(watchEvery)
	}
}

var words = map[kvindex.State]string{kvindex.Exact: "exact", kvindex.Incomplete: "incomplete",
	kvindex.Unknown: "unknown"}
