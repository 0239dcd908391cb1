// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strings"
	"time"

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
	mux.HandleFunc("GET /debug/pd", g.forOperators(g.debug))
	mux.HandleFunc("GET /debug/live/{file...}", g.forOperators(g.livePage))
	mux.Handle("GET /metrics", g.tel.handler())
	if g.cfg.Load().pprof {
		// net/http/pprof registers these with http.DefaultServeMux too, which this program serves nowhere
		for path, h := range map[string]http.HandlerFunc{"": pprof.Index, "cmdline": pprof.Cmdline,
			"profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace} {
			mux.HandleFunc("/debug/pprof/"+path, g.forOperators(h))
		}
	}
	return mux
}

// readiness is the body of /readyz.
type readiness struct {
	Ready    bool             `json:"ready"`
	Draining bool             `json:"draining,omitempty"`
	Reason   string           `json:"reason,omitempty"`
	Models   []modelReadiness `json:"models"`
	Rejected []rejected       `json:"rejected,omitempty"` // ModelServers that are not served as they are
}

type modelReadiness struct {
	Model  string `json:"model"`
	Name   string `json:"name,omitempty"`
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"` // what is not ready
}

func (g *gateway) readiness(ctx context.Context, models []*model) readiness {
	r := readiness{Draining: g.draining.Load(), Models: make([]modelReadiness, 0, len(models))}
	r.Ready = !r.Draining
	r.Rejected = g.modelSet.notServed()
	if c := g.modelSet.cluster; c != nil {
		refused, known := c.refused()
		if r.Rejected = append(refused, r.Rejected...); !known {
			r.Ready, r.Reason = false, "the cluster's ModelServers are not known yet"
		} else if len(models) == 0 {
			r.Ready, r.Reason = false, "there is no ModelServer"
		}
	}
	for _, m := range models {
		reason := m.notReady(ctx)
		r.Models = append(r.Models, modelReadiness{m.Model(), m.fullName(), reason == "", reason})
		r.Ready = r.Ready && reason == ""
	}
	return r
}

// notReady says why the model's requests cannot be served now, "" if they can.
func (m *model) notReady(ctx context.Context) string {
	err := m.flows.Server.Ready(ctx)
	if e, ok := errors.AsType[*pdflow.Error](err); ok {
		return e.Message
	}
	if a := m.pool.announced; err == nil && a != nil {
		err = a.Err() // the engines known will expire
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

func (g *gateway) readyz(w http.ResponseWriter, r *http.Request) {
	state := g.readiness(r.Context(), g.models())
	status := http.StatusOK
	if !state.Ready {
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, state)
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

	// how much of its KV is known from its events: exact, incomplete or unknown; "" without spec.kvEvents
	KVEvents string `json:"kvEvents,omitempty"`

	IllSince *time.Time `json:"illSince,omitempty"` // when its health probes began to fail; nil: it is healthy
}

// debugs reports whether a request names a host under which operators reach the admin address: loopback, an IP address,
// or the host of spec.admin. A page in an operator's browser can let a name of its own resolve to the gateway (DNS
// rebinding) and would read the engines' URLs; it cannot do that with these names. Probes and scrapes by a service's
// name need only the other paths, which name no engine.
func (g *gateway) debugs(r *http.Request) bool {
	name := func(address string) string {
		host, _, err := net.SplitHostPort(address)
		if err != nil { // without a port
			host = strings.Trim(address, "[]")
		}
		return strings.ToLower(strings.TrimSuffix(host, "."))
	}
	host := name(r.Host)
	_, err := netip.ParseAddr(host)
	return err == nil || host == "localhost" || strings.HasSuffix(host, ".localhost") ||
		host != "" && host == name(g.cfg.Load().gateway.Admin)
}

// forOperators refuses requests whose host operators do not use.
func (g *gateway) forOperators(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !g.debugs(r) {
			http.Error(w, "ask for this page by an IP address, by localhost, or by the host of spec.admin",
				http.StatusForbidden)
			return
		}
		h(w, r)
	}
}

func (g *gateway) debug(w http.ResponseWriter, r *http.Request) {
	models := g.models()
	ready := g.readiness(r.Context(), models)
	out := struct {
		Time     time.Time    `json:"time"`
		Draining bool         `json:"draining"`
		Models   []debugModel `json:"models"`
		Rejected []rejected   `json:"rejected,omitempty"`

		Configuration reloaded `json:"configuration"`
	}{time.Now().UTC(), ready.Draining, make([]debugModel, 0, len(models)), ready.Rejected, g.reloading.get()}
	for i, m := range models {
		out.Models = append(out.Models, m.debug(ready.Models[i]))
	}
	writeJSON(w, http.StatusOK, out)
}

func (m *model) debug(r modelReadiness) debugModel {
	d := debugModel{modelReadiness: r, Connector: m.Main.Name, Endpoints: []debugEndpoint{},
		Sessions: []pdflow.SessionInfo{}}
	if m.Rollout != nil {
		d.Rollout = m.Rollout.Name
	}
	load := map[string]int{}
	for _, f := range m.flows.All() {
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
		x := debugEndpoint{ID: e.ID, URL: e.URL.String(), Role: e.Role.String(),
			Phase: e.Phase.String(), Group: e.Group, Zone: e.Zone,
			Healthy: p.healthy, LastFault: p.failure, Load: load[e.ID],
			KVEvents: m.kv.word(e.ID)}
		if !p.healthy {
			x.IllSince = &p.since
		}
		d.Endpoints = append(d.Endpoints, x)
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
