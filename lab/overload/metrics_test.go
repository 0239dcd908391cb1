// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// onePair picks the same two engines for all.
func onePair(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	p, err := discovery.New("http://p:1", discovery.RolePrefill)
	if err != nil {
		return pdflow.Pick{}, err
	}
	d, err := discovery.New("http://d:1", discovery.RoleDecode)
	return pdflow.Pick{Prefill: p, Decode: d}, err
}

func TestMetricsOfAdmission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := metric.NewManualReader()
		p, err := admit.New(pick.Func(onePair), &admit.Options{PrefillLimit: 1, Queue: 1,
			MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))})
		require.NoError(t, err)
		first, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
		require.NoError(t, err)
		picked := make(chan error)
		go func() {
			_, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
			picked <- err
		}()
		synctest.Wait()
		_, err = p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
		require.ErrorIs(t, err, pdflow.CodeOverloaded)
		m := collect(t, reader)
		assert.EqualValues(t, 1, m["pd.admission.queued"].(metricdata.Sum[int64]).DataPoints[0].Value)
		refused := m["pd.admission.refused"].(metricdata.Sum[int64]).DataPoints[0]
		reason, _ := refused.Attributes.Value("pd.reason")
		assert.EqualValues(t, 1, refused.Value)
		assert.Equal(t, "queue_full", reason.AsString())
		time.Sleep(2 * time.Second)
		first.Done(&pdflow.Outcome{})
		require.NoError(t, <-picked)
		m = collect(t, reader)
		assert.InDelta(t, 2, m["pd.admission.wait"].(metricdata.Histogram[float64]).DataPoints[0].Sum, .001)
		assert.Zero(t, m["pd.admission.queued"].(metricdata.Sum[int64]).DataPoints[0].Value)
	})
}

func collect(t *testing.T, reader *metric.ManualReader) map[string]metricdata.Aggregation {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all))
	m := map[string]metricdata.Aggregation{}
	for _, scope := range all.ScopeMetrics {
		for _, one := range scope.Metrics {
			m[one.Name] = one.Data
		}
	}
	return m
}
