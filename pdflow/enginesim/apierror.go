// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"fmt"
	"net/http"
)

// apiError is an error answer in vLLM's shape.
type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func (e *apiError) Error() string { return e.Message }

func badRequest(param, format string, args ...any) *apiError {
	e := &apiError{Message: fmt.Sprintf(format, args...), Type: "BadRequestError", Code: http.StatusBadRequest}
	if param != "" {
		e.Param = &param
	}
	return e
}

// badField is the answer to a field of the wrong type.
func badField(field, kind, message, input string) *apiError {
	loc := "body"
	if field != "" {
		loc += "." + field
	}
	return &apiError{
		Message: fmt.Sprintf("1 validation error:\n  {'type': '%s', 'loc': '%s', 'msg': '%s', 'input': %s}", kind, loc, message, input),
		Type:    "Bad Request", Param: &loc, Code: http.StatusBadRequest,
	}
}

var (
	errInternal = &apiError{Message: "Internal server error", Type: "InternalServerError", Code: http.StatusInternalServerError}
	errEngine   = &apiError{Message: "EngineCore encountered an issue. See stack trace (above) for the root cause.", Type: "InternalServerError", Code: http.StatusInternalServerError}
)

type errorBody struct {
	Error *apiError `json:"error"`
}

// spaced is the error as it stands in a stream: Python's json.dumps puts spaces
// after colons and commas.
func (e *apiError) spaced() string {
	param := "null"
	if e.Param != nil {
		param = string(encode(*e.Param))
	}
	return fmt.Sprintf(`{"error": {"message": %s, "type": %s, "param": %s, "code": %d}}`, encode(e.Message), encode(e.Type), param, e.Code)
}
