// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"embed"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/pdflow"
)

//go:embed live/index.html live/live.css live/live.js
var liveFiles embed.FS

const (
	liveKept      = 200 // attempts that a model remembers
	livePerSecond = 20  // of those that served, and as many of those that failed: more would only push out each other
	liveRunning   = 100 // requests in flight that are shown of a model
)

// timeline is one attempt, with times in ms since it began. It has nothing of a request's body.
type timeline struct {
	RequestID    string    `json:"requestId"`
	Model        string    `json:"model"`
	Connector    string    `json:"connector"`
	Mode         string    `json:"mode,omitempty"`
	Attempt      int       `json:"attempt"`
	Prefill      string    `json:"prefill,omitempty"` // endpoint IDs
	Decode       string    `json:"decode,omitempty"`
	Start        time.Time `json:"start"`
	PrefillStart *float64  `json:"prefillStart,omitempty"`
	PrefillEnd   *float64  `json:"prefillEnd,omitempty"`
	DecodeStart  *float64  `json:"decodeStart,omitempty"`
	FirstToken   *float64  `json:"firstToken,omitempty"`
	End          float64   `json:"end"`
	Input        int64     `json:"input,omitempty"` // tokens
	Output       int64     `json:"output,omitempty"`
	Resumed      int       `json:"resumed,omitempty"` // tokens that the client had before a rescue
	Error        string    `json:"error,omitempty"`   // its code
	Retry        string    `json:"retry,omitempty"`   // why it was retried, or was not
	Running      bool      `json:"running,omitempty"`
	Phase        string    `json:"phase,omitempty"` // of one that runs
}

// liveTotals are a model's attempts since it is served.
type liveTotals struct {
	Served int64            `json:"served"`
	Output int64            `json:"output"` // tokens
	Errors map[string]int64 `json:"errors,omitempty"`
}

// recent is what a model remembers of its attempts.
type recent struct {
	mu      sync.Mutex
	ring    [liveKept]timeline
	next    int
	totals  liveTotals
	second  int64  // Unix
	sampled [2]int // in this second: served, failed
}

func newRecent() *recent { return &recent{totals: liveTotals{Errors: map[string]int64{}}} }

// observer fills r.
func (r *recent) observer(model string) pdflow.Observer {
	return pdflow.Observer{SessionEnd: func(_ context.Context, o *pdflow.Outcome) { r.add(model, o, time.Now()) }}
}

func (r *recent) add(model string, o *pdflow.Outcome, now time.Time) {
	kind := 0
	r.mu.Lock()
	defer r.mu.Unlock()
	if o.Err == nil {
		r.totals.Served++
		r.totals.Output += o.Usage.Output
	} else {
		kind = 1
		r.totals.Errors[string(o.Err.Code)]++
	}
	if second := now.Unix(); second != r.second {
		r.second, r.sampled = second, [2]int{}
	}
	if r.sampled[kind] == livePerSecond {
		return
	}
	r.sampled[kind]++
	r.ring[r.next%liveKept] = timelineOf(model, o, now)
	r.next++
}

func timelineOf(model string, o *pdflow.Outcome, now time.Time) timeline {
	s := o.Session
	since := func(t time.Time) *float64 {
		if t.IsZero() {
			return nil
		}
		ms := max(0, t.Sub(s.CreatedAt).Seconds()*1000)
		return &ms
	}
	t := timeline{RequestID: s.RequestID, Model: model, Connector: o.Connector, Mode: string(o.Mode),
		Attempt: s.Attempt, Prefill: s.Prefill.ID, Decode: s.Decode.ID, Start: s.CreatedAt,
		PrefillStart: since(o.Prefill.Start),
		PrefillEnd:   since(o.Prefill.End), DecodeStart: since(o.Decode.Start), FirstToken: since(o.Decode.FirstByte),
		End: *since(now), Input: o.Usage.Input, Output: o.Usage.Output, Resumed: o.Resumed, Retry: o.Retry}
	if o.Err != nil {
		t.Error = string(o.Err.Code)
	}
	return t
}

// list returns the attempts, the newest first, and the totals.
func (r *recent) list() ([]timeline, liveTotals) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []timeline
	for i := range min(r.next, liveKept) {
		all = append(all, r.ring[(r.next-1-i)%liveKept])
	}
	totals := r.totals
	totals.Errors = maps.Clone(r.totals.Errors)
	return all, totals
}

// liveModel is one model of live.json.
type liveModel struct {
	modelReadiness
	Connector string             `json:"connector"`
	Rollout   string             `json:"rollout,omitempty"`
	Endpoints []liveEndpoint     `json:"endpoints"`
	Phases    map[string]float64 `json:"phases"` // requests in flight
	Totals    liveTotals         `json:"totals"`
}

type liveEndpoint struct {
	debugEndpoint
	Engine *engineLoad `json:"engine,omitempty"` // what it says of itself, with -inspect
}

type engineLoad struct {
	Running int     `json:"running"`
	Waiting int     `json:"waiting"`
	KVUsage float64 `json:"kvUsage"`
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
	out := struct {
		Time     time.Time   `json:"time"`
		Draining bool        `json:"draining"`
		Models   []liveModel `json:"models"`
		Requests []timeline  `json:"requests"` // those in flight, then the newest attempts
	}{Time: time.Now().UTC(), Draining: ready.Draining, Models: []liveModel{}, Requests: []timeline{}}
	var ended []timeline
	for i, m := range models {
		d := m.debug(ready.Models[i])
		l := liveModel{modelReadiness: d.modelReadiness, Connector: d.Connector, Rollout: d.Rollout, Phases: m.doing(),
			Endpoints: make([]liveEndpoint, 0, len(d.Endpoints))}
		load := loads(d.Sessions)
		for _, e := range d.Endpoints {
			e.Load = load[e.ID]
			l.Endpoints = append(l.Endpoints, liveEndpoint{e, m.engineLoad(e.ID)})
		}
		var past []timeline
		past, l.Totals = m.recent.list()
		ended = append(ended, past...)
		out.Models = append(out.Models, l)
		out.Requests = append(out.Requests, running(m.Model(), d.Sessions, out.Time)...)
	}
	slices.SortStableFunc(ended, func(a, b timeline) int { return b.Start.Compare(a.Start) })
	out.Requests = append(out.Requests, ended...)
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusOK, out)
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

// running are the requests in flight, the oldest first.
func running(model string, sessions []pdflow.SessionInfo, now time.Time) []timeline {
	slices.SortFunc(sessions, func(a, b pdflow.SessionInfo) int { return cmp.Compare(b.Age, a.Age) })
	var out []timeline
	for _, s := range sessions[:min(len(sessions), liveRunning)] {
		out = append(out, timeline{RequestID: s.RequestID, Model: model, Connector: s.Connector, Attempt: s.Attempt,
			Prefill: s.Prefill, Decode: s.Decode, Start: now.Add(-s.Age), End: s.Age.Seconds() * 1000, Running: true,
			Phase: s.Phase})
	}
	return out
}

// engineLoad is what an engine says of itself, nil if it is not asked.
func (m *model) engineLoad(id string) *engineLoad {
	if m.inspected == nil {
		return nil
	}
	r, ok := m.inspected.Reading(id)
	if !ok || r.Load.At.IsZero() {
		return nil
	}
	return &engineLoad{Running: r.Load.Running, Waiting: r.Load.Waiting, KVUsage: r.Load.KVUsage}
}
