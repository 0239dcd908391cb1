// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/lab/internal/paced"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

const blockSize = 16

type request = paced.Request

// engine has memory for more than it is sent.
func engine() model.Spec { return paced.Spec(20_000) }

// link moves 10,000 tokens a second.
var link = model.Link{Latency: .002, BytesPerSecond: 1e9}

// newLoad makes requests that come at random (Poisson), half of whose prompts begin as others do.
func newLoad(seed uint64, n int, rate float64) []request {
	r := rand.New(rand.NewPCG(seed, 3)) //nolint:gosec // a load, no secret
	all := make([]request, n)
	at := 0.5
	for i := range all {
		at += r.ExpFloat64() / rate
		var text strings.Builder
		if r.IntN(2) == 0 {
			text.WriteString(strings.Repeat(fmt.Sprintf("system %03d %02d. ", seed, r.IntN(8)), 60))
		}
		fmt.Fprintf(&text, "%03d.%06d.", seed, i)
		text.WriteString(strings.Repeat("word ", 20+r.IntN(380)))
		all[i] = request{At: at, Prompt: text.String(), Output: 10 + r.IntN(70)}
		all[i].Body = paced.Body("tiny", all[i].Prompt, all[i].Output, "")
	}
	return all
}

// setUp is what one run has.
type setUp struct {
	prefill, decode int
	policy          record.Spec
}

func (s *setUp) String() string {
	name := s.policy.Mode
	if n := s.policy.UncachedTokens; n > 0 {
		name += " " + strconv.Itoa(n)
	}
	return fmt.Sprintf("%dP %dD %s", s.prefill, s.decode, name)
}

// sent is what was sent to each engine, in blocks.
type sent struct {
	mu     sync.Mutex
	blocks map[string]map[uint64]bool
}

// Match tells which engines got a beginning of the prompt.
func (s *sent) Match(in *pdflow.PickInput, found []decide.Cached) (n int) {
	keys := keysOf(in.Request)
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, blocks := range s.blocks {
		k := 0
		for k < len(keys) && blocks[keys[k]] {
			k++
		}
		if k > 0 && n < len(found) {
			found[n] = decide.Cached{Engine: id, Tokens: k * blockSize}
			n++
		}
	}
	slices.SortFunc(found[:n], func(a, b decide.Cached) int { return b.Tokens - a.Tokens })
	return n
}

func (s *sent) add(keys []uint64, ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		if id == "" {
			continue
		}
		if s.blocks[id] == nil {
			s.blocks[id] = map[uint64]bool{}
		}
		for _, key := range keys {
			s.blocks[id][key] = true
		}
	}
}

func keysOf(r *connector.ClientRequest) []uint64 {
	q := paced.Request{Prompt: gjson.GetBytes(r.Body(), "prompt").String()}
	return q.Keys(blockSize)
}

// inRealTime plays a load, and records it.
func inRealTime(
	ctx context.Context, s setUp, load []request,
) (r *paced.Result, recorded []byte, err error) {
	specs := slices.Repeat([]model.Spec{engine()}, s.prefill+s.decode)
	fleet := &paced.Fleet{Prefill: s.prefill, Specs: specs, Link: link}
	stop, err := fleet.Start()
	if err != nil {
		return nil, nil, err
	}
	defer stop()
	set, err := fleet.Set()
	if err != nil {
		return nil, nil, err
	}
	policy, err := s.policy.Policy()
	if err != nil {
		return nil, nil, err
	}
	var file bytes.Buffer
	recorder := record.New(record.Options{Header: record.Header{Model: "tiny", Share: 1, Policy: s.policy},
		Open: func() (io.WriteCloser, error) { return closer{&file}, nil }})
	class := decide.Class{TTFT: objectives.TTFT, ITL: objectives.TPOT}
	was := &sent{blocks: map[string]map[uint64]bool{}}
	picker, err := decide.New(pick.New(set, pick.PrefixAffinity(), pick.WithCandidates()), policy, &decide.Options{
		Class: func(*pdflow.PickInput) decide.Class { return class },
		Tokens: func(in *pdflow.PickInput) (int, bool) {
			return len(gjson.GetBytes(in.Request.Body(), "prompt").String()), true
		},
		Cache: was, Recorder: recorder,
	})
	if err != nil {
		return nil, nil, err
	}
	defer picker.Close()
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, nil, err
	}
	flow, err := pdflow.New(conn, picker, pdflow.WithObserver(pdflow.Observer{
		SessionStart: func(_ context.Context, s *connector.Session) {
			was.add(keysOf(s.Request), s.Prefill.ID, s.Decode.ID)
		}}))
	if err != nil {
		return nil, nil, err
	}
	r, err = paced.Play(ctx, paced.Calls(flow), load)
	_ = flow.Shutdown(context.WithoutCancel(ctx))
	recorder.Close()
	if written, lost := recorder.Counts(); err == nil && written != int64(len(load)) {
		err = fmt.Errorf("of %d decisions %d were recorded, and %d lost", len(load), written, lost)
	}
	return r, file.Bytes(), err
}

type closer struct{ io.Writer }

func (closer) Close() error { return nil }
