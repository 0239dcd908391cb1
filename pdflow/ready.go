// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Ready returns nil if requests can be served now, else the reason, for operators:
//
//   - the flow takes no new requests any more ([CodeDraining]),
//   - [Flow.HealthCheck] fails. Start the flow first: a connector's listener that does not run yet counts as failed,
//   - the engines of one request are not there: an *[Error], as a rule [CodeNoEndpoint]. The picker tells it by the
//     connector's own rules; with an encode stage it needs an encode engine, too. See Ready of [Picker].
//
// A picker that cannot tell, as one that is a function, counts as ready whatever engines are there; [New] logs that.
// What the flow falls back to is not asked. Ready sends nothing to engines. The health check may take
// Timeouts.HealthCheck.
func (f *Flow) Ready(ctx context.Context) error {
	if f.live.Closed() {
		return &Error{Code: CodeDraining, Connector: f.name, Message: "shutting down"}
	}
	in := &PickInput{Attempt: 1}
	if f.encoder != nil {
		in.Encode = 1
	}
	if err := f.picker.Ready(in); err != nil {
		return f.pickError(ctx, err)
	}
	if f.limits.HealthCheck > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.limits.HealthCheck)
		defer cancel()
	}
	if err := f.HealthCheck(ctx); err != nil {
		return fmt.Errorf("connector %s: %w", f.name, err)
	}
	return nil
}

// tellOfReady logs that Ready is of no use, for operators whose readiness probe asks it.
func (f *Flow) tellOfReady() {
	if f.picker.Changed() == nil {
		f.opts.telemetry.Logger.Info("the picker does not tell which engines are there: the flow counts as ready "+
			"without any, and does not wait for them", "connector", f.name)
	}
}

func (s *split) Ready(ctx context.Context) error {
	if s.percent < 100 {
		if err := s.main.Ready(ctx); err != nil || s.percent == 0 {
			return err
		}
	}
	return s.other.Ready(ctx)
}

// Ready returns nil if all routes are ready, else the reasons of those that are not, in the order of their models.
func (m *Mux) Ready(ctx context.Context) error {
	models := m.routes.Load().models
	var errs []error
	for _, model := range slices.Sorted(maps.Keys(models)) {
		if err := models[model].Ready(ctx); err != nil {
			errs = append(errs, fmt.Errorf("model %q: %w", model, err))
		}
	}
	return errors.Join(errs...)
}
