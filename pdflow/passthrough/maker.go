// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"cmp"
	"errors"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/internal/verdict"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/responses"
)

const responsesPath = "/v1/responses/"

// toMaker sends a request to the engine that made the response which its path names, of whatever model: the request
// names none. A response that this engine has no more is looked for once more. It reports false where no engines can
// tell who made it.
func (h *Handler) toMaker(x *passing) bool {
	id, _, _ := strings.Cut(strings.TrimPrefix(x.r.URL.Path, responsesPath), "/")
	var all []*Engines
	for _, e := range h.o.All() {
		if e != nil && e.Responses != nil && e.Picker != nil && e.Transport != nil {
			all = append(all, e)
		}
	}
	if len(all) == 0 {
		return false
	}
	var e *pdflow.Error
	for range 2 {
		if e = x.findMaker(id, all); e != nil {
			break
		}
		x.limits = x.engines.Timeouts.Or(h.o.Timeouts).Resolve(0)
		if e = x.exchange(""); e != nil {
			break
		}
		if x.models != nil {
			x.asked = x.engines.Responses.Model(id) // "": a name of the model's
		}
		e = x.run()
		gone := e != nil && e.Code == pdflow.CodeNoResponse
		if gone || x.r.Method == http.MethodDelete && x.outcome.Decode.Status/100 == 2 {
			x.engines.Responses.Forget(id, x.maker)
		}
		if !gone {
			break
		}
	}
	if e != nil && e.Code == pdflow.CodeNoResponse { // or the host serves nobody now, or does not know its models yet
		_, now := h.find("")
		e = cmp.Or(now, e)
	}
	if e != nil {
		h.fail(x.w, x.r, e, x.limits)
	}
	return true
}

// findMaker finds the engine that made a response, and its model's engines. It asks those of all models at once.
func (x *passing) findMaker(id string, all []*Engines) *pdflow.Error {
	for _, e := range all {
		if maker, ok := e.Responses.Known(id); ok {
			x.engines, x.maker = e, maker
			return nil
		}
	}
	makers, errs := make([]string, len(all)), make([]error, len(all))
	var wg sync.WaitGroup
	for i, e := range all {
		wg.Go(func() {
			makers[i], errs[i] = e.Responses.Find(x.r.Context(), id, func() http.Header {
				return (&pdflow.Request{Header: x.r.Header, RequestID: x.id}).EngineHeader(e.ForwardHeaders...)
			})
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err == nil {
			x.engines, x.maker = all[i], makers[i]
			return nil
		}
	}
	if x.r.Context().Err() != nil {
		return &pdflow.Error{Code: pdflow.CodeClientGone, Message: "the client left"}
	}
	for _, err := range errs {
		if !errors.Is(err, responses.ErrNotFound) {
			return &pdflow.Error{Code: pdflow.CodeNoEndpoint, RetryAfter: time.Second, Err: err,
				Message: "it is not known now which engine has the response"}
		}
	}
	return noResponse(nil)
}

func noResponse(err error) *pdflow.Error {
	return &pdflow.Error{Code: pdflow.CodeNoResponse, Err: err,
		Message: "no engine has this response: it was not stored, or it was lost with its engine"}
}

// lost reports whether an error tells that the engine that made a response has it no more. A process that has ended
// refuses connections, and its responses were in its memory.
func (x *passing) lost(err error) bool {
	return x.maker != "" && (errors.Is(err, errNoResponse) || errors.Is(err, syscall.ECONNREFUSED))
}

// isNoResponse reports whether an engine's refusal says so, and not that the engine does not know what is below it.
func (x *passing) isNoResponse(status int, said []byte) bool {
	if x.maker == "" || status != http.StatusNotFound {
		return false
	}
	_, below, _ := strings.Cut(strings.TrimPrefix(x.r.URL.Path, responsesPath), "/")
	f := verdict.FaultOf(said, x.private())
	return !verdict.ScopeOf(status, f).OfEngine() && (f != nil || below == "")
}
