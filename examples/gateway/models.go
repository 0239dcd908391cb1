// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	modelsPath     = "/v1/models"
	modelsFresh    = 2 * time.Second // how long a list is handed out before the engines are asked again
	modelsTimeout  = 2 * time.Second // for all engines together: who has not answered by then is left out
	modelsAtOnce   = 32              // engines asked at once
	maxModelsBytes = 1 << 20         // of one engine's answer
	maxModelsKept  = 64              // lists kept, one for each Authorization
)

// modelList answers GET /v1/models with the union of what the ready decode engines list. Lists are kept apart by the client's
// Authorization, since engines may ask for a key.
type modelList struct {
	g          *gateway
	background context.Context // outlives the client that asks first
	mu         sync.Mutex
	lists      map[[sha256.Size]byte]*modelAnswer
}

// modelAnswer is one list, being made until done is closed.
type modelAnswer struct {
	begun time.Time
	done  chan struct{}
	body  []byte
}

func newModelList(background context.Context, g *gateway) *modelList {
	return &modelList{g: g, background: background, lists: map[[sha256.Size]byte]*modelAnswer{}}
}

func (l *modelList) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := pdflow.RequestID(r.Header)
	w.Header().Set(headerRequestID, id)
	closeAfterChunks(w, r)
	a := l.answer(r.Header.Values("Authorization"), id)
	select {
	case <-a.done:
	case <-r.Context().Done():
		panic(http.ErrAbortHandler) // else net/http would answer 200 for us
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(a.body)
}

// answer returns the fresh list, or begins one.
func (l *modelList) answer(authorization []string, id string) *modelAnswer {
	auth := ""
	if len(authorization) == 1 {
		auth = authorization[0]
	}
	key := sha256.Sum256([]byte(auth))
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.lists[key]; a != nil && time.Since(a.begun) < modelsFresh {
		return a
	}
	if len(l.lists) >= maxModelsKept {
		clear(l.lists)
	}
	a := &modelAnswer{begun: time.Now(), done: make(chan struct{})}
	l.lists[key] = a
	go func() {
		defer close(a.done)
		a.body = l.collect(auth, id)
	}()
	return a
}

// collect asks all ready decode engines, and joins what they say in the order of the configuration.
func (l *modelList) collect(auth, id string) []byte {
	ctx, cancel := context.WithTimeout(l.background, modelsTimeout)
	defer cancel()
	type target struct {
		m *model
		e discovery.Endpoint
	}
	var targets []target
	asked := map[string]bool{}
	for _, m := range l.g.models() {
		for _, e := range m.set.Load().Endpoints {
			if e.Phase == discovery.PhaseReady && e.Role.Has(discovery.RoleDecode) && !asked[e.URL.String()] {
				asked[e.URL.String()] = true
				targets = append(targets, target{m, e})
			}
		}
	}
	found := make([][]json.RawMessage, len(targets))
	var wg sync.WaitGroup
	slots := make(chan struct{}, modelsAtOnce)
	for i, t := range targets {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			found[i] = l.ask(ctx, t.m, t.e, auth, id)
		})
	}
	wg.Wait()
	return joinModels(found)
}

// ask returns what one engine lists, nil if it does not answer as it should.
func (l *modelList) ask(ctx context.Context, m *model, e discovery.Endpoint, auth, id string) []json.RawMessage {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL.String()+modelsPath, nil)
	if err != nil {
		return nil
	}
	req.Header = http.Header{"Accept": {"application/json"}, "User-Agent": {"pdkit-gateway"}, headerRequestID: {id}}
	if auth != "" {
		req.Header.Set("Authorization", auth)
	}
	resp, err := m.legs.RoundTrip(req)
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxModelsBytes+1))
	if err != nil || resp.StatusCode != http.StatusOK || len(body) > maxModelsBytes {
		return nil
	}
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil {
		return nil
	}
	return list.Data
}

// joinModels makes one list, each model once, as its first engine describes it.
func joinModels(found [][]json.RawMessage) []byte {
	all := []json.RawMessage{}
	seen := map[string]bool{}
	for _, list := range found {
		for _, raw := range list {
			var m struct {
				ID string `json:"id"`
			}
			if json.Unmarshal(raw, &m) == nil && m.ID != "" && !seen[m.ID] {
				seen[m.ID] = true
				all = append(all, raw)
			}
		}
	}
	body, err := json.Marshal(map[string]any{"object": "list", "data": all})
	if err != nil { // what has been decoded can be encoded
		return []byte(`{"object":"list","data":[]}`)
	}
	return body
}
