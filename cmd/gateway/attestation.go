// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/attest"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// attestation is the prober of a model. A model that changes goes on with what its predecessor's prober has found.
type attestation struct {
	before *attestation // nil: there was none
	prober *attest.Prober
	ended  chan struct{} // closed: prober is not used any more. It is nil where the model ended before it began
}

// previous waits for the end of the last prober that has begun, and returns it; nil if there is none, or ctx ends.
func (a *attestation) previous(ctx context.Context) *attest.Prober {
	for b := a.before; b != nil; b = b.before {
		select {
		case <-b.ended:
			if b.prober != nil {
				return b.prober
			}
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// startAttestation looks for engines and pairs of the model that corrupt KV, if the configuration asks for it, until
// the model ends. Probes go through the main connector. What a predecessor's prober has named stays in quarantine until
// the new prober takes it over, or until the predecessor ends, if this model quarantines nothing.
func (m *model) startAttestation(g *gateway) {
	a := m.Spec.Attestation
	now := &attestation{before: m.pool.attestation, ended: make(chan struct{})}
	m.attestation = now
	if a.Mode != modelserver.AttestationReport && a.Mode != modelserver.AttestationQuarantine {
		if now.before == nil {
			close(now.ended)
			return
		}
		m.parts.Go(func() {
			defer close(now.ended)
			now.previous(m.ctx)
			if m.ctx.Err() == nil {
				m.picker.Adopt(nil)
				now.before = nil
			}
		})
		return
	}
	log := g.log.With("model", m.Model())
	failing := false
	var prober *attest.Prober
	o := attest.Options{
		Flow: m.flows.Main, Model: m.asked(), Every: time.Duration(a.Every), Hold: g.draining.Load,
		Header:    m.asking.own,
		Endpoints: func() []discovery.Endpoint { return m.set.Load().Endpoints },
		OnFinding: func(f attest.Finding, released bool) {
			if released {
				log.Info("does not corrupt KV any more", "suspect", f.String(), "probes", f.Clean)
				return
			}
			log.Error("corrupts KV", "suspect", f.String(), "wrong", f.Wrong, "probes", f.Probes, "quarantine",
				a.Mode == modelserver.AttestationQuarantine)
		},
		OnResult: func(r attest.Result, err error) {
			switch {
			case g.draining.Load():
			case err != nil && !failing: // once, until a probe gets through
				log.Warn("KV cannot be attested", "error", err)
			case r.Verdict == attest.Wrong && !slices.ContainsFunc(prober.Findings(), func(f attest.Finding) bool {
				return f.Covers(r.Prefill, r.Decode)
			}):
				log.Warn("a synthetic probe's response is wrong", "prefill", r.Prefill, "decode", r.Decode)
			case r.Odd != "":
				log.Warn("an engine alone responds otherwise than others", "endpoint", r.Odd)
			}
			failing = err != nil
		},
	}
	if a.Mode == modelserver.AttestationQuarantine {
		o.Quarantine = m.picker
	}
	if g.tel.meters != nil {
		o.Meter = g.tel.meters
	}
	m.parts.Go(func() {
		defer close(now.ended)
		o.Previous = now.previous(m.ctx)
		if m.ctx.Err() != nil {
			return
		}
		if o.Quarantine == nil {
			m.picker.Adopt(nil)
		}
		var err error
		if prober, err = attest.New(o); err == nil {
			now.before, now.prober = nil, prober
			err = prober.Run(m.ctx)
		}
		ended(log, "attestation", err)
	})
}
