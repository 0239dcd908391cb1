// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net/http"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/reuse"
)

// syntheticProber makes what checks a model's KV reuse again and again, or nil if that was not asked for.
func (g *gateway) syntheticProber(m *model) (*reuse.SyntheticProber, error) {
	if g.cfg.Load().syntheticProbe <= 0 {
		return nil, nil
	}
	log := g.log.With("model", m.Model())
	o := reuse.SyntheticProberOptions{
		Every: g.cfg.Load().syntheticProbe,
		Targets: func(ctx context.Context) (reuse.Target, error) {
			if g.draining.Load() { // no probe is served any more, which says nothing of the engines
				<-ctx.Done()
				return reuse.Target{}, ctx.Err()
			}
			return m.reuseTarget()
		},
		OnReport: func(r *reuse.Report, err error) {
			switch {
			case g.draining.Load():
			case err != nil:
				log.Warn("reuse could not be checked", "error", err)
			case r.Verdict != reuse.Reused:
				why := ""
				if len(r.Reasons) > 0 {
					why = r.Reasons[0].Text
				}
				log.Warn("KV is not reused as it should be", "verdict", string(r.Verdict), "tokens", r.PromptTokens,
					"reused", r.Reused, "reason", why)
			}
		},
	}
	if g.tel.meters != nil {
		o.Meter = g.tel.meters
	}
	return reuse.NewSyntheticProber(o)
}

// pairProber makes what tries a model's pairs, at which requests ran out of time, before a client does.
func (m *model) pairProber(g *gateway) (*pick.Prober, error) {
	log := g.log.With("model", m.Model())
	count, err := g.tel.pairProbes(m.Model())
	if err != nil {
		return nil, err
	}
	return &pick.Prober{Picker: m.choosing, Flows: m.flows.All(), Header: m.asking.own,
		OnProbe: func(prefill, decode string, r pick.ProbeResult, err error) {
			if g.draining.Load() {
				return
			}
			count(string(r))
			if r == pick.ProbeServed {
				log.Info("a pair serves after requests ran out of time there", "prefill", prefill, "decode", decode)
				return
			}
			log.Warn("a pair at which requests ran out of time does not serve a synthetic probe", "prefill", prefill,
				"decode", decode, "result", string(r), "error", err)
		}}, nil
}

var errNoPair = errors.New("no pair of engines is ready")

// reuseTarget is the model's main flow and the engines that are ready now.
func (m *model) reuseTarget() (reuse.Target, error) {
	t := reuse.Target{Ask: reuse.Flow(m.flows.Main, m.asking.own()), Connector: m.flows.Main.Connector(),
		Model: m.served(),
		Client: &http.Client{Transport: m.asking,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	for _, e := range m.set.Load().Endpoints {
		if e.Phase != discovery.PhaseReady {
			continue
		}
		if e.Role.Has(discovery.RolePrefill) {
			t.Prefill = append(t.Prefill, e.URL.String())
		}
		if e.Role.Has(discovery.RoleDecode) {
			t.Decode = append(t.Decode, e.URL.String())
		}
	}
	if len(t.Prefill) == 0 || len(t.Decode) == 0 {
		return t, errNoPair
	}
	return t, nil
}
