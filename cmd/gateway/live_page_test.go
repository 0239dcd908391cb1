// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

// servePage serves the page of the live view, which gets live.json from answer.
func servePage(t *testing.T, answer http.HandlerFunc) string {
	t.Helper()
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.SetPathValue("file", strings.TrimPrefix(r.URL.Path, "/"))
		if r.URL.Path == "/live.json" {
			answer(w, r)
			return
		}
		new(gateway).livePage(w, r)
	}))
	t.Cleanup(page.Close)
	t.Cleanup(page.CloseClientConnections)
	return page.URL + "/"
}

// liveDocument is live.json with some models and requests.
func liveDocument(models []liveModel, requests ...timeline) livePicture {
	for i := range models {
		m := &models[i]
		m.Ready, m.Phases, m.Totals.Errors = true, map[string]float64{}, map[string]int64{"kv_not_found": 1}
		if m.Endpoints == nil {
			m.Endpoints = []liveEndpoint{}
		}
		if m.Pairs == nil {
			m.Pairs = []livePair{}
		}
	}
	return livePicture{Time: time.Now().UTC(), Models: models, Requests: append([]timeline{}, requests...)}
}

func modelsOf(names ...string) (models []liveModel) {
	for _, name := range names {
		models = append(models, liveModel{modelReadiness: modelReadiness{Model: name}})
	}
	return models
}

// Whatever a gateway, an engine or a client names itself is text on the page.
func TestTheLivePageMakesNoMarkupOfNames(t *testing.T) {
	evil := `<img src=x onerror="document.title='hit'">` + "\u202e" + strings.Repeat("x", 300) + `"'&amp;</script>`
	ms := 1.0
	m := liveModel{modelReadiness: modelReadiness{Model: evil, Reason: evil}, Connector: evil, Rollout: evil,
		Endpoints: []liveEndpoint{{debugEndpoint: debugEndpoint{ID: evil, URL: evil, Role: evil, Phase: evil,
			Group: evil, Zone: evil, LastFault: evil}, State: evil, Recent: &liveRecent{Attempts: 9, Failed: 9,
			Marks: []liveMark{{Word: evil, Count: 9, Of: 9}, {Word: "failing", Count: 9, Of: 9}}, Past: []int{9}}}},
		Pairs:     []livePair{{Prefill: evil, Decode: evil, Served: 1, State: evil}},
		Admission: &liveAdmission{Refused: map[string]int64{evil: 1}}}
	ended := timeline{RequestID: evil, Model: evil, Connector: evil, Mode: evil, Attempt: 1, Prefill: evil,
		Decode: evil, Start: time.Now().UTC(), Picked: &ms, PrefillStart: &ms, End: 2, Error: evil, Leg: evil,
		Failing: evil, Retry: evil, Status: 500}
	running := ended
	running.Running, running.Phase, running.Error, running.Session = true, evil, "", evil
	doc := liveDocument([]liveModel{m}, running, ended)
	doc.Models[0].Ready = false
	doc.Models[0].Totals.Errors[evil] = 1
	b := openBrowser(t, servePage(t, func(w http.ResponseWriter, _ *http.Request) {
		assert.NoError(t, json.NewEncoder(w).Encode(doc))
	}), 1280, 900, false, false)
	b.until(`document.querySelectorAll("#ended summary").length === 1`)
	eval[any](b, `document.querySelectorAll("details").forEach((d) => { d.open = true; })`)
	b.until(`["running", "ended"].every((id) => document.querySelectorAll("#" + id + " dl").length === 1)`)
	assert.Contains(t, eval[string](b, `document.body.innerText`), evil, "it is shown")
	assert.Contains(t, eval[string](b, `document.querySelector(".sick").innerText`), evil)
	assert.Empty(t, eval[[]string](b, `[...document.querySelectorAll("body *:not(.bar > *)")].filter((e) =>
		e.getClientRects().length && getComputedStyle(e).position !== "absolute" &&
		e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + "." + e.className)`),
		"a long name makes it scroll sideways")
	assert.Zero(t, eval[int](b, `document.images.length`))
	assert.NotEqual(t, "hit", eval[string](b, `document.title`))
}

// The page says what is wrong: that nothing answers, that the gateway refuses, or that its answer cannot be shown. No
// key hides that, and the next good answer ends it.
func TestTheLivePageSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	good := func(w http.ResponseWriter, _ *http.Request) {
		assert.NoError(t, json.NewEncoder(w).Encode(liveDocument(modelsOf("m"))))
	}
	var now atomic.Pointer[http.HandlerFunc]
	answer := func(h http.HandlerFunc) { now.Store(&h) }
	answer(good)
	b := openBrowser(t, servePage(t, func(w http.ResponseWriter, r *http.Request) { (*now.Load())(w, r) }), 1280, 900,
		false, false)
	state := func() string { return eval[string](b, `(document.getElementById("state") || {}).textContent || ""`) }
	says := func(want string) {
		t.Helper()
		eventually(t, func() bool { return strings.Contains(state(), want) }, "%q", want)
	}
	says("ready")
	for _, c := range []struct {
		name, says string
		answer     http.HandlerFunc
	}{
		{"forbidden", "the gateway answers with status 403: ask for this page by localhost",
			func(w http.ResponseWriter, _ *http.Request) {
				http.Error(w, "ask for this page by localhost", http.StatusForbidden)
			}},
		{"failing", "the gateway answers with status 500",
			func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }},
		{"no JSON", "the gateway's answer cannot be read: ",
			func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>")) }},
		{"another form", "the page cannot show the gateway's answer: ",
			func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte(`{"time":"2026-01-01T00:00:00Z"}`))
			}},
		{"closed", "the gateway does not answer: ",
			func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }},
		{"silent", "the gateway does not answer: ",
			func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			answer(c.answer)
			says(c.says)
			b.press("p")
			assert.Contains(t, state(), c.says, "pausing hides it")
			assert.Contains(t, state(), "paused")
			b.press("p")
			eval[any](b, `document.getElementById("filter").dispatchEvent(new Event("change"))`)
			assert.Contains(t, state(), c.says, "choosing what is shown hides it")
			answer(good)
			b.until(`document.getElementById("state").textContent === "ready"`)
		})
	}
	b.t = t
	for _, complaint := range b.bad {
		assert.Contains(t, complaint, "Failed to load resource", "the page has thrown")
	}
	b.bad = nil
}

// Engines that drain or have a cooldown are not named as ones that are not well. The others are, the worst first.
func TestTheLivePageOrdersEngines(t *testing.T) {
	t.Parallel()
	engine := func(id, phase, state string, healthy bool, words ...string) liveEndpoint {
		e := liveEndpoint{debugEndpoint: debugEndpoint{ID: id, Role: "decode", Phase: phase, Healthy: healthy},
			State: state, Recent: &liveRecent{Attempts: 10, Past: []int{-1, 0}}}
		for _, word := range words {
			e.Recent.Marks = append(e.Recent.Marks,
				liveMark{Word: word, Since: time.Unix(1000, 0).UTC(), Count: 5, Of: 10})
		}
		return e
	}
	models := modelsOf("m")
	models[0].Endpoints = []liveEndpoint{engine("e0", "ready", "", true), engine("e1", "draining", "", true),
		engine("e2", "ready", "cooldown", true), engine("e3", "ready", "", true, "slow"),
		engine("e4", "ready", "cooldown", true, "failing", "slow"), engine("e5", "not-ready", "", false),
		engine("e6", "ready", "quarantine", true), engine("e7", "ready", "", true, "overloaded")}
	b := openBrowser(t, servePage(t, func(w http.ResponseWriter, _ *http.Request) {
		assert.NoError(t, json.NewEncoder(w).Encode(liveDocument(models)))
	}), 1280, 900, false, false)
	b.until(`document.querySelectorAll("tbody th").length === 8`)
	assert.Equal(t, "e5 e6 e4 e7 e3 e2 e1 e0", eval[string](b,
		`[...document.querySelectorAll("tbody th")].map((e) => e.textContent).join(" ")`))
	assert.Equal(t, []string{"not ready e5", "quarantine e6", "failing e4", "overloaded e7", "slow e3"},
		eval[[]string](b, `[...document.querySelectorAll(".sick li")].map((li) =>
			li.children[0].textContent + " " + li.children[1].textContent)`))
	assert.Equal(t, "5 engines are not well", eval[string](b, `document.getElementById("sick").textContent`))
}

// Each card has an id of its own, and each request in flight a row, also when clients give all the same id.
func TestTheLivePageTellsThingsApart(t *testing.T) {
	var doc atomic.Value
	same := func(session string) timeline {
		return timeline{RequestID: "same", Model: "b", Session: session, Attempt: 1, Start: time.Unix(1000, 0).UTC(),
			End: 5, Running: true, Phase: "prefill"}
	}
	doc.Store(liveDocument(modelsOf("a", "b"), same("1"), same("2"), same(""), same("")))
	b := openBrowser(t, servePage(t, func(w http.ResponseWriter, _ *http.Request) {
		assert.NoError(t, json.NewEncoder(w).Encode(doc.Load()))
	}), 1280, 900, false, false)
	b.until(`document.querySelectorAll("#running li").length === 4`)
	b.until(`$("time").textContent !== ""`)
	assert.Equal(t, 4, eval[int](b, `document.querySelectorAll("#running li").length`), "drawn twice")
	assert.Contains(t, eval[string](b, `document.body.innerText`), "kv not found 1")
	titles := `[...document.querySelectorAll("#models h3")]`
	for _, names := range []string{"b", "b c"} {
		doc.Store(liveDocument(modelsOf(strings.Fields(names)...)))
		b.until(titles + `.map((h) => h.textContent).join(" ") === "` + names + `"`)
	}
	assert.Equal(t, 2, eval[int](b, `new Set(`+titles+`.map((h) => h.id)).size`), "two cards have one id")
}
