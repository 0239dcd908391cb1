// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// unknown knows no model.
func unknown(string) (*passthrough.Engines, *pdflow.Error) { return nil, nil }

type find = func(model string) (*passthrough.Engines, *pdflow.Error)

func handler(t *testing.T, find find, o *passthrough.Options) *passthrough.Handler {
	t.Helper()
	h, err := passthrough.New(find, o)
	require.NoError(t, err)
	return h
}

// engine is a picker of one engine, and the way to it.
type engine struct {
	*passthrough.Engines
	answer   func(r *http.Request) (*http.Response, error)
	mu       sync.Mutex
	requests []*http.Request
	bodies   []string
	picks    []*pdflow.PickInput
	outcomes []*pdflow.Outcome
	role     discovery.Role // of the engine; 0 is decode
	bound    []connector.Serving
}

func newEngine(t *testing.T, answer func(r *http.Request) (*http.Response, error)) *engine {
	t.Helper()
	e := &engine{answer: answer}
	e.Engines = &passthrough.Engines{Picker: e, Transport: e}
	return e
}

func (e *engine) find(string) (*passthrough.Engines, *pdflow.Error) { return e.Engines, nil }

func (e *engine) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	d, err := discovery.New("http://engine:1/base", cmp.Or(e.role, discovery.RoleDecode))
	e.mu.Lock()
	defer e.mu.Unlock()
	e.picks = append(e.picks, in)
	return pdflow.Pick{Decode: d, Done: e.done}, err
}

func (*engine) Changed() <-chan struct{} { return nil }

func (*engine) Ready(*pdflow.PickInput) error { return nil }

func (e *engine) Bind(_ connector.KVConnector, serving connector.Serving) pdflow.Picker {
	e.bound = append(e.bound, serving)
	return e
}

func (e *engine) done(o *pdflow.Outcome) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.outcomes = append(e.outcomes, o)
}

func (e *engine) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	e.mu.Lock()
	e.requests, e.bodies = append(e.requests, r), append(e.bodies, string(body))
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return e.answer(r)
}

func response(status int, contentType string, body io.Reader) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {contentType}, "Server": {"uvicorn"}},
		Body: io.NopCloser(body), Trailer: http.Header{"X-Inside": {"1"}}}
}

func answers(status int, body string) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) {
		return response(status, "application/json", strings.NewReader(body)), nil
	}
}

// outcome returns the outcome that the picker got. The test fails if it got none or several.
func (e *engine) outcome(t *testing.T) *pdflow.Outcome {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	require.Len(t, e.outcomes, 1)
	o := e.outcomes[0]
	assert.True(t, o.Final)
	assert.Equal(t, pdflow.ModeAggregated, o.Mode)
	assert.Equal(t, "engine:1/base", o.Decode.Endpoint)
	assert.False(t, o.Decode.End.IsZero())
	return o
}

func post(path, body string, header ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

func do(h http.Handler, r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestARequestPassesWithoutWhatNoClientMaySet(t *testing.T) {
	e := newEngine(t, answers(http.StatusAccepted, `{"tokens":[1]}`))
	e.Members, e.ForwardHeaders = []string{"kv_ticket", "extra.ticket"}, []string{"X-Tenant", "Cookie"}
	w := do(handler(t, e.find, nil), post("/tokenize?x=1",
		`{"model":"m", "kv_ticket":"t","prompt":"x","kv_transfer_params":{},"extra":{"ticket":1,"a":2}}`,
		"X-Request-Id", "mine", "Authorization", "Bearer k", "Cookie", "a=b", "Connection", "X-Mine", "X-Mine", "1",
		"X-Api-Key", "sk", "Anthropic-Version", "v", "X-Tenant", "t"))
	assert.Equal(t, http.StatusAccepted, w.Code)
	assert.Equal(t, `{"tokens":[1]}`, w.Body.String())
	assert.Equal(t, http.Header{"Content-Type": {"application/json"}, "X-Pd-Mode": {"aggregated"},
		"X-Request-Id": {"mine"}}, w.Header())
	require.Len(t, e.requests, 1)
	assert.Equal(t, "http://engine:1/base/tokenize?x=1", e.requests[0].URL.String())
	assert.Equal(t, `{"model":"m", "prompt":"x","extra":{"a":2}}`, e.bodies[0])
	assert.Equal(t, "Bearer k", e.requests[0].Header.Get("Authorization"))
	assert.Equal(t, "mine", e.requests[0].Header.Get("X-Request-Id"))
	assert.Equal(t, "sk v t", e.requests[0].Header.Get("X-Api-Key")+" "+
		e.requests[0].Header.Get("Anthropic-Version")+" "+e.requests[0].Header.Get("X-Tenant"))
	for _, name := range []string{"Cookie", "X-Mine", "Connection", "X-Forwarded-For"} {
		assert.Empty(t, e.requests[0].Header.Values(name), name)
	}
	assert.Equal(t, "m", e.picks[0].Request.Model, "pickers may choose by model")
	assert.True(t, e.picks[0].Single)
	assert.Equal(t, "mine", e.picks[0].RequestID)
	o := e.outcome(t)
	assert.Nil(t, o.Err)
	assert.Equal(t, http.StatusAccepted, o.Decode.Status)
	assert.EqualValues(t, 14, o.Decode.ResponseBytes)
}

func TestARequestWithoutABodyPasses(t *testing.T) {
	e := newEngine(t, answers(http.StatusNotModified, ""))
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodDelete, http.MethodPost} {
		path := "/v1/responses/resp_1"
		if method == http.MethodPost {
			path += "/cancel"
		}
		w := do(handler(t, e.find, nil), httptest.NewRequest(method, path, nil))
		assert.Equal(t, http.StatusNotModified, w.Code, method)
		last := e.requests[len(e.requests)-1]
		assert.Equal(t, method, last.Method)
		assert.Zero(t, last.ContentLength)
	}
}

func TestRequestsThatAreRefused(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, "{}"))
	finds := func(model string) (*passthrough.Engines, *pdflow.Error) {
		switch model {
		case "m":
			return e.Engines, nil
		case "draining":
			return nil, &pdflow.Error{Code: pdflow.CodeDraining, RetryAfter: time.Second}
		case "half":
			return &passthrough.Engines{Picker: e}, nil
		}
		return nil, nil
	}
	e.Members = []string{"a.b"}
	h := handler(t, finds, &passthrough.Options{MaxBody: 100, RequestID: func(*http.Request) string { return "own" }})
	for name, c := range map[string]struct {
		body, contentType string
		status            int
		code              pdflow.Code
	}{
		"not JSON":                {`{`, "application/json", 400, pdflow.CodeInvalid},
		"a list":                  {`[]`, "application/json", 400, pdflow.CodeInvalid},
		"model a number":          {`{"model":1}`, "application/json", 400, pdflow.CodeInvalid},
		"model twice":             {`{"model":"m","model":"n"}`, "application/json", 400, pdflow.CodeInvalid},
		"what is removed, twice":  {`{"model":"m","a":{"b":1,"b":2}}`, "application/json", 400, pdflow.CodeInvalid},
		"an unknown model":        {`{"model":"x"}`, "application/json", 404, pdflow.CodeNotFound},
		"no model":                {`{}`, "application/json", 404, pdflow.CodeNotFound},
		"an error of the host's":  {`{"model":"draining"}`, "application/json", 503, pdflow.CodeDraining},
		"engines without a way":   {`{"model":"half"}`, "application/json", 500, pdflow.CodeInternal},
		"too large":               {strings.Repeat(" ", 101), "application/json", 413, pdflow.CodeTooLarge},
		"a form":                  {`model=m`, "application/x-www-form-urlencoded", 415, pdflow.CodeMediaType},
		"a body without its type": {`{}`, "", 415, pdflow.CodeMediaType},
	} {
		w := do(h, post("/v1/embeddings", c.body, "Content-Type", c.contentType))
		assert.Equal(t, c.status, w.Code, name)
		assert.Contains(t, w.Body.String(), `"code":"`+string(c.code)+`"`, name)
		assert.Equal(t, "own", w.Header().Get("X-Request-Id"), name)
	}
	w := do(h, post("/v1/embeddings", `{"model":"m"}`, "Content-Encoding", "gzip"))
	assert.Equal(t, http.StatusUnsupportedMediaType, w.Code)
	w = do(h, post("/v1/messages/count_tokens", `[]`))
	assert.Contains(t, w.Body.String(), `{"error":{`, w.Body)
	assert.Contains(t, w.Body.String(), `"type":"error"`, "in the shape of the client's API")
	assert.Empty(t, e.requests)
	_, err := passthrough.New(nil, nil)
	require.Error(t, err)
	_, err = passthrough.New(finds, &passthrough.Options{MaxBody: -1})
	require.Error(t, err)
	_, err = passthrough.New(finds, &passthrough.Options{Timeouts: config.Timeouts{Idle: -5}})
	require.Error(t, err)
}

func TestFaultsOfTheEngine(t *testing.T) {
	for name, answer := range map[string]func(*http.Request) (*http.Response, error){
		"cannot be reached": func(*http.Request) (*http.Response, error) {
			return nil, errors.New("dial 10.0.0.1: refused")
		},
		"redirects": answers(http.StatusTemporaryRedirect, ""),
		"switches":  answers(http.StatusSwitchingProtocols, ""),
		"partial":   answers(http.StatusPartialContent, "{}"),
		"is compressed": func(*http.Request) (*http.Response, error) { // what no client may see cannot be found in it
			r := response(200, "text/event-stream", strings.NewReader("\x1f\x8b10.0.0.1"))
			r.Header.Set("Content-Encoding", "gzip")
			return r, nil
		},
	} {
		e := newEngine(t, answer)
		w := do(handler(t, e.find, nil), post("/tokenize", `{}`))
		assert.Equal(t, http.StatusBadGateway, w.Code, name)
		assert.NotContains(t, w.Body.String(), "10.0.0.1", name)
		assert.Equal(t, "aggregated", w.Header().Get("X-Pd-Mode"), name)
		o := e.outcome(t)
		require.NotNil(t, o.Err, name)
		assert.True(t, o.Err.EngineFault() && o.Err.Endpoint == "engine:1/base", "the picker spares it for a while")
	}
	for body, want := range map[string]string{
		`{"error":"busy"}`: `"code":null,"message":"busy"`,
		`{"error":{"message":"engine: full, http://10.0.0.7:1/","code":7,"peer":"10.0.0.7"}}`: `"code":7,"message":"` +
			`(address): full, (address)"`,
		`<html>10.0.0.7</html>`: `"code":"decode_rejected","message":"the engine refused the request"`,
	} {
		e := newEngine(t, answers(http.StatusServiceUnavailable, body))
		w := do(handler(t, e.find, nil), post("/tokenize", `{}`))
		assert.Equal(t, http.StatusServiceUnavailable, w.Code)
		assert.Contains(t, w.Body.String(), want, "its own errors pass, without addresses")
		assert.NotContains(t, w.Body.String(), "10.0.0.7")
	}
	e := newEngine(t, answers(http.StatusBadRequest, `{"type":"error","error":{"type":"x_error","message":"engine"}}`))
	w := do(handler(t, e.find, nil), post("/v1/messages/count_tokens", `{}`))
	assert.JSONEq(t, `{"type":"error","error":{"type":"x_error","message":"(address)"}}`, w.Body.String())
}

// An error within a stream tells as little as one without, and engines of the set that the request never saw are not
// named either.
func TestFaultsWithinAStream(t *testing.T) {
	const token = `data: {"text":"a"}` + "\n\n"
	e := newEngine(t, func(*http.Request) (*http.Response, error) {
		return response(200, "text/event-stream", strings.NewReader(token+
			"event: error\ndata: { \"error\" : {\"message\":\"no KV at decode-9\"}}\n\n"+token)), nil
	})
	e.Set = (&fleet{t: t}).engines("decode@decode-9").Set
	w := do(handler(t, e.find, nil), post("/v1/audio/speech", `{"model":"m"}`))
	assert.Equal(t, token+"event: error\ndata: "+
		`{"error":{"code":null,"message":"no KV at (address)","param":null,"type":"api_error"}}`+"\n\n"+token,
		w.Body.String())
}

func TestAnEngineThatIsSilent(t *testing.T) {
	for name, c := range map[string]struct {
		limits config.Timeouts
		after  time.Duration
		status int
	}{
		"for longer than Decode":          {config.Timeouts{Decode: 3 * time.Second}, 3 * time.Second, 504},
		"for longer than the default":     {config.Timeouts{}, 600 * time.Second, 504},
		"for long, and there is no limit": {config.Timeouts{Decode: config.None}, time.Hour, 200},
	} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine(t, func(r *http.Request) (*http.Response, error) {
				select {
				case <-r.Context().Done():
					return nil, r.Context().Err()
				case <-time.After(time.Hour):
					return answers(200, "{}")(r)
				}
			})
			e.Timeouts = c.limits
			begun := time.Now()
			w := do(handler(t, e.find, nil), post("/tokenize", `{}`))
			assert.Equal(t, c.status, w.Code, name)
			assert.Equal(t, c.after, time.Since(begun), name)
			if o := e.outcome(t); c.status != 200 {
				assert.True(t, o.Err.EngineFault(), name)
			}
		})
	}
}

// pieces is a body whose reads take time, ended by err.
type pieces struct {
	ctx   context.Context
	waits []time.Duration
	err   error
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.waits) == 0 {
		return 0, p.err
	}
	select {
	case <-p.ctx.Done():
		return 0, p.ctx.Err()
	case <-time.After(p.waits[0]):
		p.waits = p.waits[1:]
		return copy(b, "data: x\n\n"), nil
	}
}

func streams(err error, waits ...time.Duration) func(r *http.Request) (*http.Response, error) {
	return func(r *http.Request) (*http.Response, error) {
		return response(200, "text/event-stream", &pieces{r.Context(), waits, err}), nil
	}
}

func TestSilenceBetweenPieces(t *testing.T) {
	const second = time.Second
	for name, c := range map[string]struct {
		idle   time.Duration
		waits  []time.Duration
		broken pdflow.Code
	}{
		"each within the limit":       {2 * second, []time.Duration{second, second, second}, ""},
		"one is late":                 {2 * second, []time.Duration{second, 3 * second, second}, pdflow.CodeTimeout},
		"one is late, without limits": {config.None, []time.Duration{second, time.Hour, second}, ""},
	} {
		synctest.Test(t, func(t *testing.T) {
			e := newEngine(t, streams(io.EOF, c.waits...))
			e.Timeouts.Idle, e.Timeouts.Silence = c.idle, second
			w := do(handler(t, e.find, nil), post("/v1/embeddings", `{}`))
			assert.Equal(t, c.broken != "", strings.Contains(w.Body.String(), `"code":"`+string(c.broken)+`"`), name)
			if o := e.outcome(t); c.broken != "" {
				assert.Equal(t, c.broken, o.Err.Code, name)
			} else {
				assert.Nil(t, o.Err, name)
			}
		})
	}
}

// knowing is a picker that knows how its engines are.
type knowing struct {
	*engine
	well bool
}

func (k *knowing) Bind(connector.KVConnector, connector.Serving) pdflow.Picker { return k }
func (k *knowing) EngineHealth(id string) (well, known bool)                   { return k.well, id != "" }

// The stream of a response that a client asks for once more (GET /v1/responses/{id}?stream=true) is as silent as the
// first one: a tool parser holds arguments back, and hidden reasoning sends nothing.
func TestAnEngineThatIsWellMayBeSilent(t *testing.T) {
	const limit = 2 * time.Second
	status := func(code int) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) { return response(code, "", http.NoBody), nil }
	}
	for name, c := range map[string]struct {
		silent time.Duration
		health func(*http.Request) (*http.Response, error)
		knows  map[bool]bool // of the picker: its answer
		cut    time.Duration // 0: the stream is whole
		probes int32
	}{
		"well":         {5 * limit / 2, status(200), nil, 0, 2},
		"no /health":   {3 * limit / 2, status(404), nil, 0, 1},
		"ill":          {5 * limit, status(500), nil, limit, 1},
		"for too long": {6 * limit, status(200), nil, 5 * limit, 4},
		"frozen": {5 * limit, func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}, nil, limit + 500*time.Millisecond, 1},
		"a transport that panics": {5 * limit, func(*http.Request) (*http.Response, error) { panic("boom") }, nil,
			limit, 1},
		"known to be well": {5 * limit / 2, status(500), map[bool]bool{true: true}, 0, 0},
		"known to be ill":  {5 * limit / 2, status(200), map[bool]bool{true: false}, limit, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var probes atomic.Int32
				e := newEngine(t, func(r *http.Request) (*http.Response, error) {
					if r.URL.Path == "/base/health" {
						probes.Add(1)
						assert.Equal(t, "Bearer key", r.Header.Get("Authorization"), "engines may want it here, too")
						return c.health(r)
					}
					return streams(io.EOF, time.Second, c.silent)(r)
				})
				e.Timeouts = config.Timeouts{Idle: limit, Silence: 5 * limit, HealthCheck: time.Second / 2}
				if well, known := c.knows[true]; known {
					e.Picker = &knowing{e, well}
				}
				r := httptest.NewRequest(http.MethodGet, "/v1/responses/r?stream=true", nil)
				r.Header.Set("Authorization", "Bearer key")
				begun := time.Now()
				w := do(handler(t, e.find, nil), r)
				assert.Equal(t, c.probes, probes.Load())
				if c.cut == 0 {
					assert.Equal(t, "data: x\n\ndata: x\n\n", w.Body.String())
					assert.Nil(t, e.outcome(t).Err)
					return
				}
				assert.Equal(t, c.cut+time.Second, time.Since(begun))
				assert.Equal(t, pdflow.CodeTimeout, e.outcome(t).Err.Code)
			})
		})
	}
}

// slow is a client that takes its time, as long as its deadline allows.
type slow struct {
	*httptest.ResponseRecorder
	takes    time.Duration
	deadline time.Time
}

func (s *slow) SetWriteDeadline(d time.Time) error {
	s.deadline = d
	return nil
}

func (s *slow) Write(b []byte) (int, error) {
	if s.deadline.IsZero() || time.Now().Add(s.takes).Before(s.deadline) {
		time.Sleep(s.takes)
		return s.ResponseRecorder.Write(b)
	}
	time.Sleep(time.Until(s.deadline))
	return 0, errors.New("i/o timeout")
}

func TestASlowClientIsNoSilenceOfTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, streams(io.EOF, time.Second, time.Second))
		e.Timeouts.Idle = 2 * time.Second
		w := &slow{ResponseRecorder: httptest.NewRecorder(), takes: 10 * time.Second}
		handler(t, e.find, nil).ServeHTTP(w, post("/v1/embeddings", `{}`))
		assert.Nil(t, e.outcome(t).Err)
		assert.Equal(t, "data: x\n\ndata: x\n\n", w.Body.String())
		assert.True(t, w.deadline.IsZero(), "the connection serves more requests")
	})
}

// resets is a client over HTTP/2: net/http resets the stream when the write deadline passes, written or not.
type resets struct {
	*httptest.ResponseRecorder
	timer *time.Timer
	reset atomic.Bool
}

func (s *resets) SetWriteDeadline(d time.Time) error {
	if s.timer != nil {
		s.timer.Stop()
	}
	if !d.IsZero() {
		s.timer = time.AfterFunc(time.Until(d), func() { s.reset.Store(true) })
	}
	return nil
}

func TestASilentStreamOutlivesItsWriteLimitOverHTTP2(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, streams(io.EOF, time.Second, 50*time.Second))
		e.Timeouts.Write = 30 * time.Second
		w := &resets{ResponseRecorder: httptest.NewRecorder()}
		r := post("/v1/embeddings", `{}`)
		r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/2.0", 2, 0
		handler(t, e.find, nil).ServeHTTP(w, r)
		assert.False(t, w.reset.Load())
		assert.Nil(t, e.outcome(t).Err)
	})
}

func TestAClientThatReadsNothingHoldsNoEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine(t, streams(io.EOF, time.Second, time.Second))
		e.Timeouts.Write = 5 * time.Second
		w := &slow{ResponseRecorder: httptest.NewRecorder(), takes: time.Hour}
		begun := time.Now()
		handler(t, e.find, nil).ServeHTTP(w, post("/v1/embeddings", `{}`))
		assert.Equal(t, 6*time.Second, time.Since(begun))
		o := e.outcome(t)
		assert.Equal(t, pdflow.CodeClientGone, o.Err.Code)
		assert.False(t, o.Err.EngineFault())
	})
}

func TestAClientThatLeavesIsNoFaultOfTheEngine(t *testing.T) {
	for _, begun := range []bool{false, true} {
		ctx, leave := context.WithCancel(t.Context())
		e := newEngine(t, func(r *http.Request) (*http.Response, error) {
			if begun {
				resp, err := streams(io.EOF, time.Nanosecond, time.Hour)(r)
				time.AfterFunc(10*time.Millisecond, leave)
				return resp, err
			}
			leave()
			return nil, r.Context().Err()
		})
		do(handler(t, e.find, nil), post("/v1/embeddings", `{}`).WithContext(ctx))
		o := e.outcome(t)
		assert.Equal(t, pdflow.CodeClientGone, o.Err.Code)
		assert.False(t, o.Err.EngineFault())
	}
}

func TestALimitOfTheHostsOwnIsNoFaultOfTheEngine(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	e := newEngine(t, func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, r.Context().Err()
	})
	w := do(handler(t, e.find, nil), post("/v1/embeddings", `{}`).WithContext(ctx))
	assert.Equal(t, http.StatusGatewayTimeout, w.Code)
	assert.Empty(t, e.outcome(t).Err.Endpoint, "the picker spares nobody")
}

func TestABodyThatDoesNotCome(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, "{}"))
	limits := config.Timeouts{Body: 50 * time.Millisecond}
	s := httptest.NewServer(handler(t, e.find, &passthrough.Options{Timeouts: limits}))
	defer s.Close()
	body, never := io.Pipe()
	defer never.Close()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/tokenize", body)
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	rt := &http.Transport{DisableKeepAlives: true}
	resp, err := rt.RoundTrip(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	assert.Equal(t, http.StatusRequestTimeout, resp.StatusCode)
	assert.True(t, resp.Close)
}

// The largest possible limit works.
func TestABodyWithoutALimit(t *testing.T) {
	e := newEngine(t, func(*http.Request) (*http.Response, error) {
		return response(200, "application/json", strings.NewReader(`{}`)), nil
	})
	h := handler(t, e.find, &passthrough.Options{MaxBody: math.MaxInt64})
	r := httptest.NewRequest(http.MethodPost, "/tokenize", strings.NewReader(`{"prompt":"hi"}`))
	r.Header.Set("Content-Type", "application/json")
	h.ServeHTTP(httptest.NewRecorder(), r)
	require.Equal(t, []string{`{"prompt":"hi"}`}, e.bodies)
}

// If a whole request would crash an engine that can prefill, the handler sends none to such an engine, even if the
// picker chooses it.
func TestDecodeOnlySendsNothingToAnEngineThatCanPrefill(t *testing.T) {
	for role, status := range map[discovery.Role]int{discovery.RoleBoth: 503, discovery.RoleDecode: 200} {
		e := newEngine(t, func(*http.Request) (*http.Response, error) {
			return response(200, "application/json", strings.NewReader("{}")), nil
		})
		e.role, e.DecodeOnly = role, true
		w := do(handler(t, e.find, nil), httptest.NewRequest(http.MethodPost, "/v1/embeddings", nil))
		assert.Equal(t, status, w.Code, role)
		assert.Equal(t, status == 200, len(e.requests) == 1, role)
		do(handler(t, e.find, nil), httptest.NewRequest(http.MethodPost, "/v1/embeddings", nil))
		assert.Equal(t, []connector.Serving{{PrefillPairOnly: true}}, e.bound, "the picker is told, once")
	}
}
