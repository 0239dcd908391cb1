// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// admin is the operators' side.
func (g *gateway) admin() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	mux.HandleFunc("GET /readyz", g.readyz)
	mux.HandleFunc("GET /debug/pd", g.debug)
	mux.Handle("GET /metrics", g.tel.handler())
	return mux
}

// readiness is the body of /readyz.
type readiness struct {
	Ready    bool             `json:"ready"`
	Draining bool             `json:"draining,omitempty"`
	Models   []modelReadiness `json:"models"`
}

type modelReadiness struct {
	Model  string `json:"model"`
	Name   string `json:"name,omitempty"`
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"` // what is not ready
}

func (g *gateway) readiness() readiness {
	r := readiness{Draining: g.draining.Load(), Models: make([]modelReadiness, 0, len(g.models))}
	r.Ready = !r.Draining
	for _, m := range g.models {
		reason := notReady(m.set.Load())
		r.Models = append(r.Models, modelReadiness{m.model(), m.name, reason == "", reason})
		r.Ready = r.Ready && reason == ""
	}
	return r
}

// notReady says what a snapshot lacks to serve a request, "" if there is a ready pair: a prefill and a decode engine of one
// group, or one engine of role both.
func notReady(s *discovery.Snapshot) string {
	groups := map[string]discovery.Role{}
	var all discovery.Role
	for _, e := range s.Endpoints {
		if e.Phase == discovery.PhaseReady {
			groups[e.Group] |= e.Role
			all |= e.Role
		}
	}
	for _, roles := range groups {
		if roles.Has(discovery.RoleBoth) {
			return ""
		}
	}
	switch {
	case s.Version == 0:
		return "the engines are not known yet"
	case all.Has(discovery.RoleBoth):
		return "no group has both a ready prefill and a ready decode engine"
	case all.Has(discovery.RolePrefill):
		return "no decode engine is ready"
	case all.Has(discovery.RoleDecode):
		return "no prefill engine is ready"
	}
	return "no engine is ready"
}

func (g *gateway) readyz(w http.ResponseWriter, _ *http.Request) {
	r := g.readiness()
	status := http.StatusOK
	if !r.Ready {
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, r)
}

// debugModel is one model of /debug/pd.
type debugModel struct {
	modelReadiness
	Connector string               `json:"connector"`
	Rollout   string               `json:"rollout,omitempty"`
	Endpoints []debugEndpoint      `json:"endpoints"`
	Sessions  []pdflow.SessionInfo `json:"sessions"`
}

type debugEndpoint struct {
	ID        string `json:"id"`
	URL       string `json:"url"`
	Role      string `json:"role"`
	Phase     string `json:"phase"`
	Group     string `json:"group,omitempty"`
	Zone      string `json:"zone,omitempty"`
	Healthy   bool   `json:"healthy"`
	LastFault string `json:"lastProbeFault,omitempty"`
	Load      int    `json:"load"` // requests in flight that use it
}

func (g *gateway) debug(w http.ResponseWriter, _ *http.Request) {
	ready := g.readiness()
	out := struct {
		Time     time.Time    `json:"time"`
		Draining bool         `json:"draining"`
		Models   []debugModel `json:"models"`
	}{time.Now().UTC(), ready.Draining, make([]debugModel, 0, len(g.models))}
	for i, m := range g.models {
		out.Models = append(out.Models, m.debug(ready.Models[i]))
	}
	writeJSON(w, http.StatusOK, out)
}

func (m *model) debug(r modelReadiness) debugModel {
	d := debugModel{modelReadiness: r, Connector: m.main.name, Endpoints: []debugEndpoint{}, Sessions: []pdflow.SessionInfo{}}
	if m.rollout != nil {
		d.Rollout = m.rollout.name
	}
	load := map[string]int{}
	for _, f := range m.flows() {
		for _, s := range f.Sessions() {
			d.Sessions = append(d.Sessions, s)
			load[s.Prefill]++
			if s.Decode != s.Prefill {
				load[s.Decode]++
			}
		}
	}
	for _, e := range m.set.Load().Endpoints {
		p := m.probes.of(e.ID)
		d.Endpoints = append(d.Endpoints, debugEndpoint{ID: e.ID, URL: e.URL.String(), Role: e.Role.String(), Phase: e.Phase.String(), Group: e.Group, Zone: e.Zone,
			Healthy: p.healthy, LastFault: p.failure, Load: load[e.ID]})
	}
	return d
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.MarshalIndent(v, "", "  ")
	if err != nil { // none of what is written here can fail
		http.Error(w, "cannot be written as JSON", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n'))
}
