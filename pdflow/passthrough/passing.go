// SPDX-License-Identifier: Apache-2.0

package passthrough

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/cut"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/modelname"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/live"
	"github.com/pdkit/pdkit/pdflow/internal/names"
	"github.com/pdkit/pdkit/transport"
)

// passing is one request on its way to an engine and back.
type passing struct {
	w       http.ResponseWriter
	r       *http.Request
	id      string
	body    *body // nil: none
	engines *Engines
	limits  config.Timeouts
	outcome pdflow.Outcome
	maker   string             // the ID of the engine that the request is for; "": any
	engine  discovery.Endpoint // that serves it
	asked   string             // the model that the client has named, now or for a stored response, where names differ
	models  *modelname.Names   // what the response is named by; nil: by what the engine says

	ctx    context.Context // of the engine's side
	cancel context.CancelCauseFunc
	watch  *live.Watchdog // of this run: ends ctx when the engine has been silent for too long
	silent live.Silence
}

var (
	errSilent     = errors.New("the engine is silent")
	errMayPrefill = errors.New("the picker named an engine that can prefill")
	errNoResponse = errors.New("the engine does not have the response")
	errOther      = errors.New("the picker named another engine than the request does")
	errRedirect   = errors.New("the engine did not answer with a response")
	errEncoded    = errors.New("the response is compressed")
)

// exchange has the request name its model as the engines do.
func (x *passing) exchange(asked string) *pdflow.Error {
	names, err := x.engines.modelNames()
	if err != nil {
		return &pdflow.Error{Code: pdflow.CodeInternal, Message: "the names of the models are wrong", Err: err}
	}
	served := names.Of(asked, x.engines.Adapters)
	if asked == "" && names.Hides() {
		x.models = names // as of a response that the client asks for once more
	}
	if served.Name == "" || served.Name == asked {
		return nil
	}
	x.asked, x.models = asked, names
	return x.body.serve(served)
}

// run sends the request to an engine and its response to the client. An error is one that the client has not been told.
func (x *passing) run() *pdflow.Error {
	body, e := x.body.payload(x.engines.Members)
	if e != nil {
		return e
	}
	choice, err := x.engines.pick(x.r.Context(), &pdflow.PickInput{Request: x.body.request(), Header: x.r.Header,
		RequestID: x.id, Attempt: 1, Single: true, Decode: x.maker})
	if x.maker != "" && errors.Is(err, pdflow.CodeNotFound) { // it has left
		return noResponse(err)
	}
	if err != nil {
		return &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no engine is ready for this model",
			RetryAfter: time.Second, Err: err}
	}
	x.engine = choice.Decode
	x.outcome = pdflow.Outcome{Mode: pdflow.ModeAggregated, Final: true, Decode: pdflow.LegOutcome{
		Leg: pdflow.LegDecode, Endpoint: choice.Decode.ID, Start: time.Now(), RequestBytes: body.size}}
	defer func() {
		x.outcome.Decode.End = time.Now()
		if choice.Done != nil {
			choice.Done(&x.outcome)
		}
	}()
	x.ctx, x.cancel = context.WithCancelCause(x.r.Context())
	x.watch = new(live.Watchdog)
	x.watch.Init(x, time.Now())
	defer x.watch.Wait()
	defer x.cancel(nil)
	defer x.watch.Stop()
	x.w.Header().Set("X-PD-Mode", string(pdflow.ModeAggregated))
	resp, err := x.send(choice.Decode, body)
	if x.lost(err) {
		return x.note(noResponse(err))
	}
	if err != nil {
		return x.failed(pdflow.CodeDecodeFailed, "the engine could not be reached or did not answer", err)
	}
	defer resp.Body.Close()
	if e := x.relay(resp); e != nil {
		cut.Response(x.w, x.r, x.lastWords(e))
		cut.Abort(x.r)
	}
	return nil
}

// send returns the response's head.
func (x *passing) send(to discovery.Endpoint, body *payload) (*http.Response, error) {
	target := *to.URL
	target.Path += x.r.URL.Path
	target.RawQuery = x.r.URL.RawQuery
	req, err := http.NewRequestWithContext(x.ctx, x.r.Method, target.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	if req.ContentLength = body.size; req.ContentLength > 0 {
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(body.open()), nil }
		req.Body, _ = req.GetBody()
	}
	req.Header = x.engineHeader()
	x.watch.Limit(x.limits.Decode)
	resp, err := x.engines.Transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	x.outcome.Decode.Status = resp.StatusCode
	if s := resp.StatusCode; s < 200 || s == http.StatusPartialContent ||
		s >= 300 && s < 400 && s != http.StatusNotModified {
		_ = resp.Body.Close()
		return nil, errRedirect
	}
	switch {
	case resp.StatusCode >= 400 && x.r.Method != http.MethodHead:
		if said := x.rewriteError(resp); x.isNoResponse(resp.StatusCode, said) {
			return nil, errNoResponse
		}
	case intake.Encoded(resp.Header): // nobody asked for it, and what clients must not see could not be found in it
		_ = resp.Body.Close()
		return nil, errEncoded
	}
	return resp, nil
}

// maxErrorBody is as much of an engine's error as is read.
const maxErrorBody = 1 << 20

// rewriteError leaves of an engine's error what a client may know, as a flow does. It returns what the engine said.
func (x *passing) rewriteError(resp *http.Response) (said []byte) {
	x.watch.Limit(x.limits.Idle)
	said, _ = io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // of a broken one, the status is what matters
	x.watch.Relax()
	_ = resp.Body.Close()
	body := x.fault(said, resp.StatusCode)
	resp.Body = io.NopCloser(bytes.NewReader(body))
	resp.Header = http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(body))},
		"Retry-After": resp.Header["Retry-After"]}
	return said
}

// clean leaves of an error within a stream what a client may know.
func (x *passing) clean(event, data []byte) ([]byte, error) {
	if !verdict.IsError(data) && !sse.Named(event, "error") {
		return data, nil
	}
	if failed := verdict.Failed(data, x.private()); failed != nil {
		return failed, nil
	}
	return x.fault(data, http.StatusInternalServerError), nil
}

// fault is an engine's error as a client may read it.
func (x *passing) fault(body []byte, status int) []byte {
	f := verdict.FaultOf(body, x.private())
	if f == nil {
		f = &verdict.Fault{Message: "the engine refused the request", Code: pdflow.CodeDecodeRejected}
	}
	if f.Type == nil {
		f.Type = "invalid_request_error"
		if status >= 500 {
			f.Type = "api_error"
		}
	}
	object := map[string]any{"error": f}
	if strings.HasPrefix(x.r.URL.Path, connector.APIMessages.Path()) {
		object = map[string]any{"type": "error", "error": map[string]any{"type": f.Type, "message": f.Message}}
	}
	body, _ = json.Marshal(object) // strings and numbers only
	return body
}

// private returns what no client may read in an engine's text.
func (x *passing) private() verdict.Private {
	own := map[string]bool{}
	names.Of(&x.engine, func(name string) { own[name] = true })
	e := x.engines
	p := verdict.Private{Asked: x.asked,
		Engine: func(word string) bool { return own[word] || e.Set != nil && e.names.Has(e.Set.Load(), word) }}
	if x.models != nil {
		p.Models = x.models.Hide
	}
	return p
}

// Expire ends the engine's side, unless it is silent within a response and well: see live.Silence.
func (x *passing) Expire() {
	if yes, _ := x.silent.GoesOn(x.ctx, x.watch, x.limits.Idle, x.limits.Silence, x.engineWell); !yes {
		x.cancel(errSilent)
	}
}

// engineWell asks how the engine is: the picker, and where that does not know, the engine.
func (x *passing) engineWell() bool {
	e := x.engines
	if h, ok := e.picker.(pdflow.EngineHealth); ok {
		if well, known := h.EngineHealth(x.engine.ID); known {
			return well
		}
	}
	return e.probes.Well(x.ctx, x.engine.ID, func(ctx context.Context) bool {
		return live.Healthy(ctx, x.engine.URL, x.limits.HealthCheck, func(r *http.Request) (*http.Response, error) {
			r.Header = x.engineHeader()
			return e.Transport.RoundTrip(r)
		})
	})
}

// engineHeader is what the engine gets of the client's header.
func (x *passing) engineHeader() http.Header {
	return (&pdflow.Request{Header: x.r.Header, RequestID: x.id}).EngineHeader(x.engines.ForwardHeaders...)
}

// relayed are the headers of an engine's response that the client gets.
var relayed = []string{"Content-Type", "Content-Length", "Retry-After"}

// relay writes the response to the client, each piece at once. After an error the response is to be cut.
func (x *passing) relay(resp *http.Response) *pdflow.Error {
	from := x.asAsked(resp)
	for _, name := range relayed {
		if v := resp.Header[name]; len(v) > 0 {
			x.w.Header()[name] = v
		}
	}
	x.w.WriteHeader(resp.StatusCode)
	rc := http.NewResponseController(x.w)
	if isStream(resp.Header) {
		faults := new(sse.Faults)
		faults.Watch(from, nil, x.clean)
		from = faults
	}
	buf := make([]byte, 32<<10)
	x.silent.Stream()
	for {
		x.watch.Limit(x.limits.Idle)
		n, err := from.Read(buf)
		x.watch.Relax() // from here on the client may be slow, not the engine
		x.outcome.Decode.ResponseBytes += int64(n)
		if n > 0 {
			if x.limits.Write > 0 {
				_ = rc.SetWriteDeadline(time.Now().Add(x.limits.Write))
			}
			_, werr := x.w.Write(buf[:n])
			if werr == nil {
				werr = rc.Flush()
			}
			if x.limits.Write > 0 && x.r.ProtoAtLeast(2, 0) {
				// over HTTP/2 a deadline that passes ends the stream, also while nothing is written
				_ = rc.SetWriteDeadline(time.Time{})
			}
			if werr != nil && !errors.Is(werr, http.ErrNotSupported) {
				return x.note(&pdflow.Error{Code: pdflow.CodeClientGone, Message: "the client left", Err: werr})
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			if x.limits.Write > 0 {
				_ = rc.SetWriteDeadline(time.Time{}) // the connection serves more requests
			}
			return nil
		default:
			return x.failed(pdflow.CodeStreamBroken, "the engine broke the response", err)
		}
	}
}

// asAsked is a response's body with the name of the model that the client has asked for. An error has been rewritten
// already.
func (x *passing) asAsked(resp *http.Response) io.Reader {
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	switch {
	case x.models == nil || resp.StatusCode >= 400 || resp.Header.Get("Content-Encoding") != "":
	case isStream(resp.Header):
		put := x.models.PutBack(x.asked)
		delete(resp.Header, "Content-Length")
		return sse.NewRewriter(resp.Body, true, modelname.Mark, func(data []byte) ([]byte, error) {
			return put(data), nil
		})
	case media == "application/json":
		delete(resp.Header, "Content-Length")
		return x.models.Reader(resp.Body, x.asked)
	}
	return resp.Body
}

// failed says why the engine's side failed.
func (x *passing) failed(code pdflow.Code, message string, err error) *pdflow.Error {
	te, _ := errors.AsType[*transport.Error](err)
	switch left := x.r.Context().Err(); {
	case left != nil && !errors.Is(left, context.DeadlineExceeded):
		return x.note(&pdflow.Error{Code: pdflow.CodeClientGone, Message: "the client left", Err: err})
	case left != nil: // a limit of the host's own, which is no fault of the engine
		return x.note(&pdflow.Error{Code: pdflow.CodeTimeout, Message: "the time for this request is over", Err: err})
	case errors.Is(context.Cause(x.ctx), errSilent), te != nil && te.Timeout():
		code, message = pdflow.CodeTimeout, "the engine did not answer in time"
	}
	return x.note(&pdflow.Error{Code: code, Leg: pdflow.LegDecode, Endpoint: x.outcome.Decode.Endpoint,
		Message: message, Err: err})
}

// note notes an error for the picker.
func (x *passing) note(e *pdflow.Error) *pdflow.Error {
	x.outcome.Err, x.outcome.Decode.Err = e, e
	return e
}

// lastWords are the last bytes of a response that is cut.
func (x *passing) lastWords(e *pdflow.Error) []byte {
	object := &memory{header: http.Header{}}
	e.Send(object, x.r)
	messages := strings.HasPrefix(x.r.URL.Path, connector.APIMessages.Path())
	return cut.Words(object.Bytes(), isStream(x.w.Header()), messages)
}

func isStream(h http.Header) bool {
	return strings.HasPrefix(strings.ToLower(h.Get("Content-Type")), "text/event-stream")
}

// memory is a ResponseWriter that keeps a body.
type memory struct {
	bytes.Buffer
	header http.Header
}

func (m *memory) Header() http.Header { return m.header }
func (m *memory) WriteHeader(int)     {}
