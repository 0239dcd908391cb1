// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// What is sent to an engine that does nothing else, to learn how long its steps take. Each prompt fits one step. A load
// has other lengths, and other numbers of requests at once.
var (
	batches = [][2]int{{1, 40}, {2, 360}, {4, 40}, {4, 240}, {8, 40}, {8, 160}} // requests that decode, their prompts
	beside  = []int{80, 200, 320, 440}                                          // a prompt while four requests decode
	// prompts of one request, and how much is cached before them
	alone = [][2]int{{48, 0}, {96, 0}, {192, 0}, {288, 0}, {384, 0}, {480, 0}, {480, 480}, {480, 960}, {480, 1440}}
	moved = []int{48, 96, 192, 288, 384, 480} // prompts whose KV goes from one engine to the other
)

// decoded is how many tokens each request of a batch gets.
const decoded = 24

// measured is what an engine has shown.
type measured struct {
	steps    []model.Observation
	time     model.StepTime // that explains them
	overhead float64        // seconds that a request takes beside its steps: mostly HTTP
}

// probe measures one engine.
type probe struct {
	url, model string
	prompts    atomic.Int64
}

// salt is for a prompt of which the engine has nothing in its cache.
func (p *probe) salt() string { return fmt.Sprint(time.Now().UnixNano(), p.prompts.Add(1)) }

func (p *probe) body(prompt, output int, salt string) []byte {
	return paced.Body(p.model, strings.Repeat("word ", prompt/5+1)[:prompt], output, salt)
}

// stream sends a prompt and returns when that was, and when its tokens came. heard is told of each token, if not nil.
func (p *probe) stream(
	ctx context.Context, prompt, output int, salt string, heard func(tokens int),
) (sent time.Time, tokens []time.Time, err error) {
	sent = time.Now()
	send := paced.Posts(strings.TrimSuffix(p.url, "/"), http.DefaultClient)
	from, err := send(ctx, 0, p.body(prompt, output, salt))
	if err != nil {
		return sent, nil, fmt.Errorf("an engine does not serve: %w", err)
	}
	defer from.Close()
	tokens, err = paced.Arrivals(from, heard)
	if err == nil && len(tokens) != output {
		err = fmt.Errorf("an engine made %d tokens, not %d", len(tokens), output)
	}
	return sent, tokens, err
}

// measure sends everything to the engine so many times, and takes the median of each.
func (p *probe) measure(ctx context.Context, times int) (*measured, error) {
	m := &measured{}
	add := func(overhead float64, measure func() (model.Observation, error)) error {
		o, err := median(times, measure)
		o.Seconds -= overhead
		m.steps = append(m.steps, o)
		return err
	}
	for _, b := range batches {
		err := add(0, func() (model.Observation, error) { return p.batch(ctx, b[0], b[1], 0) })
		if err != nil {
			return nil, err
		}
	}
	for _, prompt := range beside {
		err := add(0, func() (model.Observation, error) { return p.batch(ctx, 4, 40, prompt) })
		if err != nil {
			return nil, err
		}
	}
	// A prompt of one token is a step as one of decode is.
	least, err := median(times, func() (model.Observation, error) { return p.single(ctx, 1, 0) })
	if err != nil {
		return nil, err
	}
	m.overhead = max(least.Seconds-m.steps[0].Seconds, 0)
	for _, s := range alone {
		err := add(m.overhead, func() (model.Observation, error) { return p.single(ctx, s[0], s[1]) })
		if err != nil {
			return nil, err
		}
	}
	m.time, err = model.Fit(m.steps)
	return m, err
}

func median(times int, measure func() (model.Observation, error)) (o model.Observation, err error) {
	var all []model.Observation
	for range times {
		if o, err = measure(); err != nil {
			return o, err
		}
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b model.Observation) int { return cmp.Compare(a.Seconds, b.Seconds) })
	return all[len(all)/2], nil
}

// single lets the engine compute so many tokens of a prompt, behind others that it knows.
func (p *probe) single(ctx context.Context, tokens, before int) (o model.Observation, err error) {
	salt := p.salt()
	if before > 0 {
		if _, _, err = p.stream(ctx, before, 1, salt, nil); err != nil {
			return o, err
		}
	}
	sent, made, err := p.stream(ctx, before+tokens, 1, salt, nil)
	if err != nil {
		return o, err
	}
	o.Load = model.Load{Requests: 1, ContextTokens: before, PrefillTokens: tokens,
		Attention: tokens*before + tokens*(tokens+1)/2}
	o.Seconds = made[0].Sub(sent).Seconds()
	return o, nil
}

// batch lets so many requests decode at once, and returns the median of their steps, or, if a prompt comes while they
// do, the step that computes it.
func (p *probe) batch(ctx context.Context, requests, prompt, more int) (o model.Observation, err error) {
	all := make([][]time.Time, requests)
	errs := make([]error, requests+1)
	var running, wg sync.WaitGroup
	running.Add(requests)
	for i := range all {
		wg.Go(func() {
			begun := sync.OnceFunc(running.Done)
			defer begun()
			_, all[i], errs[i] = p.stream(ctx, prompt, decoded, p.salt(), func(tokens int) {
				if tokens >= 3 {
					begun()
				}
			})
		})
	}
	var sent time.Time
	if more > 0 {
		running.Wait()
		sent, _, errs[requests] = p.stream(ctx, more, 1, p.salt(), nil)
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return o, err
	}
	// Steps are read from one request's tokens, while all of them decode.
	from, to := all[0][0], all[0][decoded-1]
	for _, tokens := range all {
		from, to = later(from, tokens[0]), earlier(to, tokens[decoded-1])
	}
	var steps []model.Observation
	for k := 1; k < decoded; k++ {
		begin, end := all[0][k-1], all[0][k]
		if begin.Before(from) || end.After(to) || end.Before(sent) {
			continue
		}
		load := model.Load{Requests: requests, PrefillTokens: more, Attention: more * (more + 1) / 2}
		if more > 0 {
			load.Requests++
		}
		for _, tokens := range all {
			made, _ := slices.BinarySearchFunc(tokens, begin.Add(1), time.Time.Compare)
			load.ContextTokens += prompt + made - 1
		}
		steps = append(steps, model.Observation{Load: load, Seconds: end.Sub(begin).Seconds()})
	}
	if len(steps) == 0 {
		return o, errors.New("the requests of a batch did not run at the same time")
	}
	slices.SortFunc(steps, func(a, b model.Observation) int { return cmp.Compare(a.Seconds, b.Seconds) })
	if more > 0 {
		return steps[len(steps)-1], nil
	}
	return steps[len(steps)/2], nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// fitLink finds what KV takes from prefill to decode, with all that HTTP and the flow take: by how
// much a request that both serve takes longer than its prompt at the one alone, and a step at the other.
func (f *fleet) fitLink(
	ctx context.Context, p *probe, prefill, decode *measured, times int,
) (link model.Link, err error) {
	flow, stop, err := f.flow(ctx, pick.RoundRobin(), 1, func(*connector.Session) {})
	if err != nil {
		return link, err
	}
	defer stop()
	both := func(prompt int) (o model.Observation, err error) {
		one, err := p.single(ctx, prompt, 0)
		if err != nil {
			return o, err
		}
		r, err := paced.Play(ctx, paced.Calls(flow), []request{{Body: p.body(prompt, 2, p.salt()), Output: 2}})
		if err != nil || r.Refused > 0 {
			return o, errors.Join(errors.New("the engines did not serve a request together"), err)
		}
		o.PrefillTokens = prompt // Fit is to find a constant, and seconds for each token
		step := decode.time.Seconds(model.Load{Requests: 1, ContextTokens: prompt})
		o.Seconds = r.TTFT[0] - one.Seconds - step
		return o, nil
	}
	if _, err := both(moved[0]); err != nil { // the first one pays the handshake
		return link, err
	}
	var all []model.Observation
	for _, prompt := range moved {
		o, err := median(times, func() (model.Observation, error) { return both(prompt) })
		if err != nil {
			return link, err
		}
		o.Seconds = max(o.Seconds, 1e-3) // below what can be told
		all = append(all, o)
	}
	fit, err := model.Fit(all)
	link.Latency = fit.Base + prefill.overhead
	if fit.PerPrefillToken > 0 {
		link.BytesPerSecond = 1 / fit.PerPrefillToken // a token is a byte
	}
	return link, err
}
