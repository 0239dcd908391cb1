// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"fmt"
	"log"
	"time"

	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// A flow decides by its picker.
func ExampleNew() {
	conn, err := plainhttp.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	set := discovery.NewSet() // of the sources that find the engines
	picker, err := decide.New(pick.New(set, pick.PrefixAffinity(), pick.WithCandidates()),
		decide.Threshold(1024, 0), &decide.Options{DryRun: true})
	if err != nil {
		log.Fatal(err)
	}
	defer picker.Close()
	flow, err := pdflow.New(conn, picker)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(flow.Connector().Traits().Name, len(picker.State().Decisions))
	// Output: http 0
}

// A scheduler of any kind can ask a policy: it is a function of what is known of the engines.
func ExamplePredicted() {
	speed := decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6}
	in := &decide.Input{Prompt: 4000, Exact: true, TokenBytes: 131_072, Link: 25e9,
		Prefill: []decide.Candidate{{Speed: speed, QueueTokens: 60_000}, {Speed: speed}},
		Decode:  []decide.Candidate{{Speed: speed, Running: 40, Context: 80_000, Alone: true}}}
	policy := decide.Predicted(decide.PredictedOptions{TTFT: time.Second, ITL: 50 * time.Millisecond})
	var out decide.Decision
	policy.Decide(in, &out)
	fmt.Println(out.Action, out.Prefill, out.Decode, out.Reason, out.TTFT.Round(time.Millisecond))

	in.Prefill[1].QueueTokens, in.Decode[0].Cached, in.Decode[0].CachedExact = 60_000, 3900, true // turn 2
	policy.Decide(in, &out)
	fmt.Println(out.Action, out.Decode, out.Reason, out.TTFT.Round(time.Millisecond))
	// Output:
	// split 1 0 interference 174ms
	// decode_alone 0 cached 16ms
}
