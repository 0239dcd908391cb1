// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"

	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
)

// admission is the limits of a pool. A model that changes keeps them, with what they count and have measured, unless
// the change is about the limits themselves.
type admission struct {
	*admit.Picker
	key   string
	users atomic.Int64 // models
}

// admitting returns the picker of the model's flows, with limits where its ModelServer has any. What passes to engines
// and is no inference does not count.
func (m *model) admitting(tel *telemetry, to *recording) (pdflow.Picker, error) {
	inner, err := m.deciding(tel, to)
	limits := m.AdmitOptions()
	if err != nil || limits == nil {
		return inner, err
	}
	key, err := json.Marshal([]any{m.Spec.Admission, m.decisionKey()})
	if err != nil {
		return nil, err
	}
	a := m.pool.admission
	if a == nil || a.key != string(key) {
		limits.Attributes = []attribute.KeyValue{attribute.String("gen_ai.request.model", m.Model())}
		if tel.meters != nil {
			limits.MeterProvider = tel.meters
		}
		if from := m.inspected; from != nil {
			limits.Load = func(id string) inspect.Load {
				r, _ := from.Reading(id)
				return r.Load
			}
		}
		picker, err := admit.New(inner, limits)
		if err != nil {
			return nil, err
		}
		a = &admission{Picker: picker, key: string(key)}
	}
	a.users.Add(1)
	m.admission = a // and from here on, release ends it
	return m.admission, nil
}

// release ends the metrics after the last user. a may be nil.
func (a *admission) release() {
	if a != nil && a.users.Add(-1) == 0 {
		_ = a.Close() // never fails
	}
}
