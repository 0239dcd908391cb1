// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/pdflow"
)

// read reads the body whole, nil if there is none. Only JSON passes: what another form carries could not be looked
// through.
func (h *Handler) read(w http.ResponseWriter, r *http.Request) (*connector.Request, *pdflow.Error) {
	if r.Body == nil {
		return nil, nil
	}
	rc := http.NewResponseController(w)
	d := h.o.Timeouts.Resolve(0).Body
	limited := d > 0 && rc.SetReadDeadline(time.Now().Add(d)) == nil
	body, err := io.ReadAll(io.LimitReader(r.Body, max(h.o.MaxBody, h.o.MaxBody+1)))
	e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: "the body could not be read to its end", Err: err}
	switch {
	case err == nil && int64(len(body)) <= h.o.MaxBody:
		if limited {
			_ = rc.SetReadDeadline(time.Time{})
		}
		return parse(r, body)
	case err == nil:
		e = &pdflow.Error{Code: pdflow.CodeTooLarge, Message: "the body is larger than this gateway takes"}
	case errors.Is(err, os.ErrDeadlineExceeded):
		e = &pdflow.Error{Code: pdflow.CodeBodyTimeout, Message: "the body did not come in time"}
	case r.Context().Err() != nil:
		return nil, &pdflow.Error{Code: pdflow.CodeClientGone, Phase: "body", Err: err}
	}
	intake.Closing(w)
	return nil, e
}

func parse(r *http.Request, body []byte) (*connector.Request, *pdflow.Error) {
	if len(body) == 0 {
		return nil, nil
	}
	if fault := intake.CheckHeader(r.Header); fault != "" {
		return nil, &pdflow.Error{Code: pdflow.CodeMediaType, Message: fault}
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
