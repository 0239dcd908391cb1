// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"errors"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/pdflow"
)

// read reads the body whole, nil if there is none. Only JSON passes: what another form carries could not be looked
// through.
func (h *Handler) read(w http.ResponseWriter, r *http.Request, budget intake.Taker) (*connector.ClientRequest,
	*pdflow.Error) {
	body, fault := intake.Read(w, r, h.o.MaxBody, max(h.o.Timeouts.Resolve(0).Body, 0), true, budget)
	if fault != nil {
		e := &pdflow.Error{Code: pdflow.Code(fault.Code), Phase: "body", Message: fault.Message, Err: fault.Err}
		if e.Code == pdflow.CodeOverloaded {
			e.RetryAfter = time.Second
		}
		return nil, e
	}
	if len(body) == 0 {
		return nil, nil
	}
	req, err := connector.ParseRequest(connector.APIUnknown, body)
	if err != nil {
		return nil, invalid(err)
	}
	return req, nil
}

func invalid(err error) *pdflow.Error {
	e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: err.Error(), Err: err}
	if of, ok := errors.AsType[*connector.RequestError](err); ok {
		e.Param, e.Message = of.Param, of.Message
	}
	return e
}
