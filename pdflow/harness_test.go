// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// netHTTP makes the tests run over net/http's client.
var netHTTP = os.Getenv("PDKIT_TEST_HTTP_CLIENT") == "nethttp"

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pd is a gateway in front of engines that hold and move KV.
type pd struct {
	t    *testing.T
	p, d *enginesim.Engine
	flow *pdflow.Flow
	url  string
	seen *outcomes
}

// outcomes collects what the flow says about its attempts.
type outcomes struct {
	mu  sync.Mutex
	all []pdflow.Outcome
}

func (o *outcomes) SessionEnd(_ context.Context, x *pdflow.Outcome) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.all = append(o.all, *x)
}

func (o *outcomes) list() []pdflow.Outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]pdflow.Outcome(nil), o.all...)
}

type setup struct {
	prefill, decode enginesim.Config
	conn            connector.KVConnector
	opts            []pdflow.Option
	more            []discovery.Endpoint // further endpoints
	noEndpoints     bool
}

// start starts a pair of engines and a gateway for them. At the test's end everything is stopped.
func start(t *testing.T, s setup) *pd {
	t.Helper()
	p, d, err := enginesim.Pair(s.prefill, s.decode)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(); _ = d.Close() })
	var eps []discovery.Endpoint
	if !s.noEndpoints {
		eps = append(eps, endpoint(t, p.URL(), discovery.RolePrefill), endpoint(t, d.URL(), discovery.RoleDecode))
	}
	x := &pd{t: t, p: p, d: d}
	x.flow, x.seen = newFlow(t, s.conn, append(eps, s.more...), s.opts...)
	x.url = serve(t, x.flow)
	return x
}

// atOwnPorts is an engine's configuration with ports that nobody else gets while the engine is down.
func atOwnPorts(t *testing.T, c enginesim.Config) enginesim.Config {
	t.Helper()
	for _, address := range []*string{&c.Listen, &c.SideChannel} {
		port, err := freeport.One()
		require.NoError(t, err)
		*address = "127.0.0.1:" + port
	}
	return c
}

func newFlow(t *testing.T, c connector.KVConnector, eps []discovery.Endpoint, opts ...pdflow.Option) (*pdflow.Flow,
	*outcomes) {
	t.Helper()
	if c == nil {
		var err error
		c, err = nixl.New(nil)
		require.NoError(t, err)
	}
	tr := transport.New(&transport.Options{NetHTTP: netHTTP})
	seen := &outcomes{}
	flow, err := pdflow.New(c, pick.New(setOf(t, eps...), pick.RoundRobin()),
		append([]pdflow.Option{pdflow.WithTransport(tr),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: seen.SessionEnd}),
			pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond}),
			pdflow.WithoutPickWait()}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		require.NoError(t, flow.Shutdown(ctx), "a request was left in flight")
		tr.Close()
	})
	return flow, seen
}

// setOf is a set that knows these endpoints.
func setOf(t *testing.T, eps ...discovery.Endpoint) *discovery.Set {
	t.Helper()
	set, err := static.NewSet(eps...)
	require.NoError(t, err)
	return set
}

func endpoint(t *testing.T, url string, role discovery.Role) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	return e
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}

var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true}}

type reply struct {
	status int
	header http.Header
	body   string
	err    error // of reading the body
}

func post(t *testing.T, url, path, body string, header ...string) reply {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, url+path, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(b), err}
}

// text puts a response's text together, streamed or not, for chat and completions.
func (r reply) text(t *testing.T) string {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, 200, r.status, r.body)
	type choice struct {
		Text    string
		Message struct{ Content string }
		Delta   struct{ Content string }
	}
	var out strings.Builder
	add := func(b []byte) {
		var a struct{ Choices []choice }
		require.NoError(t, json.Unmarshal(b, &a), "%s", b)
		for _, c := range a.Choices {
			out.WriteString(c.Text + c.Message.Content + c.Delta.Content)
		}
	}
	if !strings.HasPrefix(r.header.Get("Content-Type"), "text/event-stream") {
		add([]byte(r.body))
		return out.String()
	}
	done := false
	for line := range strings.Lines(r.body) {
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !ok {
			continue
		}
		if done = data == "[DONE]"; !done {
			add([]byte(data))
		}
	}
	require.True(t, done, "the stream has no [DONE]: %s", r.body)
	return out.String()
}

// fault reads the error object of a response and checks its shape and that it tells nothing it must not.
func (r reply) fault(t *testing.T, engines ...*enginesim.Engine) (message, code string) {
	t.Helper()
	require.NoError(t, r.err)
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	require.NotEmpty(t, r.header.Get("X-Request-Id"))
	var e struct {
		Error struct {
			Message, Type *string
			Param         any
			Code          any
		}
	}
	require.NoError(t, json.Unmarshal([]byte(r.body), &e), r.body)
	require.NotNil(t, e.Error.Message, r.body)
	require.NotNil(t, e.Error.Type, r.body)
	for _, engine := range engines {
		require.NotContains(t, r.body, strings.TrimPrefix(engine.URL(), "http://"),
			"an engine's address went to the client")
	}
	c, _ := e.Error.Code.(string)
	return *e.Error.Message, c
}

func completion(prompt string, more string) string {
	b, _ := json.Marshal(prompt)
	var buf bytes.Buffer
	buf.WriteString(`{"model":"tiny","prompt":` + string(b) + `,"max_tokens":16,"temperature":0`)
	if more != "" {
		buf.WriteString("," + more)
	}
	buf.WriteString("}")
	return buf.String()
}

// idle waits until both engines serve nothing.
func (x *pd) idle() {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(x.t, x.p.WaitIdle(ctx))
	require.NoError(x.t, x.d.WaitIdle(ctx))
}

// alone asks a fresh lone engine for the text that a request must have.
func alone(t *testing.T, path, body string) string {
	t.Helper()
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer e.Close()
	return post(t, e.URL(), path, body).text(t)
}

var longPrompt = strings.Repeat("The quick brown fox jumps over the lazy dog. ", 8)

// taken takes a step as bytes.
func taken(step *pdflow.Step) ([]byte, error) {
	req, err := step.Take()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(req.Body)
}

// codeOf returns the code of an error of the flow's, "" of another or of none.
func codeOf(err error) pdflow.Code {
	if e, ok := errors.AsType[*pdflow.Error](err); ok && e != nil {
		return e.Code
	}
	return ""
}

func newMux(t testing.TB, opts ...pdflow.Option) *pdflow.Mux {
	t.Helper()
	m, err := pdflow.NewMux(opts...)
	require.NoError(t, err)
	return m
}

func logsTo(l *slog.Logger) pdflow.Option { return pdflow.WithTelemetry(pdflow.Telemetry{Logger: l}) }

func metered(mp metric.MeterProvider) pdflow.Option {
	return pdflow.WithTelemetry(pdflow.Telemetry{MeterProvider: mp})
}

func traced(tp trace.TracerProvider) pdflow.Option {
	return pdflow.WithTelemetry(pdflow.Telemetry{TracerProvider: tp})
}

var usage = pdflow.WithTelemetry(pdflow.Telemetry{Usage: true})
