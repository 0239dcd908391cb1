// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// Server is what a [Mux] routes to: a [*Flow], two of them by [Flow.Split], or [NotYet].
type Server interface {
	// flowFor returns the flow that serves a request, nil if nobody knows yet.
	flowFor(r *connector.ClientRequest, requestID string) *Flow
	// names are the clients' names of its models: see WithModel.
	names() []string
	// serves reports whether it serves a model that is not its own: an adapter.
	serves(model string) bool
	// Ready returns nil if requests can be served now: see Flow.Ready.
	Ready(ctx context.Context) error
}

func (f *Flow) flowFor(*connector.ClientRequest, string) *Flow { return f }

func (f *Flow) names() []string { return f.opts.models.All() }

func (f *Flow) serves(model string) bool { return f.opts.adapters != nil && f.opts.adapters(model) }

// NotYet stands for models of which a host does not know yet whether it serves them, since the list of them has not
// come. Their requests get 503 with Retry-After and [CodeNoEndpoint]: 404 would tell clients not to try again.
var NotYet Server = notYet{}

type notYet struct{}

func (notYet) flowFor(*connector.ClientRequest, string) *Flow { return nil }

func (notYet) names() []string { return nil }

func (notYet) serves(string) bool { return false }

func (notYet) Ready(context.Context) error { return errNotYet() }

func errNotYet() *Error {
	return &Error{Code: CodeNoEndpoint, Message: "the models are not known yet", RetryAfter: time.Second}
}

// Mux serves several models behind one listener. A request goes to the flow of the model that it names, or that has the
// name ([WithModel]), or of whose model it names an adapter ([WithAdapters]). One that names no model goes to the only
// flow, or else to the flow for any model, as does one whose model nobody else serves. Routes may be replaced while it
// serves.
type Mux struct {
	handler handler
	routes  atomic.Pointer[routes]
}

// routes are a Mux's.
type routes struct {
	models map[string]Server
	named  map[string]Server // by the names of WithModel
	order  []Server          // by the names of their models
}

// NewMux makes a Mux whose only route is [NotYet], for any model, until SetRoutes. Its options are those of the
// client's side: WithMaxBody, WithBudget, WithErrorHandler, WithRequestID and of WithTimeouts Body and Write; and, for
// requests that no flow gets (their model is served nowhere), WithObserver and of WithTelemetry Logger, MeterProvider
// and Attributes. In place of a Logger or a MeterProvider that is not given the Mux uses that of a flow: of the one
// whose model comes first in the alphabet. Each other option is a flow's, and an error here.
//
// A flow keeps what it has of its own: its error handler, its request IDs and its Write limit hold for its requests,
// its budget counts their bodies, too, and its limit of bodies is kept to. [Mux.SetRoutes] refuses a flow that needs
// more than the Mux gives: larger bodies, or another time for them.
func NewMux(opts ...Option) (*Mux, error) {
	o := options{telemetry: silent}
	if err := o.take(opts); err != nil {
		return nil, err
	}
	if err := o.checkMux(); err != nil {
		return nil, fmt.Errorf("pdflow: NewMux: %w", err)
	}
	m := &Mux{}
	t := o.timeouts.Resolve(0)
	refusals, err := newRefusals(o.telemetry.MeterProvider, o.telemetry.Logger, o.observers, o.telemetry.Attributes...)
	if err != nil {
		return nil, fmt.Errorf("pdflow: NewMux: %w", err)
	}
	refusals.flows = m.flowsRefusals
	m.handler = handler{refusals: refusals, maxBody: cmp.Or(o.maxBody, defaultMaxBody), budget: o.budget,
		onError: sendError, requestID: o.requestID, bodyTimeout: t.Body, writeTimeout: t.Write, find: m.find}
	if o.errorHandler != nil {
		m.handler.onError = o.errorHandler
	}
	m.setRoutes(map[string]Server{"": NotYet})
	return m, nil
}

// checkMux finds an option that only a flow can heed.
func (o *options) checkMux() error {
	timeouts, measured := o.timeouts, o.telemetry
	timeouts.Body, timeouts.Write = 0, 0
	for _, flows := range []struct {
		set    bool
		option string
	}{
		{o.transport != nil, "WithTransport"},
		{timeouts != config.Timeouts{}, "WithTimeouts, but for Body and Write,"},
		{o.retry != config.Retry{}, "WithRetry"},
		{o.fallback != "", "WithFallback"},
		{len(o.checkers) > 0, "WithRequestCheckers"},
		{o.unsupported != "", "WithUnsupported"},
		{o.maxRescues > 0, "WithRescue"},
		{o.keepAlive > 0, "WithKeepAlive"},
		{len(o.forward) > 0, "WithForwardHeaders"},
		{o.adapters != nil, "WithAdapters"},
		{o.models != nil, "WithModel"},
		{o.responses != nil, "WithResponses"},
		{measured.TracerProvider != nil || measured.Propagator != nil || measured.SpanName != nil ||
			measured.GenAI != "" || measured.Usage,
			"WithTelemetry, but for Logger, MeterProvider and Attributes,"},
	} {
		if flows.set {
			return errors.New(flows.option + " is for flows: give it to New")
		}
	}
	return nil
}

// SetRoutes replaces all routes: model name to flow or split. "" and "*" both stand for any model. Requests in flight
// go on. A flow may be shut down once its route is replaced: its successor serves the requests that reach it too late.
func (m *Mux) SetRoutes(models map[string]Server) error {
	own := make(map[string]Server, len(models))
	for model, s := range models {
		if f, isFlow := s.(*Flow); s == nil || isFlow && f == nil {
			return errors.New("pdflow: SetRoutes: a model without a flow")
		}
		if model == "*" {
			model = ""
		}
		for _, f := range flowsOf(s) {
			if f.opts.maxBody > m.handler.maxBody {
				return fmt.Errorf("pdflow: SetRoutes: a flow takes bodies of %d bytes, and the Mux of %d: give NewMux "+
					"the larger WithMaxBody", f.opts.maxBody, m.handler.maxBody)
			}
			if own := f.opts.timeouts.Body; own != 0 && own != m.handler.bodyTimeout {
				return errors.New("pdflow: SetRoutes: a flow has another limit of Body than the Mux, which reads the " +
					"bodies: give NewMux the WithTimeouts")
			}
		}
		if _, twice := own[model]; twice {
			return errors.New(`pdflow: SetRoutes: "" and "*" are the same route`)
		}
		own[model] = s
	}
	m.setRoutes(own)
	return nil
}

func (m *Mux) setRoutes(models map[string]Server) {
	all := &routes{models: models}
	for _, model := range slices.Sorted(maps.Keys(models)) {
		s := models[model]
		all.order = append(all.order, s)
		for _, name := range s.names() {
			if all.named == nil {
				all.named = map[string]Server{}
			}
			if all.named[name] == nil {
				all.named[name] = s
			}
		}
	}
	m.routes.Store(all)
}

// flowsRefusals is nil as long as no route has a flow.
func (m *Mux) flowsRefusals() *refusals {
	for _, s := range m.routes.Load().order {
		if flows := flowsOf(s); len(flows) > 0 {
			return flows[0].handler.refusals
		}
	}
	return nil
}

func flowsOf(s Server) []*Flow {
	switch s := s.(type) {
	case *Flow:
		return []*Flow{s}
	case *split:
		return []*Flow{s.main, s.other}
	}
	return nil
}

// Lookup returns what serves a model, by the rules of Mux. It returns [NotYet] and false if that is not known yet.
func (m *Mux) Lookup(model string) (Server, bool) {
	s := m.lookup(model)
	return s, s != nil && s != NotYet
}

func (m *Mux) lookup(model string) Server {
	all := m.routes.Load()
	if s, ok := all.models[model]; ok {
		return s
	}
	if s, ok := all.named[model]; ok {
		return s
	}
	if model == "" && len(all.order) == 1 {
		return all.order[0]
	}
	for _, s := range all.order {
		if model != "" && s.serves(model) {
			return s
		}
	}
	return all.models[""]
}

func (m *Mux) find(req *connector.ClientRequest, id string) (*Flow, *Error) {
	s := m.lookup(req.Model)
	if s == nil {
		return nil, &Error{Code: CodeNotFound, Param: "model", Message: "no such model is served here"}
	}
	if f := s.flowFor(req, id); f != nil {
		return f, nil
	}
	return nil, errNotYet()
}

// ServeHTTP serves the client APIs' paths by POST, and answers 404 to everything else.
func (m *Mux) ServeHTTP(w http.ResponseWriter, r *http.Request) { m.handler.serve(w, r) }

// Middleware serves the client APIs' paths and hands everything else to next.
func (m *Mux) Middleware(next http.Handler) http.Handler { return m.handler.middleware(next) }
