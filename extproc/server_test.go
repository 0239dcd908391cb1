// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	mode "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/extproc"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// fake is a connector whose abilities a test chooses.
type fake struct {
	order     connector.Order
	final     bool   // P's response is the client's
	rewritten string // in the place of D's response, if not empty
}

func (f *fake) Traits() connector.Traits { return connector.Traits{Name: "fake", Order: f.order} }
func (*fake) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Set("kv_transfer_params", []byte(`{"leg":"P"}`))
	return nil
}

func (*fake) Decode(_ context.Context, _ *connector.Session, _ *connector.PrefillResult, leg *connector.Leg) error {
	leg.Set("kv_transfer_params", []byte(`{"leg":"D"}`))
	return nil
}

func (f *fake) Final(*connector.Session, *connector.PrefillResult) (connector.Response, bool) {
	response := []byte(`{"final":true}`)
	return connector.Response{Body: response, Events: [][]byte{response, []byte("[DONE]")}}, f.final
}

func (f *fake) Rewrite(*connector.Session, func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if f.rewritten == "" {
		return nil
	}
	return func([]byte) ([]byte, error) { return []byte(f.rewritten), nil }
}

// fakeWorld has two engines that are handlers. nil is an engine that must not be asked.
func fakeWorld(t *testing.T, c *fake, p, d http.HandlerFunc, opts ...pdflow.Option) *world {
	t.Helper()
	w := &world{t: t}
	urls := make([]string, 2)
	for i, h := range []http.HandlerFunc{p, d} {
		if h == nil {
			h = func(http.ResponseWriter, *http.Request) { t.Error("an engine was asked") }
		}
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		urls[i] = s.URL
	}
	w.start(c, urls[0], urls[1]+"/base", nil, opts...)
	return w
}

func answers(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) }
}

// player plays Envoy for one request.
type player struct {
	t      *testing.T
	stream extprocv3.ExternalProcessor_ProcessClient
	cancel context.CancelFunc
}

func (w *world) play() *player {
	conn, err := grpc.NewClient(w.addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(w.t, err)
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	w.t.Cleanup(func() { cancel(); _ = conn.Close() })
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	require.NoError(w.t, err)
	return &player{w.t, stream, cancel}
}

func headers(pairs ...string) *extprocv3.HttpHeaders {
	h := &extprocv3.HttpHeaders{Headers: &core.HeaderMap{}}
	for i := 0; i < len(pairs); i += 2 {
		h.Headers.Headers = append(h.Headers.Headers, &core.HeaderValue{Key: pairs[i], RawValue: []byte(pairs[i+1])})
	}
	return h
}

func requestHead(h *extprocv3.HttpHeaders) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: h},
		ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: mode.ProcessingMode_BUFFERED}}
}

func requestBody(body string) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{
		RequestBody: &extprocv3.HttpBody{Body: []byte(body), EndOfStream: true}}}
}

func responseHead(status string) *extprocv3.ProcessingRequest {
	return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{
		ResponseHeaders: headers(":status", status)}}
}

func clientHead() *extprocv3.HttpHeaders {
	return headers(":method", "POST", ":path", "/v1/completions", ":authority", "models",
		"content-type", "application/json", "x-request-id", "mine")
}

func (p *player) send(m *extprocv3.ProcessingRequest) {
	p.t.Helper()
	require.NoError(p.t, p.stream.Send(m))
}

func (p *player) recv() *extprocv3.ProcessingResponse {
	p.t.Helper()
	m, err := p.stream.Recv()
	require.NoError(p.t, err)
	return m
}

// ask sends a request and returns what comes in the place of its body.
func (p *player) ask(body string) *extprocv3.ProcessingResponse {
	p.t.Helper()
	p.send(requestHead(clientHead()))
	require.NotNil(p.t, p.recv().GetRequestHeaders())
	p.send(requestBody(body))
	return p.recv()
}

func setHeader(m *extprocv3.HeaderMutation, name string) string {
	for _, h := range m.GetSetHeaders() {
		if h.Header.Key == name {
			return string(h.Header.RawValue)
		}
	}
	return ""
}

func TestNewServerRefusesNil(t *testing.T) {
	find := func(string) *pdflow.Flow { return nil }
	for _, make := range []func() (*extproc.Server, error){
		func() (*extproc.Server, error) { return extproc.NewServer(nil, http.DefaultTransport, nil) },
		func() (*extproc.Server, error) { return extproc.NewServer(find, nil, nil) },
		func() (*extproc.Server, error) {
			return extproc.NewServer(find, http.DefaultTransport, &extproc.Options{MaxBody: -1})
		},
	} {
		_, err := make()
		require.Error(t, err)
	}
}

// A processing mode by which requests would go wrong is refused with the name of the field.
func TestProcessingModes(t *testing.T) {
	w := fakeWorld(t, &fake{}, nil, nil)
	for field, m := range map[string]*extprocv3.ProcessingRequest{
		"request_header_mode": requestBody("{}"),
		"request_body_mode": {Request: requestHead(clientHead()).Request,
			ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: mode.ProcessingMode_STREAMED}},
		"response_body_mode": {Request: requestHead(clientHead()).Request,
			ProtocolConfig: &extprocv3.ProtocolConfiguration{
				RequestBodyMode:  mode.ProcessingMode_BUFFERED,
				ResponseBodyMode: mode.ProcessingMode_FULL_DUPLEX_STREAMED}},
	} {
		p := w.play()
		p.send(m)
		_, err := p.stream.Recv()
		assert.Equal(t, codes.FailedPrecondition, status.Code(err))
		assert.ErrorContains(t, err, field)
	}
}

func TestRequestsThatNoFlowBegins(t *testing.T) {
	w := fakeWorld(t, &fake{}, nil, nil)
	p := w.play()
	h := clientHead()
	h.EndOfStream = true
	p.send(requestHead(h))
	assert.EqualValues(t, 400, p.recv().GetImmediateResponse().GetStatus().GetCode(), "a request without a body")

	got := w.play().ask(`{"model":"unknown","prompt":"hi"}`).GetImmediateResponse()
	assert.EqualValues(t, 404, got.GetStatus().GetCode())
	assert.Equal(t, "not_found", gjson.GetBytes(got.GetBody(), "error.code").String())
	assert.Equal(t, "mine", setHeader(got.GetHeaders(), "x-request-id"))
	assert.Equal(t, "pdkit_not_found", got.GetDetails())
}

// A decode leg keeps the path below the engine's base, and names the engine's port.
func TestTheDecodeLeg(t *testing.T) {
	w := fakeWorld(t, &fake{}, answers(`{"id":"x"}`), nil)
	p := w.play()
	leg := p.ask(`{"prompt":"hi"}`).GetRequestBody().GetResponse()
	assert.JSONEq(t, `{"prompt":"hi","kv_transfer_params":{"leg":"D"}}`, string(leg.GetBodyMutation().GetBody()))
	assert.Equal(t, "/base/v1/completions", setHeader(leg.GetHeaderMutation(), ":path"))
	assert.Contains(t, setHeader(leg.GetHeaderMutation(), extproc.DestinationHeader), "127.0.0.1:")
	p.send(responseHead("200"))
	head := p.recv().GetResponseHeaders().GetResponse().GetHeaderMutation()
	assert.Equal(t, "disaggregated", setHeader(head, "x-pd-mode"))
	require.NoError(t, p.stream.CloseSend())
	assert.Equal(t, []pdflow.Code{""}, w.wait(1))
}

// Where Envoy shows the response's body, an end that is an error is a failure, and the rest is not passed on.
func TestAnEndThatIsAnErrorIsCut(t *testing.T) {
	for name, c := range map[string]struct {
		pieces   []string
		want     pdflow.Code
		trailers bool // end the response
	}{
		"whole": {[]string{chunk(`{"choices":[{"text":"a","finish_reason":null}]}`),
			chunk(`{"choices":[{"text":"a","finish_reason":"stop"}]}`) + chunk("[DONE]")}, "", false},
		"given up": {[]string{chunk(`{"choices":[{"text":"a","finish_reason":null}]}`),
			chunk(`{"choices":[{"text":"a","finish_reason":"abort"}]}`) + chunk("[DONE]")},
			pdflow.CodeStreamBroken, false},
		"an error in place of a stream": {[]string{chunk(`{"error":{"message":"x"}}`) + chunk("[DONE]")},
			pdflow.CodeStreamBroken, false},
		"given up in a piece that is cut": {[]string{`data: {"choices":[{"text":"a","finish_rea`,
			`son":"abort"}]}` + "\n\n"}, pdflow.CodeStreamBroken, false},
		"given up in an event that trailers end": {[]string{chunk(`{"choices":[{"text":"a","finish_reason":null}]}`),
			`data: {"choices":[{"text":"a","finish_reason":"abort"}]}`}, pdflow.CodeStreamBroken, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fakeWorld(t, &fake{}, answers(`{"id":"x"}`), nil)
			p := w.play()
			head := requestHead(clientHead())
			head.ProtocolConfig.ResponseBodyMode = mode.ProcessingMode_STREAMED
			p.send(head)
			require.NotNil(t, p.recv().GetRequestHeaders())
			p.send(requestBody(`{"prompt":"hi","stream":true}`))
			require.NotNil(t, p.recv().GetRequestBody())
			p.send(responseHead("200"))
			require.NotNil(t, p.recv().GetResponseHeaders())
			for i, piece := range c.pieces {
				last := i == len(c.pieces)-1 && !c.trailers
				p.send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{
					ResponseBody: &extprocv3.HttpBody{Body: []byte(piece), EndOfStream: last}}})
				got := p.recv()
				if last && c.want != "" {
					assert.Equal(t, "pdkit_stream_broken", got.GetImmediateResponse().GetDetails())
				} else {
					assert.NotNil(t, got.GetResponseBody())
				}
			}
			if c.trailers {
				p.send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{
					ResponseTrailers: &extprocv3.HttpTrailers{}}})
				assert.Equal(t, "pdkit_stream_broken", p.recv().GetImmediateResponse().GetDetails())
			}
			require.NoError(t, p.stream.CloseSend())
			assert.Equal(t, []pdflow.Code{c.want}, w.wait(1))
		})
	}
}

func chunk(data string) string { return "data: " + data + "\n\n" }

// A response that the flow must read reaches the client whole, and a stream of that kind is refused before decode is
// asked.
func TestResponsesThatAreNotRelayed(t *testing.T) {
	const plain, streamed = `{"prompt":"hi"}`, `{"prompt":"hi","stream":true}`
	for name, c := range map[string]struct {
		c      fake
		body   string
		decode http.HandlerFunc
		status int
		want   string
		code   pdflow.Code
	}{
		"P's own":           {fake{final: true}, plain, nil, 200, `{"final":true}`, ""},
		"P's own, streamed": {fake{final: true}, streamed, nil, 200, "data: {\"final\":true}\n\ndata: [DONE]\n\n", ""},
		"a changed one": {fake{rewritten: `{"rewritten":true}`}, plain, answers(`{}`), 200, `{"rewritten":true}`,
			""},
		"a large one": {fake{rewritten: strings.Repeat("x", 7<<20)}, plain, answers(`{}`), 502, "decode_failed",
			pdflow.CodeClientGone},
		"a changed stream": {fake{rewritten: "{}"}, streamed, nil, 400, "unsupported", pdflow.CodeClientGone},
	} {
		t.Run(name, func(t *testing.T) {
			w := fakeWorld(t, &c.c, answers(`{"id":"x"}`), c.decode)
			got := w.play().ask(c.body).GetImmediateResponse()
			assert.EqualValues(t, c.status, got.GetStatus().GetCode())
			assert.Contains(t, string(got.GetBody()), c.want)
			assert.Equal(t, "mine", setHeader(got.GetHeaders(), "x-request-id"))
			assert.Equal(t, []pdflow.Code{c.code}, w.wait(1))
		})
	}
}

// While prefill runs beside decode, the head of decode's response waits: a prefill that fails then is still a 502.
func TestTheHeadWaitsForPrefill(t *testing.T) {
	for name, fails := range map[string]bool{"prefill succeeds": false, "prefill fails": true} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			w := fakeWorld(t, &fake{order: connector.Together}, func(w http.ResponseWriter, r *http.Request) {
				select {
				case <-release:
				case <-r.Context().Done():
				}
				if fails {
					w.WriteHeader(http.StatusInternalServerError)
				}
				_, _ = io.WriteString(w, `{"id":"x"}`)
			}, nil)
			p := w.play()
			require.NotNil(t, p.ask(`{"prompt":"hi","stream":true}`).GetRequestBody(), "both legs are sent")
			p.send(responseHead("200"))
			got := make(chan *extprocv3.ProcessingResponse, 1)
			go func() { m, _ := p.stream.Recv(); got <- m }()
			select {
			case <-got:
				assert.Fail(t, "the head did not wait")
			case <-time.After(100 * time.Millisecond):
			}
			close(release)
			m := <-got
			if fails {
				assert.EqualValues(t, 502, m.GetImmediateResponse().GetStatus().GetCode())
				assert.Equal(t, "prefill_failed",
					gjson.GetBytes(m.GetImmediateResponse().GetBody(), "error.code").String())
				assert.Equal(t, pdflow.CodePrefillFailed, w.wait(1)[0])
				return
			}
			require.NotNil(t, m.GetResponseHeaders())
			require.NoError(t, p.stream.CloseSend())
			assert.Equal(t, []pdflow.Code{""}, w.wait(1))
		})
	}
}

// direct is a stream without gRPC, for a test whose clock is not real.
type direct struct {
	grpc.ServerStream
	ctx context.Context
	in  chan *extprocv3.ProcessingRequest
	out chan *extprocv3.ProcessingResponse
}

func (d *direct) Context() context.Context                   { return d.ctx }
func (d *direct) Send(m *extprocv3.ProcessingResponse) error { d.out <- m; return nil }
func (d *direct) Recv() (*extprocv3.ProcessingRequest, error) {
	m, ok := <-d.in
	if !ok {
		return nil, io.EOF
	}
	return m, nil
}

// roundTrip is a RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// A stream that lasts longer than a host may forget a request is not a forgotten one.
func TestALongStreamIsNotForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t}
		endpoint := func(role discovery.Role) discovery.Endpoint {
			e, err := discovery.New("http://127.0.0.1:1", role)
			require.NoError(t, err)
			return e
		}
		pair := picked(pdflow.Pick{Prefill: endpoint(discovery.RolePrefill), Decode: endpoint(discovery.RoleDecode)})
		flow, err := pdflow.New(&fake{}, pair, pdflow.WithObserver(pdflow.Observer{SessionEnd: w.SessionEnd}))
		require.NoError(t, err)
		w.flow = flow
		send := roundTrip(func(r *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Header: http.Header{},
				Body:          io.NopCloser(strings.NewReader(`{"id":"x"}`)),
				ContentLength: -1, Request: r}, nil
		})
		s, err := extproc.NewServer(func(string) *pdflow.Flow { return flow }, send, nil)
		require.NoError(t, err)
		d := &direct{ctx: t.Context(), in: make(chan *extprocv3.ProcessingRequest)}
		d.out = make(chan *extprocv3.ProcessingResponse)
		ended := make(chan error)
		go func() { ended <- s.Process(d) }()
		begin := []*extprocv3.ProcessingRequest{requestHead(clientHead()), requestBody(`{"prompt":"hi"}`),
			responseHead("200")}
		for _, m := range begin {
			d.in <- m
			require.Nil(t, (<-d.out).GetImmediateResponse())
		}
		time.Sleep(3 * time.Hour)
		close(d.in)
		require.NoError(t, <-ended)
		assert.Equal(t, []pdflow.Code{""}, w.wait(1))
		require.NoError(t, flow.Shutdown(t.Context()))
	})
}

// picked returns a picker that knows one pair.
func picked(p pdflow.Pick) pdflow.Picker {
	return pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) { return p, nil })
}
