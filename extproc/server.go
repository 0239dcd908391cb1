// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	mode "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// DestinationHeader tells Envoy where the decode leg goes, as "host:port". Clients cannot set it: the server removes it
// from each request that it sees.
const DestinationHeader = "x-gateway-destination-endpoint"

// Options are a Server's settings; nil means defaults.
type Options struct {
	// MaxBody is the largest body of a request, in bytes; default 32 MiB. Envoy's per_connection_buffer_limit_bytes and
	// the gRPC server's MaxRecvMsgSize must be larger, or Envoy answers in the server's place.
	MaxBody int64
}

// Server answers Envoy's external processing filter. Make it with [NewServer], and register it at a gRPC server. It has
// nothing to close: a request ends when Envoy ends its stream or the gRPC server is stopped. Flows are the caller's.
type Server struct {
	extproc.UnimplementedExternalProcessorServer
	find    func(model string) *pdflow.Flow
	send    http.RoundTripper
	maxBody int64
}

// NewServer makes a Server. find returns the flow that serves a model; for nil the client gets a 404. send sends the
// legs that Envoy does not: prefill, encode, side calls, and decode where the flow must read its response. It must not
// follow redirects.
func NewServer(find func(model string) *pdflow.Flow, send http.RoundTripper, o *Options) (*Server, error) {
	if find == nil || send == nil {
		return nil, errors.New("extproc: NewServer needs a function that finds flows and a RoundTripper")
	}
	s := &Server{find: find, send: send, maxBody: 32 << 20}
	if o != nil && o.MaxBody != 0 {
		if s.maxBody = o.MaxBody; o.MaxBody < 0 {
			return nil, errors.New("extproc: Options.MaxBody must not be negative")
		}
	}
	return s, nil
}

// stream is Envoy's, of one HTTP request.
type stream = extproc.ExternalProcessor_ProcessServer

// Process serves one HTTP request of Envoy's.
func (s *Server) Process(envoy stream) error {
	first, err := envoy.Recv()
	if err != nil {
		return nil //nolint:nilerr // the client left before its first header
	}
	head := first.GetRequestHeaders()
	if err := checkModes(first.GetProtocolConfig()); err != nil {
		return err
	}
	if head == nil {
		return status.Error(codes.FailedPrecondition, "processing_mode.request_header_mode must be SEND")
	}
	r := newRequest(envoy.Context(), head)
	api := connector.APIOf(r.URL.Path)
	if api == connector.APIUnknown || r.Method != http.MethodPost {
		return pass(envoy, first)
	}
	if e := s.checkHead(r, head.EndOfStream); e != nil {
		return fail(envoy, r, e)
	}
	if err := envoy.Send(proceed(first)); err != nil {
		return err
	}
	second, err := envoy.Recv()
	switch {
	case err != nil:
		return nil //nolint:nilerr // the client left before the end of its body
	case second.GetRequestBody() == nil:
		return pass(envoy, second) // Envoy answers by itself: the body is larger than it holds, or did not come
	}
	body := second.GetRequestBody().Body
	if int64(len(body)) > s.maxBody {
		return fail(envoy, r, s.tooLarge())
	}
	req, err := connector.ParseRequest(api, body)
	if err != nil {
		return fail(envoy, r, invalid(err))
	}
	flow := s.find(req.Model)
	if flow == nil {
		return fail(envoy, r, &pdflow.Error{Code: pdflow.CodeNotFound, Param: "model",
			Message: "no such model is served here"})
	}
	x := &running{s: s, envoy: envoy, r: r, streamed: req.Stream}
	x.bodySeen = first.GetProtocolConfig().GetResponseBodyMode() != mode.ProcessingMode_NONE
	return x.run(flow, &pdflow.Request{API: api, Header: r.Header, Body: body})
}

// checkModes refuses a configuration of Envoy's by which a request would fail later, and with a worse reason.
func checkModes(c *extproc.ProtocolConfiguration) error {
	if c == nil {
		return nil // an Envoy before 1.33 does not tell
	}
	if c.RequestBodyMode != mode.ProcessingMode_BUFFERED {
		return errStreamed
	}
	if m := c.ResponseBodyMode; m != mode.ProcessingMode_NONE && m != mode.ProcessingMode_STREAMED {
		return status.Error(codes.FailedPrecondition, "processing_mode.response_body_mode must be NONE or STREAMED")
	}
	return nil
}

// errStreamed is also for an Envoy that does not tell its modes, and sends a body in several messages.
var errStreamed = status.Error(codes.FailedPrecondition, "processing_mode.request_body_mode must be BUFFERED")

// newRequest is the client's request without its body. Its context ends with Envoy's stream.
func newRequest(ctx context.Context, head *extproc.HttpHeaders) *http.Request {
	r := (&http.Request{Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}).WithContext(ctx)
	r.URL = &url.URL{}
	for _, h := range head.GetHeaders().GetHeaders() {
		value := valueOf(h)
		switch h.Key {
		case ":path":
			if u, err := url.ParseRequestURI(value); err == nil {
				r.URL, r.RequestURI = u, value
			}
		case ":method":
			r.Method = value
		case ":authority":
			r.Host = value
		default:
			if !strings.HasPrefix(h.Key, ":") {
				r.Header.Add(h.Key, value)
			}
		}
	}
	return r
}

// checkHead has the rules of pdflow's handler for what a client may send.
func (s *Server) checkHead(r *http.Request, noBody bool) *pdflow.Error {
	types := r.Header["Content-Type"]
	if len(types) != 1 || !isJSON(types[0]) {
		return &pdflow.Error{Code: pdflow.CodeMediaType, Message: "Content-Type must be application/json"}
	}
	for _, encoding := range r.Header["Content-Encoding"] {
		if encoding != "" && !strings.EqualFold(encoding, "identity") {
			return &pdflow.Error{Code: pdflow.CodeMediaType, Message: "Content-Encoding must be identity"}
		}
	}
	if n, err := strconv.ParseInt(r.Header.Get("Content-Length"), 10, 64); err == nil && n > s.maxBody {
		return s.tooLarge()
	}
	if noBody {
		return &pdflow.Error{Code: pdflow.CodeInvalid, Message: "the request has no body"}
	}
	return nil
}

func isJSON(contentType string) bool {
	media, _, err := mime.ParseMediaType(contentType)
	return media == "application/json" && (err == nil || errors.Is(err, mime.ErrInvalidMediaParameter))
}

func (s *Server) tooLarge() *pdflow.Error {
	return &pdflow.Error{Code: pdflow.CodeTooLarge,
		Message: "the body is larger than " + strconv.FormatInt(s.maxBody, 10) + " bytes"}
}

func invalid(err error) *pdflow.Error {
	if e, ok := errors.AsType[*pdflow.Error](err); ok {
		return e
	}
	e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: err.Error(), Err: err}
	if r, ok := errors.AsType[*connector.RequestError](err); ok {
		e.Param, e.Message = r.Param, r.Message
	}
	return e
}

// fail answers a request that no flow has begun.
func fail(envoy stream, r *http.Request, e *pdflow.Error) error {
	w := newRecorder()
	if id := r.Header["X-Request-Id"]; len(id) == 1 {
		w.header["X-Request-Id"] = id
	}
	e.Send(w, r)
	return envoy.Send(w.immediate(e.Code))
}

// pass lets a request through that is not for the engines, but without a destination that its client has chosen.
func pass(envoy stream, m *extproc.ProcessingRequest) error {
	for {
		if err := envoy.Send(proceed(m)); err != nil {
			return err
		}
		var err error
		if m, err = envoy.Recv(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}
