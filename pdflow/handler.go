// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"cmp"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/cut"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/verdict"
)

// handler is the client's side of a Flow and of a Mux. It reads a request, finds the flow that serves it, and writes
// the response.
type handler struct {
	maxBody      int64
	budget       *Budget       // nil: no bound
	bodyTimeout  time.Duration // 0: none
	writeTimeout time.Duration // 0: none
	onError      errorHandler
	requestID    func(*http.Request) string // nil: the client's X-Request-Id
	find         func(r *connector.ClientRequest, requestID string) (*Flow, *Error)
	refusals     *refusals
}

// ServeHTTP serves the client APIs' paths (see [connector.API]) by POST, and answers 404 to everything else.
//
// If decode breaks after its first byte, ServeHTTP cuts the client's connection (over HTTP/2: its stream) and panics
// with http.ErrAbortHandler. The cut holds also where middleware recovers from the panic. It needs a ResponseWriter
// whose write deadline can be set, or one that unwraps to such a writer (see [http.ResponseController]). On any other
// writer, and over HTTP/1.0, an error is the last that the client gets: a stream ends in an error event and without
// [DONE], any other body is not valid JSON.
func (f *Flow) ServeHTTP(w http.ResponseWriter, r *http.Request) { f.handler.serve(w, r) }

// Middleware serves the client APIs' paths and hands everything else to next.
func (f *Flow) Middleware(next http.Handler) http.Handler { return f.handler.middleware(next) }

func (h *handler) middleware(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && connector.APIOf(r.URL.Path) != connector.APIUnknown {
			h.serve(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (h *handler) serve(w http.ResponseWriter, r *http.Request) {
	ids := h.idsOf(r)
	w.Header()[headerRequestID] = ids
	if len(r.TransferEncoding) > 0 {
		// net/http hides a Content-Length that stood beside it. Closing the connection keeps the bytes that follow
		// from being read as another request.
		w.Header().Set("Connection", "close")
	}
	held := h.budget.hold()
	defer held.giveBack()
	resp, own, e := h.accept(w, r, ids[0], held)
	defer own.end()
	if e != nil {
		own.handler.fail(w, r, e, own.alive)
		return
	}
	if resp.send(w, r, own.handler.writeTimeout, own.alive) != nil {
		cut.Abort(r)
	}
}

// ownHandler is what a request has of its flow's handler beside that of its Mux.
type ownHandler struct {
	handler *handler // which tells its errors, and bounds its writes
	held    *holding // of the flow's own budget
	alive   *keepAlive
}

func (o *ownHandler) end() {
	o.alive.close()
	o.held.giveBack()
}

// accept finds the flow for a request, and has it run. serve sends the response, since a stream keeps all the stack
// that was needed until then.
func (h *handler) accept(w http.ResponseWriter, r *http.Request, id string, held *holding) (resp *Response,
	own ownHandler, e *Error) {
	own.handler = h
	told := Refusal{RequestID: id, API: connector.APIOf(r.URL.Path)}
	req, flow, e := h.route(w, r, &told, held)
	if e != nil {
		h.refusals.tell(r.Context(), told, e)
		return nil, own, e
	}
	for {
		c := call{req: req, header: r.Header, id: id, held: held}
		if h != &flow.handler {
			before := own.alive
			own, e = h.enter(w, r, flow, &c)
			if own.alive = before; e != nil {
				told.RequestID = c.id
				flow.handler.refusals.tell(r.Context(), told, e)
				return nil, own, e
			}
		}
		own.alive = flow.keepAlive(w, r, &c, own.handler.writeTimeout, own.alive)
		resp, e := flow.do(own.alive.context(r), &c)
		if e == nil || e.Code != CodeDraining {
			return resp, own, e
		}
		// The flow is shutting down. If its route was replaced after find, its successor serves the request.
		next, gone := h.find(req, id)
		if gone != nil || next == flow {
			return nil, own, e
		}
		own.held.giveBack()
		own.alive.stop()
		flow = next
	}
}

// route reads a request and finds its flow. told gets what it learns of the request. w and held may be nil.
func (h *handler) route(w http.ResponseWriter, r *http.Request, told *Refusal, held *holding) (*connector.ClientRequest,
	*Flow, *Error) {
	if told.API == connector.APIUnknown || r.Method != http.MethodPost {
		intake.Closing(w, r)
		fault := intake.Unserved(r)
		return nil, nil, &Error{Code: Code(fault.Code), Message: fault.Message}
	}
	req, e := h.read(w, r, told.API, held)
	if e != nil {
		return nil, nil, e
	}
	told.Model = req.Model
	flow, e := h.find(req, told.RequestID)
	return req, flow, e
}

// enter holds a request that a Mux has read to what its flow has of its own: see NewMux.
func (h *handler) enter(w http.ResponseWriter, r *http.Request, flow *Flow, c *call) (own ownHandler, e *Error) {
	own.handler = h
	o := &flow.opts
	if o.errorHandler != nil || o.timeouts.Write != 0 {
		mine := *h
		if o.errorHandler != nil {
			mine.onError = o.errorHandler
		}
		if o.timeouts.Write != 0 {
			mine.writeTimeout = o.timeouts.Write
		}
		own.handler = &mine
	}
	if o.requestID != nil {
		ids := flow.handler.idsOf(r)
		c.id, w.Header()[headerRequestID] = ids[0], ids
	}
	size := int64(len(c.req.Body()))
	if o.maxBody > 0 && size > o.maxBody {
		fault := intake.TooLarge(o.maxBody)
		return own, &Error{Code: Code(fault.Code), Phase: "body", Message: fault.Message}
	}
	if o.budget != nil && o.budget != h.budget {
		own.held = o.budget.hold()
		if !own.held.taker()(size, size) {
			return own, noMemory("", "body", intake.ErrNoMemory)
		}
		c.held = own.held
	}
	return own, nil
}

// read reads and checks a client's body.
func (h *handler) read(w http.ResponseWriter, r *http.Request, api connector.API,
	held *holding) (*connector.ClientRequest, *Error) {
	body, fault := intake.Read(w, r, h.maxBody, h.bodyTimeout, false, held.taker())
	if fault != nil && errors.Is(fault.Err, intake.ErrNoMemory) {
		return nil, noMemory("", "body", fault.Err)
	}
	if fault != nil {
		return nil, &Error{Code: Code(fault.Code), Phase: "body", Message: fault.Message, Err: fault.Err}
	}
	req, err := connector.ParseRequest(api, body)
	if err != nil {
		return nil, invalid(err)
	}
	return req, nil
}

// idsOf returns a request's id as a header's value.
func (h *handler) idsOf(r *http.Request) []string {
	if h.requestID == nil {
		return requestIDs(r.Header)
	}
	if id := h.requestID(r); validRequestID(id) {
		return []string{id}
	}
	return newIDs()
}

func (h *handler) fail(w http.ResponseWriter, r *http.Request, e *Error, alive *keepAlive) {
	if alive.begun() {
		alive.stop()
		h.failEarly(w, r, e)
		return
	}
	if e.Code == CodeClientGone {
		// If this handler only returned, net/http would send a 200, which a client that closed nothing but its sending
		// side would see. The error reaches such a client only where the writer hides the connection (see package cut).
		rc := http.NewResponseController(w)
		_ = rc.SetWriteDeadline(cut.Past)
		h.onError(w, r, e)
		_ = rc.Flush()
		cut.Abort(r)
		return
	}
	rc := http.NewResponseController(w)
	if h.writeTimeout > 0 && rc.SetWriteDeadline(time.Now().Add(h.writeTimeout)) == nil {
		defer func() {
			_ = rc.Flush() // under the deadline, which must not be in force for the connection's next request
			_ = rc.SetWriteDeadline(time.Time{})
		}()
	}
	h.write(w, r, e)
	intake.Linger(w, r)
}

// write writes an error, with the way in which the request was served.
func (h *handler) write(w http.ResponseWriter, r *http.Request, e *Error) {
	if e.mode != "" {
		w.Header()[headerMode] = modeHeader(e.mode)
	}
	h.onError(w, r, e)
}

// modeHeaders are the values of X-PD-Mode, made once for all requests.
var modeHeaders = map[Mode][]string{
	ModeDisaggregated: {string(ModeDisaggregated)},
	ModeAggregated:    {string(ModeAggregated)},
	ModeFallback:      {string(ModeFallback)},
}

func modeHeader(m Mode) []string { return modeHeaders[m] }

// sendError is the default error handler.
func sendError(w http.ResponseWriter, r *http.Request, e *Error) { e.Send(w, r) }

// Send writes the error to the client of r, as an object in the shape of the API that the client speaks: Anthropic's
// for /v1/messages, OpenAI's for the rest. Where an engine refused the request, the object has the engine's own
// message, type, param and code, and "(address)" in place of URLs, host names, addresses,
// paths, and the names of engines.
func (e *Error) Send(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h["Content-Type"] = jsonType
	api := e.api
	if api == connector.APIUnknown && strings.HasPrefix(r.URL.Path, connector.APIMessages.Path()) {
		api = connector.APIMessages // or a path below it, which no flow serves
	}
	body := errorObject(api, e)
	if e.engine != nil && e.engine.retryAfter != "" {
		h.Set("Retry-After", e.engine.retryAfter)
	}
	if e.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.RetryAfter.Seconds()))))
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(e.HTTPStatus())
	_, _ = w.Write(body)
}

// errorObject is an error in the shape of the API that the client speaks.
func errorObject(api connector.API, e *Error) []byte {
	f := verdict.Fault{Message: e.clientMessage(), Type: e.errorType(), Code: e.Code}
	if e.Param != "" {
		f.Param = e.Param
	}
	if e.engine != nil && e.engine.said != nil {
		f = *e.engine.said
		f.Type = cmp.Or[any](f.Type, e.errorType())
	}
	object := map[string]any{"error": f}
	if api == connector.APIMessages {
		kind := any(anthropicType(e.HTTPStatus()))
		if f.Anthropic {
			kind = f.Type
		}
		object = map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": f.Message}}
	}
	body, _ := json.Marshal(object) // strings and numbers only
	return body
}
