// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	modelsPath     = "/v1/models"
	modelsFresh    = 2 * time.Second // how long a list is handed out before the engines are asked again
	modelsTimeout  = 2 * time.Second // for all engines together: an engine that is slower is left out
	modelsAtOnce   = 32              // engines asked at once
	maxModelsBytes = 1 << 20         // of one engine's response
	maxModelsKept  = 64              // lists kept, one for each key of clients
)

// modelList keeps the lists of models, apart by the client's key, since engines may ask for one.
type modelList struct {
	all   func() []*Engines
	mu    sync.Mutex
	lists map[listKey]*list
}

type listKey [sha256.Size]byte

// list is one list, being made until done is closed.
type list struct {
	begun time.Time
	done  chan struct{}
	body  []byte
}

// list answers with the union of what the ready decode engines list.
func (h *Handler) list(w http.ResponseWriter, r *http.Request, id string) {
	l := h.models.get(r, id)
	select {
	case <-l.done:
	case <-r.Context().Done():
		h.fail(w, r, &pdflow.Error{Code: pdflow.CodeClientGone}, h.o.Timeouts)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(l.body)))
	rc := http.NewResponseController(w)
	if d := h.o.Timeouts.Resolve(0).Write; d > 0 && rc.SetWriteDeadline(time.Now().Add(d)) == nil {
		defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // the connection serves more requests
	}
	_, _ = w.Write(l.body)
	_ = rc.Flush()
}

// get returns the fresh list, or begins one, which outlives the client that asks first.
func (m *modelList) get(r *http.Request, id string) *list {
	all := m.all() // not in the goroutine: a panic of the host's there would end the process
	header := keyOf(r.Header, all)
	key := listKey{}
	sum := sha256.New()
	_ = header.Write(sum) // a hash takes all bytes
	sum.Sum(key[:0])
	m.mu.Lock()
	defer m.mu.Unlock()
	if l := m.lists[key]; l != nil && time.Since(l.begun) < modelsFresh {
		return l
	}
	if len(m.lists) >= maxModelsKept {
		clear(m.lists)
	}
	l := &list{begun: time.Now(), done: make(chan struct{})}
	m.lists[key] = l
	go func() {
		defer close(l.done)
		header.Set("Accept", "application/json")
		l.body = collect(context.WithoutCancel(r.Context()), all, &pdflow.Request{Header: header, RequestID: id})
	}()
	return l
}

// keyOf returns the headers by which engines may tell a client from another.
func keyOf(client http.Header, all []*Engines) http.Header {
	h := http.Header{}
	take := func(names ...string) {
		for _, name := range names {
			if v := client.Values(name); len(v) > 0 {
				h[http.CanonicalHeaderKey(name)] = v
			}
		}
	}
	take("Authorization", "X-Api-Key")
	for _, engines := range all {
		if engines != nil {
			take(engines.ForwardHeaders...)
		}
	}
	return h
}

// collect asks all ready decode engines, and joins what they say in the order of the models.
func collect(ctx context.Context, all []*Engines, in *pdflow.Request) []byte {
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	type target struct {
		*Engines
		url string
	}
	var targets []target
	known := map[string]bool{}
	for _, engines := range all {
		if engines == nil || engines.Set == nil || engines.Transport == nil {
			continue
		}
		for _, e := range engines.Set.Load().Endpoints {
			if e.Phase != discovery.PhaseReady || !e.Role.Has(discovery.RoleDecode) || e.URL == nil ||
				known[e.URL.String()] {
				continue
			}
			known[e.URL.String()] = true
			targets = append(targets, target{engines, e.URL.String()})
		}
	}
	found := make([][]json.RawMessage, len(targets))
	var wg sync.WaitGroup
	slots := make(chan struct{}, modelsAtOnce)
	for i, t := range targets {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			found[i] = t.ask(ctx, t.url, in)
		})
	}
	wg.Wait()
	return joinModels(found)
}

// ask returns what one engine lists, nil if it does not answer as it should.
func (e *Engines) ask(ctx context.Context, url string, in *pdflow.Request) []json.RawMessage {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+modelsPath, nil)
	if err != nil {
		return nil
	}
	req.Header = in.EngineHeader(e.ForwardHeaders...)
	resp, err := e.Transport.RoundTrip(req)
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
