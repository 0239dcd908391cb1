// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/http/httputil"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// passthrough hands requests for other paths to one decode engine: spec.passthrough: decode.
type passthrough struct {
	g         *gateway
	otherwise http.Handler // for paths that may not pass
}

// Engines take orders from whoever reaches them: load this adapter, forget that cache, sleep. So only what serves
// requests may pass, and nothing that begins like an order, at any depth.
var (
	passExact   = []string{"/tokenize", "/detokenize", "/score", "/rerank", "/pooling"}
	orderWords  = []string{"abort", "reset", "sleep", "wake", "is_sleeping", "load", "unload", "start_", "stop_", "pause", "resume", "scale", "update", "init", "collective", "flush", "release", "set_", "server_", "destroy"}
	passMethods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete}
	// engineHeaders are the headers of an engine's response that the client gets.
	engineHeaders = []string{"Content-Type", "Content-Length", "Retry-After"}
)

// passes reports whether a path may go to an engine. Any spelling that an engine might read as another path (encoded
// bytes, dots, doubled slashes, a slash at the end, parameters) does not.
func passes(r *http.Request) bool {
	p := r.URL.Path
	if r.URL.EscapedPath() != p || path.Clean(p) != p {
		return false
	}
	for _, c := range p {
		plain := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.ContainsRune("/-_.:", c)
		if !plain {
			return false
		}
	}
	known := strings.HasPrefix(p, "/v1/")
	for _, exact := range passExact {
		known = known || p == exact
	}
	for segment := range strings.SplitSeq(strings.ToLower(p), "/") {
		for _, word := range orderWords {
			if strings.HasPrefix(strings.ReplaceAll(segment, "-", "_"), word) {
				return false
			}
		}
	}
	return known
}

func (p *passthrough) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	allowed := false
	for _, m := range passMethods {
		allowed = allowed || r.Method == m
	}
	if !allowed || !passes(r) {
		p.otherwise.ServeHTTP(w, r)
		return
	}
	id := pdflow.RequestID(r.Header)
	w.Header().Set(headerRequestID, id)
	closeAfterChunks(w, r)
	if p.g.draining.Load() {
		pdflow.WriteError(w, r, &pdflow.Error{Code: pdflow.CodeDraining, Message: "shutting down", RetryAfter: time.Second})
		return
	}
	body, model, fail := p.read(w, r)
	if fail != nil {
		pdflow.WriteError(w, r, fail)
		return
	}
	m := p.g.find(model)
	if m == nil {
		pdflow.WriteError(w, r, &pdflow.Error{Code: pdflow.CodeNotFound, Param: "model", Message: "no such model is served here"})
		return
	}
	p.send(w, r, m, body, id)
}

// read reads the body whole and removes what no client may set. Only JSON passes: what another form carries could not
// be looked through.
func (p *passthrough) read(w http.ResponseWriter, r *http.Request) (body []byte, model string, fail *pdflow.Error) {
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Now().Add(time.Minute))
	defer func() {
		if fail == nil { // else the deadline bounds what is left of the body
			_ = rc.SetReadDeadline(time.Time{})
		}
	}()
	limit := p.g.cfg.gateway.MaxBodyBytes
	body, err := io.ReadAll(io.LimitReader(r.Body, limit+1))
	switch {
	case err != nil:
		fail = &pdflow.Error{Code: pdflow.CodeInvalid, Message: "the body could not be read to its end", Err: err}
	case int64(len(body)) > limit:
		fail = &pdflow.Error{Code: pdflow.CodeTooLarge, Message: "the body is larger than this gateway takes"}
	case len(body) == 0:
		return nil, "", nil
	default:
		ct, _, _ := mime.ParseMediaType(r.Header.Get("Content-Type"))
		encoding := r.Header.Get("Content-Encoding")
		if ct != "application/json" || encoding != "" && encoding != "identity" {
			fail = &pdflow.Error{Code: pdflow.CodeMediaType, Message: "Content-Type must be application/json, without Content-Encoding"}
		}
	}
	if fail != nil {
		w.Header().Set("Connection", "close")
		return nil, "", fail
	}
	req, err := connector.ParseRequest(connector.APIUnknown, body)
	if err == nil {
		body, err = connector.NewLeg(req).Body()
	}
	if err != nil {
		fail = &pdflow.Error{Code: pdflow.CodeInvalid, Message: err.Error(), Err: err}
		if re, ok := errors.AsType[*connector.RequestError](err); ok {
			fail.Param, fail.Message = re.Param, re.Message
		}
		return nil, "", fail
	}
	return body, req.Model, nil
}

// send sends the request to a decode engine and streams its answer.
func (p *passthrough) send(w http.ResponseWriter, r *http.Request, m *model, body []byte, id string) {
	choice, err := m.picker.Pick(r.Context(), &pdflow.PickInput{Header: r.Header, RequestID: id, Attempt: 1, Single: true})
	if err != nil {
		pdflow.WriteError(w, r, &pdflow.Error{Code: pdflow.CodeNoEndpoint, Message: "no engine is ready for this model", RetryAfter: time.Second, Err: err})
		return
	}
	outcome := &pdflow.Outcome{Mode: pdflow.ModeAggregated, Decode: pdflow.LegOutcome{Leg: pdflow.LegDecode, Endpoint: choice.Decode.ID}, Final: true}
	defer func() {
		if choice.Done != nil {
			choice.Done(outcome)
		}
	}()
	limits := m.Main.Timeouts()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	watch := newWatchdog(cancel, limits.Decode, limits.Idle)
	defer watch.stop()
	proxy := &httputil.ReverseProxy{
		Rewrite:        func(pr *httputil.ProxyRequest) { aim(pr, choice.Decode, body, id) },
		Transport:      m.legs,
		FlushInterval:  -1,
		ErrorLog:       slog.NewLogLogger(p.g.log.Handler(), slog.LevelDebug),
		ModifyResponse: func(resp *http.Response) error { return watch.answer(resp) },
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if fail := passError(ctx, err); fail != nil {
				fail.Endpoint = choice.Decode.ID
				outcome.Err = fail
				pdflow.WriteError(w, r, fail)
			}
		},
	}
	w.Header().Set("X-PD-Mode", string(pdflow.ModeAggregated))
	proxy.ServeHTTP(&patientWriter{ResponseWriter: w}, r.WithContext(ctx))
}

// aim makes the engine's request of the client's.
func aim(pr *httputil.ProxyRequest, e discovery.Endpoint, body []byte, id string) {
	out := pr.Out
	target := *e.URL
	target.Path += out.URL.Path
	target.RawQuery = out.URL.RawQuery
	out.URL, out.Host = &target, ""
	out.Header, out.TransferEncoding, out.Trailer = pdflow.EngineHeader(pr.In.Header, id), nil, nil
	out.Body, out.ContentLength = http.NoBody, 0
	if len(body) > 0 {
		out.Body, out.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
}

var (
	errRedirect = errors.New("the engine redirects")
	errSlow     = errors.New("the engine is silent")
)

// passError is what the client is told of an engine that could not answer, nil if the client itself has left.
func passError(ctx context.Context, err error) *pdflow.Error {
	var te *transport.Error
	switch {
	case errors.Is(context.Cause(ctx), errSlow) || errors.As(err, &te) && te.Timeout():
		return &pdflow.Error{Code: pdflow.CodeTimeout, Leg: pdflow.LegDecode, Message: "the engine did not answer in time", Err: err}
	case ctx.Err() != nil:
		return nil //nolint:nilerr // nobody is there to be told
	}
	return &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode, Message: "the engine could not be reached or did not answer", Err: err}
}

// watchdog cancels a request whose engine is silent for too long: until its head, then between two reads. 0 is no limit.
type watchdog struct {
	mu    sync.Mutex
	timer *time.Timer
	idle  time.Duration
}

func newWatchdog(cancel context.CancelCauseFunc, first, idle time.Duration) *watchdog {
	d := &watchdog{idle: idle}
	if first == 0 {
		first = 1 << 62
	}
	d.timer = time.AfterFunc(first, func() { cancel(errSlow) })
	return d
}

// answer takes the engine's head.
func (d *watchdog) answer(resp *http.Response) error {
	if resp.StatusCode >= 300 && resp.StatusCode < 400 && resp.StatusCode != http.StatusNotModified {
		return errRedirect
	}
	header := http.Header{}
	for _, name := range engineHeaders {
		if v := resp.Header[name]; len(v) > 0 {
			header[name] = v
		}
	}
	resp.Header, resp.Trailer = header, nil
	resp.Body = &watchedBody{ReadCloser: resp.Body, dog: d, resp: resp}
	d.feed()
	return nil
}

func (d *watchdog) feed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.idle == 0 {
		d.timer.Stop()
		return
	}
	d.timer.Reset(d.idle)
}

func (d *watchdog) stop() { d.timer.Stop() }

type watchedBody struct {
	io.ReadCloser
	dog  *watchdog
	resp *http.Response
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.dog.feed()
	b.resp.Trailer = nil // filled in at the body's end, and not for clients
	return n, err
}

// patientWriter gives each write to the client a deadline: a client that has vanished without a word must not hold an
// engine for a quarter of an hour.
type patientWriter struct{ http.ResponseWriter }

const writeTimeout = 30 * time.Second

func (w *patientWriter) Write(p []byte) (int, error) {
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTimeout))
	return w.ResponseWriter.Write(p)
}

// Unwrap lets the proxy flush.
func (w *patientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
