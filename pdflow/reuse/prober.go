// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// SyntheticProberOptions are the settings of a [SyntheticProber].
type SyntheticProberOptions struct {
	// Every is the time between the beginnings of two checks, with a jitter of a tenth; default 1 min.
	Every time.Duration
	// Probe are the options of one check; default one synthetic probe of 600 tokens, without comparing texts.
	Probe    Options
	Targets  func(context.Context) (Target, error) // called before each check, since engines come and go
	Meter    metric.MeterProvider                  // nil: no metrics
	OnReport func(*Report, error)                  // called after each check, from Run's goroutine; nil allowed
}

// SyntheticProber runs [Verify] again and again, at a low rate beside live traffic. Its metrics are pd.reuse.ratio (the
// share of prompt tokens that decode took over in the last check, 0 to 1, by connector and model), pd.reuse.checks (by
// verdict, or verdict="error" if a check could not judge), pd.reuse.tokens and pd.reuse.bytes. If the engines have
// other traffic, the share is that of all prompts during the check.
type SyntheticProber struct {
	opts                  SyntheticProberOptions
	checks, tokens, bytes metric.Int64Counter
	registration          metric.Registration

	mu     sync.Mutex
	last   *Report
	failed bool // the newest check, be it last or the one after it: there is no ratio
}

// NewSyntheticProber returns a prober that [SyntheticProber.Run] starts.
func NewSyntheticProber(o SyntheticProberOptions) (*SyntheticProber, error) {
	if o.Targets == nil {
		return nil, errors.New("reuse: a SyntheticProber needs Targets")
	}
	o.Every = cmp.Or(max(o.Every, 0), time.Minute)
	if o.Probe.Probes <= 0 {
		o.Probe.Probes, o.Probe.SkipText = 1, true
	}
	if o.Meter == nil {
		o.Meter = noop.NewMeterProvider()
	}
	c := &SyntheticProber{opts: o}
	m := o.Meter.Meter("github.com/pdkit/pdkit/pdflow/reuse")
	var errs [5]error
	c.checks, errs[0] = m.Int64Counter("pd.reuse.checks", metric.WithUnit("{check}"),
		metric.WithDescription("Checks that decode takes KV over, by verdict"))
	c.tokens, errs[1] = m.Int64Counter("pd.reuse.tokens", metric.WithUnit("{token}"),
		metric.WithDescription("Prompt tokens of synthetic probes that decode took over"))
	c.bytes, errs[2] = m.Int64Counter("pd.reuse.bytes", metric.WithUnit("By"),
		metric.WithDescription("KV that moved for synthetic probes, where engines count it"))
	ratio, err := m.Float64ObservableGauge("pd.reuse.ratio", metric.WithUnit("1"),
		metric.WithDescription("Share of prompt tokens that decode took over in the last check; none if that failed"))
	errs[3] = err
	if err := errors.Join(errs[:]...); err != nil {
		return nil, err
	}
	c.registration, errs[4] = m.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c.mu.Lock()
		r, failed := c.last, c.failed
		c.mu.Unlock()
		if r != nil && !failed {
			o.ObserveFloat64(ratio, r.Ratio(), metric.WithAttributes(labels(r)...))
		}
		return nil
	}, ratio)
	return c, errs[4]
}

// labels tell the checks of several models apart.
func labels(r *Report) []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String("pd.connector", r.Connector),
		attribute.String("gen_ai.request.model", r.Model)}
}

// Last returns the newest report, or nil before the first.
func (c *SyntheticProber) Last() *Report {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// Run checks until ctx ends, and then returns nil. The first check comes after one period, so that engines have time to
// start.
func (c *SyntheticProber) Run(ctx context.Context) error {
	defer func() { _ = c.registration.Unregister() }()
	for {
		pause := c.opts.Every*9/10 + rand.N(c.opts.Every/5+1) //nolint:gosec // jitter, guards nothing
		if !sleep(ctx, pause) {
			return nil
		}
		r, err := c.check(ctx)
		if ctx.Err() != nil {
			return nil
		}
		told := []attribute.KeyValue{attribute.String("pd.verdict", "error")}
		c.mu.Lock()
		if c.failed = err != nil || r.Verdict == Failed; err == nil {
			c.last = r
		}
		c.mu.Unlock()
		if err == nil {
			told = append(labels(r), attribute.String("pd.verdict", string(r.Verdict)))
			name := metric.WithAttributes(labels(r)...)
			c.tokens.Add(ctx, r.Reused, name)
			c.bytes.Add(ctx, r.Bytes, name)
		}
		c.checks.Add(ctx, 1, metric.WithAttributes(told...))
		if c.opts.OnReport != nil {
			c.opts.OnReport(r, err)
		}
	}
}

func (c *SyntheticProber) check(ctx context.Context) (*Report, error) {
	t, err := c.opts.Targets(ctx)
	if err != nil {
		return nil, err
	}
	return Verify(ctx, t, c.opts.Probe)
}
