// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net/http"

	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// Error is an error response in vLLM's shape.
type Error struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`

	anthropic bool // written in the shape of Anthropic's Messages API
}

func (e *Error) Error() string { return e.Message }

// BadRequest is the error for a request that the API refuses; param names the member, "" for none.
func BadRequest(param, format string, args ...any) *Error {
	e := &Error{Message: fmt.Sprintf(format, args...), Type: "BadRequestError", Code: http.StatusBadRequest}
	if param != "" {
		e.Param = &param
	}
	return e
}

// BadField is the response to a field of the wrong type.
func BadField(field, kind, message, input string) *Error {
	loc := "body"
	if field != "" {
		loc += "." + field
	}
	return &Error{
		Message: fmt.Sprintf("1 validation error:\n  {'type': '%s', 'loc': '%s', 'msg': '%s', 'input': %s}", kind, loc,
			message, input),
		Type: "Bad Request", Param: &loc, Code: http.StatusBadRequest,
	}
}

// Errors of generations that failed: a KV load, and the death of the engine core.
var (
	ErrInternal = &Error{Message: "Internal server error", Type: "InternalServerError",
		Code: http.StatusInternalServerError}
	ErrEngine = &Error{Message: "EngineCore encountered an issue. See stack trace (above) for the root cause.",
		Type: "InternalServerError", Code: http.StatusInternalServerError}
)

type errorBody struct {
	Error *Error `json:"error"`
}

// spaced is the error as it stands in a stream: Python's json.dumps puts spaces after colons and commas.
func (e *Error) spaced() string {
	param := "null"
	if e.Param != nil {
		param = string(python.Encode(*e.Param))
	}
	return fmt.Sprintf(`{"error": {"message": %s, "type": %s, "param": %s, "code": %d}}`, python.Encode(e.Message),
		python.Encode(e.Type), param, e.Code)
}
