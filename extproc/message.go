// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	httpstatus "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/pdkit/pdkit/pdflow"
)

// proceed lets a message through as it is. It removes a destination that the client has set.
func proceed(m *extproc.ProcessingRequest) *extproc.ProcessingResponse {
	switch m.Request.(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{
			RequestHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
				HeaderMutation: &extproc.HeaderMutation{RemoveHeaders: []string{DestinationHeader}}}}}}
	case *extproc.ProcessingRequest_RequestBody:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{
			RequestBody: &extproc.BodyResponse{}}}
	case *extproc.ProcessingRequest_RequestTrailers:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestTrailers{
			RequestTrailers: &extproc.TrailersResponse{}}}
	case *extproc.ProcessingRequest_ResponseBody:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
			ResponseBody: &extproc.BodyResponse{}}}
	case *extproc.ProcessingRequest_ResponseTrailers:
		return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseTrailers{
			ResponseTrailers: &extproc.TrailersResponse{}}}
	}
	return respond(nil, false)
}

// replace puts another piece of a response in the place of one.
func replace(piece []byte) *extproc.ProcessingResponse {
	m := &extproc.BodyMutation{Mutation: &extproc.BodyMutation_Body{Body: piece}}
	if len(piece) == 0 {
		m.Mutation = &extproc.BodyMutation_ClearBody{ClearBody: true}
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseBody{
		ResponseBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: m}}}}
}

// respond lets the head of a response through, with further headers, and without a length if its body changes.
func respond(h http.Header, changes bool) *extproc.ProcessingResponse {
	m := &extproc.HeaderMutation{SetHeaders: setAll(nil, h)}
	if changes {
		m.RemoveHeaders = []string{"content-length"}
	}
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{
		ResponseHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
			HeaderMutation: m}}}}
}

// decodeLeg puts a decode step in the place of the client's request. Only what the step sends remains of the client's
// headers: the rest would reach the engine unread, or make Envoy send the leg twice (x-envoy-retry-on).
func decodeLeg(client http.Header, step *pdflow.Step, body []byte) *extproc.ProcessingResponse {
	m := &extproc.HeaderMutation{}
	for name := range client {
		if _, sent := step.Header[name]; !sent && name != "Content-Length" {
			m.RemoveHeaders = append(m.RemoveHeaders, strings.ToLower(name))
		}
	}
	m.SetHeaders = append(setAll(nil, step.Header), set(":path", step.URL.RequestURI()),
		set(DestinationHeader, hostPort(step.URL)), set("content-length", strconv.Itoa(len(body))))
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{
		RequestBody: &extproc.BodyResponse{Response: &extproc.CommonResponse{
			HeaderMutation: m,
			BodyMutation:   &extproc.BodyMutation{Mutation: &extproc.BodyMutation_Body{Body: body}},
		}}}}
}

// hostPort is the address of a URL, with the scheme's port where the URL has none.
func hostPort(u *url.URL) string {
	switch {
	case u.Port() != "":
		return u.Host
	case u.Scheme == "https":
		return u.Host + ":443"
	}
	return u.Host + ":80"
}

func setAll(to []*core.HeaderValueOption, h http.Header) []*core.HeaderValueOption {
	for name, values := range h {
		for i, value := range values {
			o := set(strings.ToLower(name), value)
			if i > 0 {
				o.AppendAction = core.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
			}
			to = append(to, o)
		}
	}
	return to
}

func set(name, value string) *core.HeaderValueOption {
	return &core.HeaderValueOption{Header: &core.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD}
}

// valueOf returns a header's value, which older Envoys send as text.
func valueOf(h *core.HeaderValue) string {
	if len(h.RawValue) > 0 {
		return string(h.RawValue)
	}
	return h.Value
}

// recorder is a ResponseWriter whose response Envoy sends.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func newRecorder() *recorder { return &recorder{header: http.Header{}, status: http.StatusOK} }

func (w *recorder) Header() http.Header         { return w.header }
func (w *recorder) Write(p []byte) (int, error) { return w.body.Write(p) }
func (w *recorder) WriteHeader(status int)      { w.status = status }

// immediate makes the response one that Envoy gives in place of the engine's. Envoy's access log shows code.
func (w *recorder) immediate(code pdflow.Code) *extproc.ProcessingResponse {
	w.header.Del("Content-Length") // Envoy's own
	return &extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extproc.ImmediateResponse{
			Status:  &httpstatus.HttpStatus{Code: httpstatus.StatusCode(w.status)},
			Headers: &extproc.HeaderMutation{SetHeaders: setAll(nil, w.header)},
			Body:    w.body.Bytes(),
			Details: "pdkit_" + string(code),
		}}}
}
