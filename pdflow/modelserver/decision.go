// SPDX-License-Identifier: Apache-2.0

package modelserver

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// Decision says which requests are split between two engines: see package decide.
type Decision struct {
	// always; never: a decode engine serves each request alone; threshold: one does where the prompt is short;
	// predicted: one does where it is the better choice by predicted latencies
	Mode DecisionMode `json:"mode"`
	// tokens: a shorter prompt is not split. With threshold and predicted
	MinPromptTokens int `json:"minPromptTokens"`
	// tokens: a prompt is not split of which fewer are not in a decode engine's cache. With threshold and predicted
	UncachedTokens int        `json:"uncachedTokens"`
	Objectives     Objectives `json:"objectives"` // of all requests. With predicted
	DryRun         bool       `json:"dryRun"`     // decisions are counted, and each request is split
}

// Objectives are the latencies that clients are promised.
type Objectives struct {
	TTFT config.Duration `json:"ttft"` // time to the first token
	ITL  config.Duration `json:"itl"`  // time between two tokens
}

// DecisionMode is a policy.
type DecisionMode string

// The modes. "" is DecisionAlways.
const (
	DecisionAlways    DecisionMode = "always"
	DecisionNever     DecisionMode = "never"
	DecisionThreshold DecisionMode = "threshold"
	DecisionPredicted DecisionMode = "predicted"
)

// UnmarshalJSON reads a mode.
func (m *DecisionMode) UnmarshalJSON(raw []byte) error {
	var s string
	modes := []string{string(DecisionAlways), string(DecisionThreshold), string(DecisionPredicted),
		string(DecisionNever)}
	if json.Unmarshal(raw, &s) != nil || !slices.Contains(modes, s) {
		return &config.FieldError{Problem: "is not a known mode", Remedy: config.Suggest(s, modes)}
	}
	*m = DecisionMode(s)
	return nil
}

// Decides reports whether the model needs a policy: without one each request is split.
func (m *ModelServer) Decides() bool { return !m.Spec.Decision.always() }

// Predicts reports whether the policy compares what it predicts with what comes, for which it needs streams' token
// counts. A dry run does without them, since decode is asked for them.
func (m *ModelServer) Predicts() bool {
	d := &m.Spec.Decision
	return d.Mode == DecisionPredicted && !d.DryRun
}

// DecisionSpec is the policy as a record of its decisions names it: see package record.
func (m *ModelServer) DecisionSpec() record.Spec {
	d := &m.Spec.Decision
	return record.Spec{Mode: string(d.Mode), MinPromptTokens: d.MinPromptTokens, UncachedTokens: d.UncachedTokens,
		TTFT: time.Duration(d.Objectives.TTFT), ITL: time.Duration(d.Objectives.ITL)}
}

// Decision returns the policy for the model's picker, and options for package decide; nil where each request is split.
// Requests may be refused where the model has admission.
func (m *ModelServer) Decision() (decide.Policy, *decide.Options) {
	d := &m.Spec.Decision
	if d.always() {
		return nil, nil
	}
	o := &decide.Options{DryRun: d.DryRun}
	if d.Mode == DecisionPredicted && m.AdmitOptions() != nil {
		o.Class = func(*pdflow.PickInput) decide.Class { return decide.Class{Refusable: true} }
	}
	spec := m.DecisionSpec()
	policy, err := spec.Policy()
	if err != nil {
		return nil, nil // a mode that UnmarshalJSON has not read
	}
	return policy, o
}

func (d *Decision) always() bool { return d.Mode == "" || d.Mode == DecisionAlways }

func (m *ModelServer) checkDecision() {
	const at = "spec.decision"
	d := &m.Spec.Decision
	for _, n := range []struct {
		name  string
		value int
	}{{"minPromptTokens", d.MinPromptTokens}, {"uncachedTokens", d.UncachedTokens}} {
		if n.value < 0 {
			m.fault(at+"."+n.name, "is negative", "write a number of tokens, or leave it out")
		}
	}
	given := func(names ...string) string {
		for _, name := range names {
			if m.Has(at + "." + name) {
				return name
			}
		}
		return ""
	}
	switch {
	case d.always() && *d != (Decision{Mode: d.Mode}):
		m.note(true, at, "its mode is always", "write mode: threshold, mode: predicted or mode: never")
		return
	case d.Mode == DecisionThreshold && d.MinPromptTokens == 0 && d.UncachedTokens == 0:
		m.fault(at, "has no threshold", "write minPromptTokens or uncachedTokens")
	case d.Mode == DecisionNever && given("minPromptTokens", "uncachedTokens", "objectives") != "":
		m.note(true, at+"."+given("minPromptTokens", "uncachedTokens", "objectives"), "the mode is never", "remove it")
	case d.Mode == DecisionThreshold && given("objectives") != "":
		m.note(true, at+".objectives", "the mode is threshold", "remove it, or write mode: predicted")
	}
	if m.Main != nil && !d.always() && m.Main.KVConnector != nil && m.Main.KVConnector.Traits().Serving.PairOnly {
		m.note(false, at, "a decode engine of "+m.Main.Name+" serves no request alone", "engines of role both can")
	}
}
