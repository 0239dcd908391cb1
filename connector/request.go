// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"encoding/json"
	"errors"

	"github.com/pdkit/pdkit/internal/request"
)

// ClientRequest is a client's request. Its body is read once: indexed, not decoded. It is immutable and refers to the
// body's bytes, which must not change while it is used.
type ClientRequest struct {
	API    API
	Model  string // as engines serve it (see pdflow.WithModel); "" if the request names none
	Stream bool

	in request.Request
}

// ParseRequest reads a request body. The error is a *[RequestError] if the body is not one JSON object, names a
// top-level member twice, or has a wrong type in a member that pdkit reads.
func ParseRequest(api API, body []byte) (*ClientRequest, error) {
	r := &ClientRequest{API: api}
	if err := r.in.Parse(request.API(api), body); err != nil {
		if fault, ok := errors.AsType[*request.Fault](err); ok {
			err = (*RequestError)(fault)
		}
		return nil, err
	}
	r.Model, r.Stream = r.in.Model, r.in.Stream
	return r, nil
}

// Field returns the raw value of a top-level member as the client sent it, but for model, which is Model. A member that
// is null is absent.
func (r *ClientRequest) Field(name string) (json.RawMessage, bool) { return r.in.Field(name) }

// Body returns the client's body, which must not be changed.
func (r *ClientRequest) Body() []byte { return r.in.Doc.Bytes() }
