// SPDX-License-Identifier: Apache-2.0

// Package responses knows which decode engine has which response of the Responses API. An engine keeps its responses in
// its own memory, so what refers to one (previous_response_id, GET /v1/responses/ID) is of use to that engine alone.
//
// One [Index] belongs to the engines of one model, and to all that send to them:
//
//	index := responses.New(set, legs)
//	flow, err := pdflow.New(c, picker, pdflow.WithTransport(legs), pdflow.WithResponses(index))
//	engines := &passthrough.Engines{Set: set, Picker: picker, Transport: legs, Responses: index}
//
// The flow tells the index which engine made which response. What the index does not know, after a restart or in
// another replica, it asks the decode engines.
package responses

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/discovery"
)

// Limits of what an index remembers.
const (
	maxKnown = 1 << 16 // responses; the oldest goes, and is found again by asking
	maxModel = 256     // bytes of a model's name; of a longer one nothing is remembered
	maxID    = 256     // bytes of an id; a longer one is not remembered, and nobody has it
)

// Errors of [Index.Find].
var (
	// ErrNotFound means that no decode engine has the response: its id is wrong, it was not stored, or its engine has
	// ended or was restarted.
	ErrNotFound = errors.New("responses: no decode engine has the response")
	// ErrUnavailable means that this cannot be told now: an engine does not answer, or too much is asked.
	ErrUnavailable = errors.New("responses: not all decode engines can be asked now")
)

// Index knows which decode engine of a set has which response. Its methods may be called concurrently.
type Index struct {
	set  *discovery.Set
	send http.RoundTripper

	mu     sync.Mutex
	known  map[string]made // by responses' ids
	order  []string        // of known, a ring once it is full
	oldest int

	searches searches
}

// New makes an index that asks the decode engines of set through send, which must not follow redirects.
func New(set *discovery.Set, send http.RoundTripper) *Index {
	return &Index{set: set, send: send, known: map[string]made{},
		searches: searches{slots: make(chan struct{}, asksAtOnce), running: map[searchKey]*search{}}}
}

// made is how a response was made.
type made struct{ engine, model string }

// Learn remembers that an engine has a response. model is the name by which the client asked for the model, where
// clients have other names for it than engines (pdflow.WithModel); "" if that is not known.
func (x *Index) Learn(id, engine, model string) {
	if id == "" || len(id) > maxID {
		return
	}
	if len(model) > maxModel {
		model = ""
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	was, again := x.known[id]
	if !again {
		id = strings.Clone(id) // else what it was read from would be kept
		if len(x.order) < maxKnown {
			x.order = append(x.order, id)
		} else {
			delete(x.known, x.order[x.oldest])
			x.order[x.oldest] = id
			x.oldest = (x.oldest + 1) % maxKnown
		}
	}
	if model != was.model && model != "" {
		was.model = strings.Clone(model)
	}
	x.known[id] = made{engine, was.model}
}

// Forget forgets that an engine has a response: it was deleted, or the engine says that it has none of that id.
func (x *Index) Forget(id, engine string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if m := x.known[id]; m.engine == engine {
		x.known[id] = made{model: m.model} // its place in the ring stays
	}
}

// Known returns the ID of the engine that has a response, if that is remembered and the engine is ready.
func (x *Index) Known(id string) (engine string, ok bool) {
	x.mu.Lock()
	engine = x.known[id].engine
	x.mu.Unlock()
	if engine == "" {
		return "", false
	}
	ready := slices.ContainsFunc(x.set.Load().Endpoints, func(e discovery.Endpoint) bool {
		return e.ID == engine && e.Phase == discovery.PhaseReady
	})
	return engine, ready
}

// Model returns the name by which the client asked for a response's model, "" if it is not remembered.
func (x *Index) Model(id string) string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.known[id].model
}

// Find returns the ID of the decode engine that has a response. If that is not known, or if its engine is not ready, it
// asks all decode engines for the response, with the header that header returns, which should have the client's keys.
// An engine that refuses the client (401, 403) is returned, too, so that it can tell the client itself. The error is
// ErrNotFound, ErrUnavailable or that of ctx.
//
// An engine that refuses connections has no response: its process has ended, and its memory with it. Two seconds are
// waited for each engine. What was found out is remembered for a second, and for each response only one search runs.
// All searches of an index together ask 16 engines at once, and about 256 in a second.
func (x *Index) Find(ctx context.Context, id string, header func() http.Header) (engine string, err error) {
	if !plain(id) {
		return "", ErrNotFound
	}
	if engine, ok := x.Known(id); ok {
		return engine, nil
	}
	return x.search(ctx, id, header())
}

// plain reports whether an id can be part of a path, and means itself there.
func plain(id string) bool {
	return id != "" && len(id) <= maxID && id != "." && id != ".." && !strings.ContainsFunc(id, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.:", c)
	})
}
