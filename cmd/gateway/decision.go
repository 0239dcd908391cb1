// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// decision is the policy of a pool. A model that changes keeps it, with what it has learnt of its engines, unless the
// change is about the policy itself.
type decision struct {
	*decide.Picker
	recorder *record.Recorder // nil: nothing is recorded
	key      string
	users    atomic.Int64 // models
}

// deciding returns the picker that the model's limits, if it has any, are put around.
func (m *model) deciding(tel *telemetry, to *recording) (pdflow.Picker, error) {
	policy, o := m.Decision()
	if policy == nil {
		return m.picker, nil
	}
	key, err := json.Marshal(m.decisionKey())
	if err != nil {
		return nil, err
	}
	d := m.pool.decision
	if d == nil || d.key != string(key) {
		o.Attributes = []attribute.KeyValue{attribute.String("gen_ai.request.model", m.Model())}
		if tel.meters != nil {
			o.MeterProvider = tel.meters
		}
		if m.inspected != nil {
			o.Load = m.pool.load
		}
		recorder, err := to.recorder(m, tel)
		if err != nil {
			return nil, err
		}
		if recorder != nil {
			o.Recorder = recorder
		}
		picker, err := decide.New(m.picker, policy, o)
		if err != nil {
			if recorder != nil {
				recorder.Close()
			}
			return nil, err
		}
		d = &decision{Picker: picker, recorder: recorder, key: string(key)}
	}
	d.users.Add(1)
	m.decision = d // and from here on, release ends it
	return m.decision, nil
}

// decisionKey is what a policy depends on: whether it may refuse, too.
func (m *modelServer) decisionKey() any { return []any{m.Spec.Decision, m.AdmitOptions() != nil} }

// release ends the metrics after the last user. d may be nil.
func (d *decision) release() {
	if d == nil || d.users.Add(-1) > 0 {
		return
	}
	_ = d.Close() // never fails
	if d.recorder != nil {
		d.recorder.Close()
	}
}

// printDecision writes which requests are split, if not all are.
func (m *modelServer) printDecision(w io.Writer) {
	d := &m.Spec.Decision
	if !m.Decides() {
		return
	}
	text := string(d.Mode)
	if d.Mode == modelserver.DecisionThreshold || d.Mode == modelserver.DecisionPredicted {
		if d.MinPromptTokens > 0 {
			text += fmt.Sprintf(", prompts below %d tokens stay at decode", d.MinPromptTokens)
		}
		if d.UncachedTokens > 0 {
			text += fmt.Sprintf(", and those with fewer than %d that are not cached", d.UncachedTokens)
		}
	}
	if d.Mode == modelserver.DecisionPredicted {
		text += fmt.Sprintf(", TTFT of %s, ITL of %s",
			cmp.Or(time.Duration(d.Objectives.TTFT), decide.DefaultTTFT),
			cmp.Or(time.Duration(d.Objectives.ITL), decide.DefaultITL))
		if _, o := m.Decision(); o.Class != nil {
			text += ", may refuse"
		}
	}
	if d.DryRun {
		text += ", counted only"
	}
	row(w, "decision", text)
}
