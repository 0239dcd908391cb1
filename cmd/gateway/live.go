// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"embed"
	"encoding/json"
	"net/http"
	"slices"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
)

//go:embed live/index.html live/live.css live/live.js
var liveFiles embed.FS

const (
	liveRunning  = 100 // requests in flight that are listed
	liveEnded    = 150 // attempts that have ended and are listed
	liveFailures = 30  // of those that failed and are not among the newest: listed besides
)

// livePicture is live.json.
type livePicture struct {
	Time     time.Time   `json:"time"`
	Draining bool        `json:"draining"`
	Models   []liveModel `json:"models"`
	Requests []timeline  `json:"requests"` // those in flight, then the newest attempts
}

// liveModel is one model of live.json.
type liveModel struct {
	modelReadiness
	Connector  string             `json:"connector"`
	Rollout    string             `json:"rollout,omitempty"`
	Endpoints  []liveEndpoint     `json:"endpoints"`
	Pairs      []livePair         `json:"pairs"`
	OtherPairs *otherPairs        `json:"otherPairs,omitempty"` // those that are not listed, added up
	Phases     map[string]float64 `json:"phases"`               // requests in flight
	Totals     liveTotals         `json:"totals"`
	Minute     liveSpan           `json:"minute"`
	Hour       liveSpan           `json:"hour"`
	Past       livePast           `json:"past"`
	Admission  *liveAdmission     `json:"admission,omitempty"` // nil: it is off
	KV         *liveKV            `json:"kv,omitempty"`        // what engines count, with -inspect
}

// liveAdmission is what the model's limits do. The limits are those of the engines that have had requests, added up; 0:
// there is none.
type liveAdmission struct {
	Queued  int              `json:"queued"`
	Prefill occupancy        `json:"prefill"`
	Decode  occupancy        `json:"decode"`
	Refused map[string]int64 `json:"refused"` // requests, by reason
}

type occupancy struct {
	InFlight int `json:"inFlight"`
	Limit    int `json:"limit"`
}

func (o *occupancy) add(x admit.Occupancy) {
	o.InFlight, o.Limit = o.InFlight+x.InFlight, o.Limit+x.Limit
}

// liveKV is what the model's engines have counted since the gateway was first asked for it.
type liveKV struct {
	Taken float64 `json:"taken"` // prompt tokens whose KV decode engines took over
	Bytes float64 `json:"bytes"` // that moved, as the side counts it that counts more; 0 where engines do not count
}

type liveEndpoint struct {
	debugEndpoint
	Recent  *liveRecent `json:"recent,omitempty"` // nil: it had no requests
	Engine  *engineLoad `json:"engine,omitempty"` // what it says of itself, with -inspect
	Prefill *occupancy  `json:"prefill,omitempty"`
	Decode  *occupancy  `json:"decode,omitempty"`
	State   string      `json:"state,omitempty"` // cooldown, hung, quarantine
	Left    float64     `json:"left,omitempty"`  // ms until the cooldown ends
}

// engineLoad has the engine's own counts since it started.
type engineLoad struct {
	Running int     `json:"running"`
	Waiting int     `json:"waiting"`
	KVUsage float64 `json:"kvUsage"`
	Taken   float64 `json:"taken"` // prompt tokens whose KV came from another engine or from a store
	Bytes   float64 `json:"bytes"` // of KV that it moved
}

// livePage serves the live view: one page without resources of others, and what it asks for.
func (g *gateway) livePage(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	var kind string
	switch name {
	case "":
		name, kind = "index.html", "text/html; charset=utf-8"
	case "live.css":
		kind = "text/css; charset=utf-8"
	case "live.js":
		kind = "text/javascript; charset=utf-8"
	case "live.json":
		g.liveData(w, r)
		return
	default:
		http.NotFound(w, r)
		return
	}
	body, err := liveFiles.ReadFile("live/" + name)
	if err != nil { // the file is embedded
		http.NotFound(w, r)
		return
	}
	h := w.Header()
	h.Set("Content-Type", kind)
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "+
		"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache")
	_, _ = w.Write(body)
}

func (g *gateway) liveData(w http.ResponseWriter, r *http.Request) {
	models := g.models()
	ready := g.readiness(r.Context(), models)
	out := livePicture{Time: time.Now().UTC(), Draining: ready.Draining, Models: []liveModel{}}
	var running, ended []timeline
	for i, m := range models {
		d := m.debug(ready.Models[i])
		l := m.live(d, g.tel.engines, out.Time)
		var past []timeline
		past, l.Totals = m.recent.list()
		ended = append(ended, past...)
		out.Models = append(out.Models, l)
		running = append(running, m.inFlight(d.Sessions, out.Time)...)
	}
	out.Requests = listRequests(running, ended)
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(out)
}

// listRequests returns the requests in flight that have run longest, and attempts that have ended.
func listRequests(running, ended []timeline) []timeline {
	slices.SortStableFunc(running, func(a, b timeline) int { return a.Start.Compare(b.Start) })
	return slices.Concat([]timeline{}, running[:min(len(running), liveRunning)], newest(ended))
}

// newest returns the newest attempts, and besides some that failed: those are rare, and are what one looks for.
func newest(ended []timeline) []timeline {
	slices.SortStableFunc(ended, func(a, b timeline) int { return b.Start.Compare(a.Start) })
	all, failed := ended[:min(len(ended), liveEnded)], 0
	for _, t := range ended[len(all):] {
		if t.Error != "" && failed < liveFailures {
			all, failed = append(all, t), failed+1
		}
	}
	return all
}

// live is all of a model but its totals.
func (m *model) live(d debugModel, totals *engineTotals, now time.Time) liveModel {
	l := liveModel{modelReadiness: d.modelReadiness, Connector: d.Connector, Rollout: d.Rollout, Phases: m.doing(),
		Endpoints: make([]liveEndpoint, 0, len(d.Endpoints))}
	var states map[string]livePair
	l.Pairs, l.OtherPairs, states = m.livePairs()
	l.KV = m.readKV(totals, now)
	var recent map[string]*liveRecent
	l.Minute, l.Hour, l.Past, recent = m.recent.spans(now)
	load, places := loads(d.Sessions), map[string]admit.EngineState{}
	if m.admission != nil {
		s := m.admission.State()
		l.Admission = &liveAdmission{Queued: s.Queued, Refused: s.Refused}
		for _, e := range s.Engines {
			places[e.ID] = e
		}
	}
	for _, e := range d.Endpoints {
		e.Load = load[e.ID]
		x := liveEndpoint{debugEndpoint: e, Recent: recent[e.ID], Engine: m.engineLoad(e.ID),
			State: states[e.ID].State, Left: states[e.ID].Left}
		if place, ok := places[e.ID]; ok {
			if e.Role != discovery.RoleDecode.String() {
				l.Admission.Prefill.add(place.Prefill)
				x.Prefill = &occupancy{place.Prefill.InFlight, place.Prefill.Limit}
			}
			if e.Role != discovery.RolePrefill.String() {
				l.Admission.Decode.add(place.Decode)
				x.Decode = &occupancy{place.Decode.InFlight, place.Decode.Limit}
			}
		}
		l.Endpoints = append(l.Endpoints, x)
	}
	return l
}

// readKV returns what the model's engines count, nil if they are not asked.
func (m *model) readKV(totals *engineTotals, now time.Time) *liveKV {
	roles := totals.of(m)
	if roles == nil {
		return nil
	}
	kv := &liveKV{}
	for role, s := range roles {
		if role != discovery.RolePrefill {
			kv.Taken += s.Counted.Taken
		}
		kv.Bytes = max(kv.Bytes, s.Counted.Bytes) // both sides of a move may count it
	}
	leases := map[string]float64{}
	endpoints := m.set.Load().Endpoints
	for i := range endpoints {
		if r, ok := m.inspected.Reading(endpoints[i].ID); ok && !r.Load.At.IsZero() {
			leases[endpoints[i].ID] = r.Load.KV.Expired
		}
	}
	m.recent.readKV(*kv, leases, now)
	return kv
}

// followKV reads what the engines count, whether somebody looks or not, so that each minute has its own.
func (m *model) followKV(totals *engineTotals) {
	tick := time.NewTicker(slotLength)
	defer tick.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case now := <-tick.C:
			m.readKV(totals, now)
		}
	}
}

// loads counts the requests that engines work for. Prefill has done its part when the response streams.
func loads(sessions []pdflow.SessionInfo) map[string]int {
	n := map[string]int{}
	for _, s := range sessions {
		if s.Phase != "stream" {
			n[s.Prefill]++
		}
		if s.Phase == "stream" || s.Phase == "decode" && s.Decode != s.Prefill {
			n[s.Decode]++
		}
	}
	return n
}

// inFlight are the model's requests in flight, the oldest first.
func (m *model) inFlight(sessions []pdflow.SessionInfo, now time.Time) []timeline {
	slices.SortFunc(sessions, func(a, b pdflow.SessionInfo) int { return cmp.Compare(b.Age, a.Age) })
	var out []timeline
	for _, s := range sessions[:min(len(sessions), liveRunning)] {
		known, begin := m.recent.marksOf(s.ID), now.Add(-s.Age)
		if s.Attempt > 1 && !known.picked.IsZero() { // the earlier attempts have timelines of their own
			begin = known.picked
		}
		at := since(begin)
		out = append(out, timeline{RequestID: s.RequestID, Session: s.ID, Model: m.Model(), Connector: s.Connector,
			Attempt: s.Attempt, Prefill: s.Prefill, Decode: s.Decode, Start: begin, End: milliseconds(now.Sub(begin)),
			Picked: at(known.picked), PrefillStart: at(known.prefillStart), PrefillEnd: at(known.prefillEnd),
			DecodeStart: at(known.decodeStart), Running: true, Phase: s.Phase, Silent: milliseconds(s.Silent)})
	}
	return out
}

// engineLoad is what an engine says of itself, nil if it is not asked.
func (m *model) engineLoad(id string) *engineLoad {
	if m.inspected == nil {
		return nil
	}
	l := m.pool.load(id)
	if l.At.IsZero() {
		return nil
	}
	return &engineLoad{Running: l.Running, Waiting: l.Waiting, KVUsage: l.KVUsage, Taken: l.KV.Taken,
		Bytes: l.KV.Bytes}
}
