// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
	"github.com/pdkit/pdkit/pdflow"
)

const (
	modelsPath     = "/v1/models"
	modelsFresh    = 2 * time.Second // how long a list is handed out before the engines are asked again
	modelsTimeout  = 2 * time.Second // for each engine, which is left out if it is slower; and for its turn to come
	modelsAtOnce   = 32              // engines asked at once, over all lists that are being made
	maxModelsBytes = 1 << 20         // of one engine's response
	maxModelsKept  = 64              // lists kept, one for each key of clients
)

// modelList keeps the lists of models, apart by the client's key, since engines may ask for one.
type modelList struct {
	all   func() []*Engines
	turn  chan struct{} // of the list whose engines are next: each list gets all it needs, one after another
	slots chan struct{} // one for each engine that is asked at once
	mu    sync.Mutex
	lists map[listKey]*list
}

func newModelList(all func() []*Engines) *modelList {
	return &modelList{all: all, turn: make(chan struct{}, 1), slots: make(chan struct{}, modelsAtOnce),
		lists: map[listKey]*list{}}
}

type listKey [sha256.Size]byte

// list is one list, being made until done is closed.
type list struct {
	key     listKey
	begun   time.Time
	waiting int // clients; the list's making ends with the last
	end     context.CancelFunc
	done    chan struct{}
	body    []byte // nil: too many lists were asked for
}

// listsModels reports whether a request is for the list, or for its entry of a model. vLLM has no path for one model,
// and engines do not know the names that clients may have.
func listsModels(r *http.Request) (model string, ok bool) {
	if model, ok = strings.CutPrefix(r.URL.Path, modelsPath+"/"); !ok {
		model, ok = "", r.URL.Path == modelsPath
	}
	return model, ok && r.Method == http.MethodGet
}

// spells reports whether a path is written as engines read it. Clients of OpenAI's API write the slash in a model's
// name as %2F.
func spells(u *url.URL) bool {
	escaped := u.EscapedPath()
	if strings.HasPrefix(escaped, modelsPath+"/") {
		escaped = strings.NewReplacer("%2F", "/", "%2f", "/").Replace(escaped)
	}
	return escaped == u.Path
}

// list answers with the union of what the ready decode engines list, or with its entry of a model.
func (h *Handler) list(w http.ResponseWriter, r *http.Request, id, model string) {
	l := h.models.get(r, id)
	defer h.models.leave(l)
	select {
	case <-l.done:
	case <-r.Context().Done():
		h.fail(w, r, &pdflow.Error{Code: pdflow.CodeClientGone}, h.o.Timeouts)
		return
	}
	if l.body == nil {
		h.fail(w, r, &pdflow.Error{Code: pdflow.CodeOverloaded, RetryAfter: time.Second,
			Message: "too many lists of models are asked for at the same time"}, h.o.Timeouts)
		return
	}
	body := l.body
	if model != "" {
		if body = entryOf(body, model); body == nil {
			h.fail(w, r, &pdflow.Error{Code: pdflow.CodeNotFound, Param: "model",
				Message: "no engine lists this model"}, h.o.Timeouts)
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	rc := http.NewResponseController(w)
	if d := h.o.Timeouts.Resolve(0).Write; d > 0 && rc.SetWriteDeadline(time.Now().Add(d)) == nil {
		defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // the connection serves more requests
	}
	_, _ = w.Write(body)
	_ = rc.Flush()
}

// get returns the fresh list, or begins one, which outlives the client that asks first if others wait for it. The
// client leaves it when it needs it no more.
func (m *modelList) get(r *http.Request, id string) *list {
	all := m.all() // not in the goroutine: a panic of the host's there would end the process
	header := keyOf(r.Header, all)
	key := listKey{}
	sum := sha256.New()
	_ = header.Write(sum) // a hash takes all bytes
	sum.Sum(key[:0])
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.lists[key]
	if l == nil || time.Since(l.begun) >= modelsFresh {
		l = &list{key: key, begun: time.Now(), done: make(chan struct{})}
		m.keep(l)
		var ctx context.Context
		ctx, l.end = context.WithCancel(context.WithoutCancel(r.Context()))
		header.Set("Accept", "application/json")
		go func() {
			defer l.end()
			defer close(l.done)
			l.body = m.collect(ctx, all, &pdflow.Request{Header: header, RequestID: id})
		}()
	}
	l.waiting++
	return l
}

// keep remembers a list in place of the oldest. The caller holds the lock.
func (m *modelList) keep(l *list) {
	delete(m.lists, l.key)
	if len(m.lists) >= maxModelsKept {
		var oldest *list
		for _, other := range m.lists {
			if oldest == nil || other.begun.Before(oldest.begun) {
				oldest = other
			}
		}
		delete(m.lists, oldest.key)
	}
	m.lists[l.key] = l
}

// leave ends a list's making if nobody waits for it any more. Nobody gets what was not made.
func (m *modelList) leave(l *list) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.waiting--; l.waiting > 0 {
		return
	}
	select {
	case <-l.done:
		if l.body != nil {
			return
		}
	default:
		l.end()
	}
	if m.lists[l.key] == l {
		delete(m.lists, l.key)
	}
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

// collect asks all ready decode engines, and joins what they say in the order of the models. It returns nil if none
// has said anything and some could not be asked.
func (m *modelList) collect(ctx context.Context, all []*Engines, in *pdflow.Request) []byte {
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
	asked := 0
	turn, stop := context.WithTimeout(ctx, modelsTimeout) // to begin with each engine
	defer stop()
	if take(turn, m.turn) {
		for asked < len(targets) && take(turn, m.slots) {
			i, t := asked, targets[asked]
			wg.Go(func() {
				defer func() { <-m.slots }()
				found[i] = t.ask(ctx, t.url, in)
			})
			asked++
		}
		<-m.turn
	}
	wg.Wait()
	if asked < len(targets) && !slices.ContainsFunc(found, func(l []json.RawMessage) bool { return len(l) > 0 }) {
		return nil
	}
	return joinModels(found)
}

// take waits for a place in c until ctx ends.
func take(ctx context.Context, c chan struct{}) bool {
	select {
	case c <- struct{}{}:
		if ctx.Err() == nil {
			return true
		}
		<-c
	case <-ctx.Done():
	}
	return false
}

// ask returns what one engine lists, nil if it does not answer as it should.
func (e *Engines) ask(ctx context.Context, url string, in *pdflow.Request) []json.RawMessage {
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
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
	return e.asClientsNameThem(list.Data)
}

// asClientsNameThem lists each model by its names of ModelNames; one that has none stays as it is.
func (e *Engines) asClientsNameThem(models []json.RawMessage) []json.RawMessage {
	names, err := e.modelNames()
	if err != nil || len(names.All()) == 0 {
		return models
	}
	var all []json.RawMessage
	for _, raw := range models {
		card := gjson.ParseBytes(raw)
		parent, _ := jsonedit.SetIn(raw, "parent", jsonedit.Quote(names.First(card.Get("parent").Str)))
		if card.Get("parent").Type == gjson.String && parent != nil {
			raw = parent
		}
		public := names.Public(card.Get("id").Str)
		if len(public) == 0 {
			all = append(all, raw)
		}
		for _, name := range public {
			named, err := jsonedit.SetIn(raw, "id", jsonedit.Quote(name))
			if err == nil && card.Get("root").Type == gjson.String {
				named, err = jsonedit.SetIn(named, "root", jsonedit.Quote(name))
			}
			if err == nil {
				all = append(all, named)
			}
		}
	}
	return all
}

// entryOf returns the entry of a model in a list, nil if there is none.
func entryOf(list []byte, model string) []byte {
	for _, card := range gjson.GetBytes(list, "data").Array() {
		if card.Get("id").Str == model {
			return []byte(card.Raw)
		}
	}
	return nil
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
