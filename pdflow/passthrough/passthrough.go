// SPDX-License-Identifier: Apache-2.0

// Package passthrough serves what is not inference: it hands tokenizing, counting, embeddings and the like to one
// decode engine, and lists the models of all engines. It stands behind a flow or a mux:
//
//	engines := &passthrough.Engines{Set: set, Picker: picker, Transport: legs}
//	other, err := passthrough.New(func(string) (*passthrough.Engines, *pdflow.Error) { return engines, nil }, nil)
//	err = http.ListenAndServe(address, flow.Middleware(other))
//
// [Handler] says what passes, and by which method.
package passthrough

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/cut"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/pdflow/internal/names"
	"github.com/pdkit/pdkit/pdflow/responses"
)

// Engines are those of one model. Picker and Transport must not be nil. Make them once, not for each request.
type Engines struct {
	// whose ready decode engines are asked for their models, and whose names clients may not read; nil: none
	Set       *discovery.Set
	Picker    pdflow.Picker     // chooses the decode engine of each request
	Transport http.RoundTripper // sends to engines. It must not follow redirects

	// Timeouts are Decode, until the response's head; Idle, between two reads of it, after which the engine's health is
	// asked as a flow does (pdflow.WithTimeouts); Silence, of an engine that is well; HealthCheck, of such a probe; and
	// Write, of one write to the client. Zero is Options.Timeouts.
	Timeouts config.Timeouts

	// Members are what the connectors of these engines say in Traits.Members. They are removed from bodies, and so are
	// those that no client may set whatever the connector is.
	Members []string

	// ForwardHeaders are further headers of clients that engines get: see pdflow.WithForwardHeaders. What that refuses
	// is left out. Of a connector whose handoff is a header (Traits.Handoff) it must not name that.
	ForwardHeaders []string

	// ModelNames are the names by which clients ask for the models of these engines, each with that by which the
	// engines serve it; "*" stands for all other names, but those of Adapters. Requests and responses are changed as a
	// flow does it: see pdflow.WithModel. GET /v1/models lists a model that has names here by these alone.
	ModelNames map[string]string
	Adapters   func(model string) bool // see pdflow.WithAdapters; nil: there are none

	// DecodeOnly lets no engine serve that can prefill: see PrefillPairOnly of connector.Traits.
	DecodeOnly bool

	// Responses says which engine has the response that a path names. nil: any engine gets such a request.
	Responses *responses.Index

	names  names.Index
	probes live.Probes // of engines that are silent
	bind   sync.Once
	picker pdflow.Picker // Picker, bound to DecodeOnly

	naming   sync.Once
	models   *modelname.Names // ModelNames
	badNames error
}

// modelNames makes names of ModelNames, once.
func (e *Engines) modelNames() (*modelname.Names, error) {
	e.naming.Do(func() { e.models, e.badNames = modelname.Of(e.ModelNames) })
	return e.models, e.badNames
}

// pick chooses the engine of a request.
func (e *Engines) pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	e.bind.Do(func() { e.picker = e.Picker.Bind(nil, connector.Serving{PrefillPairOnly: e.DecodeOnly}) })
	choice, err := e.picker.Pick(ctx, in)
	if err == nil && in.Decode != "" && choice.Decode.ID != in.Decode {
		err = errOther
	}
	if err == nil && e.DecodeOnly && choice.Decode.Role.Has(discovery.RolePrefill) {
		err = errMayPrefill
	}
	return choice, err
}

// Options are the settings of a [Handler]. nil and zero values mean the defaults.
type Options struct {
	// All returns the engines whose models GET /v1/models lists, in the order of the list. Default: the engines of a
	// request that names no model.
	All func() []*Engines

	// Paths pass, too, by GET, HEAD, POST and DELETE: /v1/files, /v1/files/*/content. An element * stands for any one
	// element, and as the last one for one or more. New refuses a path that names an order to engines.
	Paths []string

	// Allow narrows what the handler serves, GET /v1/models included, by path or method. It is asked for nothing that
	// the handler would not serve without it.
	Allow func(r *http.Request) bool

	MaxBody   int64                      // bytes; default 32 MiB
	Budget    *pdflow.Budget             // of the bytes of all bodies; nil: no bound
	Timeouts  config.Timeouts            // Body, and what Engines.Timeouts leaves open
	RequestID func(*http.Request) string // see pdflow.WithRequestID; default: the client's X-Request-Id
	// see pdflow.WithErrorHandler; default: pdflow's Error.Send
	ErrorHandler func(w http.ResponseWriter, r *http.Request, e *pdflow.Error)
}

// Handler serves
//
//   - GET and HEAD on /v1/models and below it, where a slash in a model's name may be written as %2F,
//   - what refers to a response: see [OfResponse],
//   - POST on /v1/embeddings, /v1/score, /v1/rerank, /v1/classify, /v1/tokenize, /v1/detokenize, /tokenize,
//     /detokenize, /score, /rerank and /pooling, on /v1/messages/count_tokens, on /render below the paths of
//     chat/completions, completions, responses and messages, on /derender below the first two, and below /v1/audio/,
//   - Options.Paths.
//
// All others are 404, and so is each path that an engine could read as another one. Inference, POST on the paths of
// client APIs, is a flow's. The handler never serves the administration of engines (load, sleep, reset, abort, …).
//
// GET /v1/models is the union of what the ready decode engines list. It is kept for two seconds for each key of clients
// (Authorization, X-Api-Key, Engines.ForwardHeaders). An engine that fails, or takes longer than two seconds, is left
// out. 32 engines are asked at once, for all clients together; if so many clients ask that no engine's turn comes, the
// response is 503. GET /v1/models/NAME is its entry of that list.
//
// What refers to a response goes to the decode engine that made it, of whatever model, where
// Engines.Responses can tell which one that is. If no engine has it the error is of pdflow.CodeNoResponse; if its
// engine is not ready, of pdflow.CodeNoEndpoint.
//
// All else goes to one decode engine of the model that the body names. A body must be one JSON object; below /v1/audio/
// and on Options.Paths it may be a form (multipart/form-data). The engine gets the client's query, the header of
// [pdflow.Request.EngineHeader], and the body without transfer members. A form that has one is refused; any other
// passes as it came. The client gets the engine's status, Content-Type and body as it comes, or an error in the shape
// of its API. A redirect is an error. If the engine breaks after the response's head, the response is cut as a flow's
// is: see [pdflow.Flow.ServeHTTP].
type Handler struct {
	find    func(model string) (*Engines, *pdflow.Error)
	o       Options
	further []string // entries, by Options.Paths
	models  *modelList
}

// New makes a handler. find returns the engines of a model, or an error for the client; nil and nil is an unknown model
// (404). model is "" where the request names none: see [pdflow.Mux.Lookup] for the rules of a mux.
func New(find func(model string) (*Engines, *pdflow.Error), o *Options) (*Handler, error) {
	h := &Handler{find: find}
	if o != nil {
		h.o = *o
	}
	if find == nil || h.o.MaxBody < 0 {
		return nil, errors.New("passthrough: New needs a function that finds engines, and no negative MaxBody")
	}
	if err := h.o.Timeouts.Check(); err != nil {
		return nil, fmt.Errorf("passthrough: %w", err)
	}
	var err error
	if h.further, err = further(h.o.Paths); err != nil {
		return nil, err
	}
	h.o.MaxBody = cmp.Or(h.o.MaxBody, 32<<20)
	if h.o.ErrorHandler == nil {
		h.o.ErrorHandler = func(w http.ResponseWriter, r *http.Request, e *pdflow.Error) { e.Send(w, r) }
	}
	if h.o.All == nil {
		h.o.All = func() []*Engines {
			if e, _ := find(""); e != nil {
				return []*Engines{e}
			}
			return nil
		}
	}
	h.models = newModelList(h.o.All)
	return h, nil
}

// ServeHTTP answers 404 to what the handler does not serve, and 400 to who wants a WebSocket.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h.serves(r) {
		h.serve(w, r)
		return
	}
	w.Header().Set(headerRequestID, h.requestID(r))
	intake.Closing(w, r)
	h.fail(w, r, refusal(intake.Unserved(r)), h.o.Timeouts)
}

// Middleware hands to next what the handler does not serve.
func (h *Handler) Middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h.serves(r) {
			h.serve(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

const headerRequestID = "X-Request-Id"

func (h *Handler) serve(w http.ResponseWriter, r *http.Request) {
	id := h.requestID(r)
	w.Header().Set(headerRequestID, id)
	if len(r.TransferEncoding) > 0 {
		// net/http hides a Content-Length that stood beside it. Closing the connection keeps the bytes that follow
		// from being read as another request.
		w.Header().Set("Connection", "close")
	}
	if model, lists := listsModels(r); lists {
		h.list(w, r, id, model)
		return
	}
	budget, release := h.budget()
	defer release()
	b, e := h.read(w, r, budget)
	if e != nil {
		h.fail(w, r, e, h.o.Timeouts)
		return
	}
	x := &passing{w: w, r: r, id: id, body: b, limits: h.o.Timeouts}
	if OfResponse(r) && h.toMaker(x) {
		return
	}
	model := ""
	if req := b.request(); req != nil {
		model = req.Model
	}
	switch x.engines, e = h.find(model); {
	case e != nil:
	case x.engines == nil:
		e = &pdflow.Error{Code: pdflow.CodeNotFound, Param: "model", Message: "no such model is served here"}
	case x.engines.Picker == nil || x.engines.Transport == nil:
		e = &pdflow.Error{Code: pdflow.CodeInternal, Message: "the model's engines have no picker or no transport"}
	default:
		x.limits = x.engines.Timeouts.Or(h.o.Timeouts).Resolve(0)
		if e = x.exchange(model); e == nil {
			e = x.run()
		}
	}
	if e != nil {
		h.fail(w, r, e, x.limits)
	}
}

// budget returns what takes bytes for one request, and what gives them back.
func (h *Handler) budget() (intake.Taker, func()) {
	if h.o.Budget == nil {
		return nil, func() {}
	}
	held := int64(0)
	return func(n, size int64) bool {
		ok := h.o.Budget.TakePart(n, size)
		if ok {
			held += n
		}
		return ok
	}, func() { h.o.Budget.Give(held) }
}

func (h *Handler) requestID(r *http.Request) string {
	in := pdflow.Request{Header: r.Header}
	if h.o.RequestID != nil {
		in.Header = http.Header{headerRequestID: {h.o.RequestID(r)}}
	}
	return in.ID()
}

// fail answers with an error. A client that has left is told nothing: if the handler only returned, net/http would send
// a 200, which a client that closed nothing but its sending side would see.
func (h *Handler) fail(w http.ResponseWriter, r *http.Request, e *pdflow.Error, limits config.Timeouts) {
	rc := http.NewResponseController(w)
	if e.Code == pdflow.CodeClientGone {
		_ = rc.SetWriteDeadline(cut.Past)
	} else if d := limits.Resolve(0).Write; d > 0 && rc.SetWriteDeadline(time.Now().Add(d)) == nil {
		defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // the connection serves more requests
	}
	h.o.ErrorHandler(w, r, e)
	_ = rc.Flush()
	if e.Code == pdflow.CodeClientGone {
		cut.Abort(r)
		return
	}
	intake.Linger(w, r)
}
