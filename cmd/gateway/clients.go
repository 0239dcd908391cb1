// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

const modelsPath = "/v1/models"

// clients is the clients' side: the PD flow, the list of models, and what may pass to a decode engine. All else is the
// mux's 404.
func (g *gateway) clients() http.Handler {
	return withPicking(g.mux.Middleware(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, known := g.find(""); !known && len(g.models()) == 0 && r.URL.Path == modelsPath {
			w.Header().Set("X-Request-Id", (&pdflow.Request{Header: r.Header}).ID())
			writeError(w, r, notYet()) // an empty list would say that there are none
			return
		}
		g.other.Load().Middleware(g.mux).ServeHTTP(w, r)
	})))
}

// passthrough makes what serves the clients' requests that are no inference.
func (g *gateway) passthrough(spec gatewaySpec) (*passthrough.Handler, error) {
	return passthrough.New(g.engines, &passthrough.Options{
		MaxBody: spec.MaxBodyBytes,
		Budget:  g.budget,
		Paths:   spec.PassthroughPaths,
		Allow: func(r *http.Request) bool {
			return spec.Passthrough != "" || r.Method == http.MethodGet && r.URL.Path == modelsPath ||
				passthrough.OfResponse(r)
		},
		All: func() (all []*passthrough.Engines) {
			for _, m := range g.models() {
				all = append(all, m.passing)
			}
			return all
		},
	})
}

// engines returns those that requests for a model pass to.
func (g *gateway) engines(name string) (*passthrough.Engines, *pdflow.Error) {
	if g.draining.Load() {
		return nil, &pdflow.Error{Code: pdflow.CodeDraining, Message: "shutting down", RetryAfter: time.Second}
	}
	m, known := g.find(name)
	switch {
	case m != nil:
		return m.passing, nil
	case !known:
		return nil, notYet()
	}
	return nil, nil
}

// notYet is the error until the cluster has sent its list of models.
func notYet() *pdflow.Error {
	e, _ := errors.AsType[*pdflow.Error](pdflow.NotYet.Ready(context.Background()))
	return e
}

// pass says how requests that are no inference reach the model's engines.
func (m *model) pass(headers []string) *passthrough.Engines {
	e := &passthrough.Engines{Set: m.set, Picker: m.picker, Transport: m.legs, Timeouts: m.Main.Timeouts(),
		Responses: m.has, ForwardHeaders: slices.Clone(headers), ModelNames: maps.Clone(m.Spec.ModelNames),
		Adapters: m.Spec.Adapters.Serves(m.set)}
	if model := m.Model(); len(e.ModelNames) > 0 && model != "*" {
		e.ModelNames[model] = m.ServedModel() // listed, too, since requests may name it
	}
	for _, f := range m.flows.All() {
		t := f.Connector().Traits()
		e.Members, e.DecodeOnly = append(e.Members, t.Members...), e.DecodeOnly || t.Serving.PrefillPairOnly
		e.ForwardHeaders = slices.DeleteFunc(e.ForwardHeaders, func(name string) bool {
			return strings.EqualFold(name, t.Handoff.Header) // a client's own is believed no more than a member
		})
	}
	return e
}
