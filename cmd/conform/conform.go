// SPDX-License-Identifier: Apache-2.0

// Package conform tests gateways for prefill/decode disaggregation from outside: it plays vLLM's engines with
// NixlConnector on loopback, sends requests through the gateway under test, and judges by what the client got and by
// the engines' ledger of their KV. It knows nothing of the gateway but how to start it, or where it runs. The command
// is `pdctl conform`; results for some gateways are in docs/conformance.md.
package conform

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// Severity tells what a breach of a rule costs.
type Severity string

// Severities. Must: answers are lost, wrong or late by a whole generation, KV leaks, or prompts are silently computed
// twice. Should: everything else, where gateways may differ for good reasons.
const (
	Must   Severity = "must"
	Should Severity = "should"
)

// Case is one rule with its check.
type Case struct {
	ID       string // group and name: "cancel/prefill"
	Severity Severity
	Rule     string // what must hold, and why
	// Process says that the check needs a gateway that the kit has started, to send it a signal.
	Process bool
	// Check returns nil if the rule holds, a *Breach if not, another error if that cannot be told.
	Check func(ctx context.Context, s *Scene) error
}

// Group is the first part of the id.
func (c Case) Group() string { group, _, _ := strings.Cut(c.ID, "/"); return group }

// Groups are the rules' groups, in the order of reports.
var Groups = []string{"wire", "coupling", "retry", "stream", "cancel", "security", "drain", "field"}

// Cases returns all cases, in the order of reports.
func Cases() []Case {
	return slices.Concat(wireCases, headerCases, couplingCases, retryCases, streamCases, cancelCases, securityCases,
		drainCases, fieldCases)
}

// Select returns the cases whose id or group matches one of the patterns, as path.Match does. No pattern selects all.
func Select(patterns []string) ([]Case, error) {
	var chosen []Case
	used := make([]bool, len(patterns))
	for _, c := range Cases() {
		match := len(patterns) == 0
		for i, p := range patterns {
			inID, err := path.Match(p, c.ID)
			if err != nil {
				return nil, fmt.Errorf("%q is no pattern", p)
			}
			if inGroup, _ := path.Match(p, c.Group()); inID || inGroup {
				match, used[i] = true, true
			}
		}
		if match {
			chosen = append(chosen, c)
		}
	}
	if i := slices.Index(used, false); i >= 0 {
		return nil, fmt.Errorf("no case matches %q", patterns[i])
	}
	return chosen, nil
}

// Breach is a rule that does not hold.
type Breach struct {
	Want string // what was expected
	Saw  string // what was seen; without prompts
}

func (b *Breach) Error() string { return "expected " + b.Want + "; saw " + b.Saw }

func breach(want, saw string, args ...any) error { return &Breach{want, fmt.Sprintf(saw, args...)} }

// errSkip marks what cannot be judged.
type errSkip string

func (e errSkip) Error() string { return string(e) }

// Options are the settings of Run.
type Options struct {
	// Parallel is how many cases run at a time. Default 4; a gateway that was already running gets one at a time.
	Parallel int
	// Timeout bounds each case. Default 30 s.
	Timeout time.Duration
	// Progress, if it is not nil, is called after each case, by one goroutine at a time.
	Progress func(Result)

	once bool // a failure is not confirmed by a second run
}

// Run runs the cases. A case that fails is run once more by itself, and the second run counts: beside others, a busy
// machine holds up the clocks of checks. Run returns an error only if the gateway cannot be started.
func Run(ctx context.Context, g Gateway, cases []Case, o Options) (*Report, error) {
	if o.Parallel <= 0 {
		o.Parallel = 4
	}
	if o.Timeout <= 0 {
		o.Timeout = 30 * time.Second
	}
	r := &runner{gateway: g, options: o}
	if shared, ok := g.(*Running); ok {
		scene, err := shared.scene(ctx)
		if err != nil {
			return nil, err
		}
		defer scene.close()
		r.shared, r.options.Parallel = scene, 1
	} else if err := r.tryStart(ctx); err != nil {
		return nil, err
	}
	report := &Report{Date: time.Now().UTC().Format(time.DateOnly), Results: make([]Result, len(cases))}
	slots := make(chan struct{}, r.options.Parallel)
	var all sync.WaitGroup
	for i, c := range cases {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			report.Results[i] = r.run(ctx, c)
			if report.Results[i].Verdict != Fail || r.shared != nil {
				r.told(report.Results[i])
			}
		})
	}
	all.Wait()
	for i, first := range report.Results {
		if first.Verdict == Fail && r.shared == nil && !o.once && ctx.Err() == nil {
			report.Results[i] = r.run(ctx, cases[i])
			r.told(report.Results[i])
		}
	}
	return report, ctx.Err()
}

type runner struct {
	gateway Gateway
	options Options
	shared  *Scene
	telling sync.Mutex
}

func (r *runner) told(result Result) {
	r.telling.Lock()
	defer r.telling.Unlock()
	if r.options.Progress != nil {
		r.options.Progress(result)
	}
}

// tryStart tells early, and once, that a gateway does not start.
func (r *runner) tryStart(ctx context.Context) error {
	s, err := newScene(ctx, r.gateway)
	if err == nil {
		s.close()
	}
	return err
}

// run runs one case in a scene of its own, so that no case can disturb another.
func (r *runner) run(ctx context.Context, c Case) Result {
	result := Result{ID: c.ID, Group: c.Group(), Severity: c.Severity, Rule: c.Rule}
	began := time.Now()
	err := r.check(ctx, c)
	result.Seconds = time.Since(began).Seconds()
	var b *Breach
	var skip errSkip
	switch {
	case err == nil:
		result.Verdict = Pass
	case errors.As(err, &b):
		result.Verdict, result.Want, result.Saw = Fail, b.Want, b.Saw
	case errors.As(err, &skip):
		result.Verdict, result.Saw = Skip, string(skip)
	default:
		result.Verdict, result.Want, result.Saw = Fail, "an answer that can be judged", err.Error()
	}
	return result
}

func (r *runner) check(ctx context.Context, c Case) error {
	s := r.shared
	if c.Process && s != nil {
		return errSkip("needs a gateway that pdctl starts")
	}
	if s == nil {
		var err error
		if s, err = newScene(ctx, r.gateway); err != nil {
			return err
		}
		defer s.close()
	} else if err := s.renew(ctx); err != nil {
		return err
	}
	if c.Process && s.gateway.Terminate == nil {
		return errSkip("needs a gateway that pdctl starts as a process")
	}
	ctx, cancel := context.WithTimeout(ctx, r.options.Timeout)
	defer cancel()
	return c.Check(ctx, s)
}
