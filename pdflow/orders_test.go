// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// The four orders and the optional abilities, with made-up connectors and engines that are functions.

// fake is a connector whose parts are functions; abilities are added by embedding it.
type fake struct {
	order   connector.Order
	prefill func(*connector.Session, *connector.Leg) error
	decode  func(*connector.Session, *connector.PrefillResult, *connector.Leg) error
	stop    string                  // Traits.Ending.FailureStop
	more    func(*connector.Traits) // further traits; nil: none
}

func (f *fake) Traits() connector.Traits {
	t := connector.Traits{Name: "fake", Order: f.order, APIs: connector.APIs(),
		Ending: connector.Ending{FailureStop: f.stop}}
	if f.more != nil {
		f.more(&t)
	}
	return t
}

func (f *fake) Prefill(_ context.Context, s *connector.Session, l *connector.Leg) error {
	if f.prefill != nil {
		return f.prefill(s, l)
	}
	return nil
}
func (f *fake) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult, l *connector.Leg) error {
	if f.decode != nil {
		return f.decode(s, p, l)
	}
	return nil
}

// scripted is a pair of engines that are functions, behind a flow.
type scripted struct {
	flow   *pdflow.Flow
	url    string
	seen   *outcomes
	pair   pdflow.Pick
	mu     sync.Mutex
	events []string
}

func (x *scripted) log(s string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.events = append(x.events, s)
}

func (x *scripted) all() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.Join(x.events, " ")
}

type handler = func(x *scripted, w http.ResponseWriter, r *http.Request, body string)

func script(t *testing.T, c connector.KVConnector, p, d handler, opts ...pdflow.Option) *scripted {
	t.Helper()
	x := &scripted{}
	engine := func(name string, h handler) string {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			x.log(name)
			h(x, w, r, string(body))
		}))
		s.Config.Protocols = new(http.Protocols)
		s.Config.Protocols.SetHTTP1(true)
		s.Config.Protocols.SetUnencryptedHTTP2(true)
		s.Start()
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		return s.URL
	}
	eps := []discovery.Endpoint{endpoint(t, engine("P", p), discovery.RolePrefill),
		endpoint(t, engine("D", d), discovery.RoleDecode)}
	x.pair = pdflow.Pick{Prefill: eps[0], Decode: eps[1]}
	x.flow, x.seen = newFlow(
		t, c, eps, append([]pdflow.Option{pdflow.WithRetry(config.Retry{MaxAttempts: 1})}, opts...)...,
	)
	x.url = serve(t, x.flow)
	return x
}

func answer(body string) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, body)
	}
}

func status(code int) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) { w.WriteHeader(code) }
}

// gone is an engine that waits until the flow has cancelled the leg.
func gone(x *scripted, w http.ResponseWriter, r *http.Request, _ string) {
	select {
	case <-r.Context().Done():
		x.log("cancelled")
	case <-time.After(20 * time.Second):
		x.log("forgotten")
	}
}

const ok = `{"choices":[{"text":"hi"}]}`

func TestTogetherSendsBothAtOnce(t *testing.T) {
	var arrived sync.WaitGroup
	arrived.Add(2)
	both := func(body string) handler {
		return func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			arrived.Done()
			arrived.Wait() // neither answers before both are there
			answer(body)(x, w, r, b)
		}
	}
	x := script(t, &fake{order: connector.Together}, both(ok), both(ok))
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
}

func TestTogetherHoldsDecodesHeadUntilItsFirstEvent(t *testing.T) {
	headers := make(chan struct{})
	x := script(t, &fake{order: connector.Together},
		func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			<-headers
			w.WriteHeader(422)
		},
		func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			w.Header().Set("Content-Type", "text/event-stream")
			w.WriteHeader(200)
			_ = http.NewResponseController(w).Flush()
			close(headers)
			gone(x, w, r, b)
		})
	require.Equal(t, 422, post(t, x.url, "/v1/completions", completion("a", `"stream":true`)).status,
		"decode's head went out before prefill was known")
}

func TestTogetherCountsDecodesTimeFromPrefillsResponse(t *testing.T) {
	run := func(t *testing.T, p, d response) (time.Duration, error) {
		f := newFakeFleet(t, &fake{order: connector.Together}, "p0 d0", config.Retry{MaxAttempts: 1},
			func(host string, _ int) response { // each phase may take 10 s
				if host == "p0" {
					return p
				}
				return d
			})
		begun := time.Now()
		err := f.do(`{"prompt":"hi"}`)
		return time.Since(begun), err
	}
	synctest.Test(t, func(t *testing.T) {
		_, err := run(t, after(8*time.Second, replies(200)), after(16*time.Second, replies(200)))
		require.NoError(t, err)
		took, err := run(t, replies(200), hangs)
		require.ErrorIs(t, err, pdflow.CodeTimeout)
		require.Equal(t, 10*time.Second, took)
	})
}

// cold is a connector that decodes first.
type cold struct{ fake }

func (*cold) Cold(_ *connector.Session, _ int, head []byte) bool {
	return strings.Contains(string(head), `"cache_threshold"`)
}

func TestDecodeFirst(t *testing.T) {
	for _, stream := range []bool{false, true} {
		warm := false
		d := func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			reason := `"length"`
			if !warm {
				warm, reason = true, `"cache_threshold"`
			}
			body := `{"choices":[{"text":"hi","finish_reason":` + reason + `}]}`
			if stream {
				w.Header().Set("Content-Type", "text/event-stream")
				body = "data: " + body + "\n\ndata: [DONE]\n\n"
			}
			_, _ = io.WriteString(w, body)
		}
		c := &cold{fake{order: connector.DecodeFirst}}
		x := script(t, c, answer(ok), d)
		body := completion("a", "")
		if stream {
			body = completion("a", `"stream":true`)
		}
		require.Equal(t, "hi", post(t, x.url, "/v1/completions", body).text(t))
		require.Equal(t, "D P D", x.all(), "cold: decode, prefill, decode")
		require.Equal(t, "hi", post(t, x.url, "/v1/completions", body).text(t))
		require.Equal(t, "D P D D", x.all(), "warm: decode alone")
	}
}

// asking is a connector whose D requests P's leg by an event.
type asking struct {
	fake
	event chan connector.Event
	done  chan error
}

func (a *asking) Expect(*connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
	return func(ctx context.Context) (connector.Event, error) {
		select {
		case e := <-a.event:
			return e, nil
		case <-ctx.Done():
			return connector.Event{}, ctx.Err()
		}
	}, func(err error) { a.done <- err }
}

func newAsking(o connector.Order) *asking {
	return &asking{fake: fake{order: o}, event: make(chan connector.Event, 1), done: make(chan error, 1)}
}

func TestDecodeThenPrefill(t *testing.T) {
	prefilled := make(chan struct{})
	a := newAsking(connector.DecodeThenPrefill)
	a.prefill = func(s *connector.Session, l *connector.Leg) error {
		l.Params(s.Event.Body)
		return nil
	}
	x := script(t, a,
		func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			require.Contains(t, b, `"kv_transfer_params":{"remote":1}`)
			close(prefilled)
			answer(ok)(x, w, r, b)
		},
		func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
			a.event <- connector.Event{Body: []byte(`{"remote":1}`)}
			<-prefilled
			answer(ok)(x, w, r, b)
		})
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
	require.Equal(t, "D P", x.all())
	require.NoError(t, <-a.done)
}

func TestDecodeThenPrefillWithoutAnEvent(t *testing.T) {
	a := newAsking(connector.DecodeThenPrefill)
	x := script(t, a, answer(ok), answer(ok))
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
	require.Equal(t, "D", x.all(), "D had the prompt, and did not ask")
	require.NoError(t, <-a.done)
}

func TestAnEventBetweenTheLegs(t *testing.T) {
	a := newAsking(connector.PrefillThenDecode)
	x := script(t, a, func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		a.event <- connector.Event{Body: []byte("early")} // before P's own response
		answer(ok)(x, w, r, b)
	}, answer(ok))
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
	require.NoError(t, <-a.done)
}

// late is a connector whose D never asks for the prefill.
type late struct{ fake }

func (*late) Expect(*connector.Session) (func(context.Context) (connector.Event, error), func(error)) {
	return func(context.Context) (connector.Event, error) { return connector.Event{}, context.DeadlineExceeded },
		func(error) {}
}

func TestAnEventThatDoesNotComeIsATimeout(t *testing.T) {
	x := script(t, &late{}, answer(ok), answer(ok))
	require.Equal(t, 504, post(t, x.url, "/v1/completions", completion("a", "")).status)
	require.Equal(t, "P", x.all(), "decode was sent without the notice")
}

type preparing struct {
	fake
	url string
}

func (p *preparing) Prepare(ctx context.Context, s *connector.Session, call connector.Caller) (any, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := call(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func TestASideCallBeforeTheLegs(t *testing.T) {
	side := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `"engine-7"`)
	}))
	c := &preparing{url: side}
	c.order = connector.Together
	c.decode = func(s *connector.Session, _ *connector.PrefillResult, l *connector.Leg) error {
		l.Param("remote_engine_id", json.RawMessage(s.Prepared.(string)))
		return nil
	}
	x := script(t, c, answer(ok), func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		require.Contains(t, b, `"remote_engine_id":"engine-7"`)
		answer(ok)(x, w, r, b)
	})
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))

	c.url = "http://localhost:1/" // another host than the engines'
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 502, r.status, "a side call reached a host that is none of the session's")
}

// An engine that wants a key wants it for a connector's questions, too. What has its own port is another server.
func TestASideCallToAnEngineHasTheHeaderOfALeg(t *testing.T) {
	c := &preparing{}
	var seen []http.Header
	x := script(t, c, func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		seen = append(seen, r.Header)
		answer(ok)(x, w, r, b)
	}, answer(ok), pdflow.WithForwardHeaders("X-Tenant"))
	other := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen = append(seen, r.Header) }))
	for url, key := range map[string]string{x.pair.Prefill.URL.String() + "/info": "sk", other: ""} {
		c.url, seen = url, nil
		require.Equal(t, 200, post(t, x.url, "/v1/completions", completion("a", ""), "X-Api-Key", "sk", "X-Tenant", "t",
			"X-Request-Id", "mine", "Cookie", "c=1").status)
		require.Len(t, seen, 2, "the side call and the leg")
		for _, name := range []string{"X-Api-Key", "X-Tenant", "X-Request-Id"} {
			require.Equal(t, key != "", seen[0].Get(name) != "", name)
			require.NotEmpty(t, seen[1].Get(name))
		}
		require.Empty(t, seen[0].Get("Cookie"))
	}
}

type finishing struct{ fake }

func (*finishing) Final(_ *connector.Session, p *connector.PrefillResult) (connector.Response, bool) {
	done := [][]byte{[]byte(`{"choices":[{"text":"done"}]}`), []byte("[DONE]")}
	return connector.Response{Body: p.Body, Events: done},
		true
}

func TestPrefillsResponseMayBeTheClients(t *testing.T) {
	x := script(t, &finishing{}, answer(`{"choices":[{"text":"done"}]}`), answer(ok))
	require.Equal(t, "done", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
	require.Equal(t, "done", post(t, x.url, "/v1/completions", completion("a", `"stream":true`)).text(t))
	require.Equal(t, "P P", x.all())
}

type rewriting struct{ fake }

func (*rewriting) Rewrite(s *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if _, asked := s.Field("logprobs"); !asked {
		return nil
	}
	return func(data []byte) ([]byte, error) {
		if strings.Contains(string(data), "drop") {
			return nil, nil
		}
		first, _ := p().Field("first")
		return []byte(strings.Replace(string(data), `"hi"`, string(first), 1)), nil
	}
}

func TestRewritingDecodesEvents(t *testing.T) {
	events := []string{`data: {"choices":[{"text":"hi"}]}`, `data: {"choices":[{"text":"drop"}]}`, ": a comment",
		"event: e\ndata: {\"choices\":[{\"text\":\"hi\"}]}", "data: [DONE]"}
	d := func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		if !strings.Contains(b, `"stream":true`) {
			answer(ok)(x, w, r, b)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		all := strings.Join(events, "\n\n") + "\n\n"
		for i := range len(all) { // cut anywhere
			_, _ = io.WriteString(w, all[i:i+1])
			_ = http.NewResponseController(w).Flush()
		}
	}
	x := script(t, &rewriting{}, answer(`{"first":"changed"}`), d)
	require.Equal(t, "changed", post(t, x.url, "/v1/completions", completion("a", `"logprobs":1`)).text(t))
	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t),
		"off unless the request needs it")
	r := post(t, x.url, "/v1/completions", completion("a", `"logprobs":1,"stream":true`))
	require.Equal(t, "changedchanged", r.text(t))
	require.Contains(t, r.body, ": a comment")
	require.Contains(t, r.body, "event: e\ndata: ")
	r = post(t, x.url, "/v1/completions", completion("a", `"stream":true`))
	require.Equal(t, strings.Join(events, "\n\n")+"\n\n", r.body, "an unparsed stream keeps every byte")
}

type encoding struct {
	fake
	merged []string
}

func (*encoding) Items(*connector.Session) []connector.Item {
	return []connector.Item{{ID: "a"}, {ID: "b"}, {ID: "a"}}
}
func (*encoding) Encode(_ *connector.Session, i connector.Item, l *connector.Leg) error {
	l.SetBody(json.RawMessage(`{"item":"` + i.ID + `"}`))
	return nil
}
func (e *encoding) Merge(_ *connector.Session, responses []json.RawMessage) error {
	e.merged = nil
	for _, a := range responses {
		e.merged = append(e.merged, string(a))
	}
	return nil
}

func TestAnEncodeStage(t *testing.T) {
	var encoded atomic.Int32
	fail := 0
	enc := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		encoded.Add(1)
		if fail > 0 && strings.Contains(string(b), `"b"`) {
			w.WriteHeader(fail)
			return
		}
		_, _ = w.Write(b)
	}))
	e := &encoding{}
	x := script(t, e, answer(ok), answer(ok))
	body := completion("a", "")
	require.Equal(t, 503, post(t, x.url, "/v1/completions", body).status, "no encode engine is there")

	p, d := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { answer(ok)(nil, w, r, "") })),
		x.url
	_ = d
	flow, _ := newFlow(
		t, e, []discovery.Endpoint{endpoint(t, p, discovery.RoleBoth), endpoint(t, enc, discovery.RoleEncode),
			endpoint(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				answer(ok)(nil, w, r, "")
			})), discovery.RoleDecode)},
	)
	url := serve(t, flow)
	require.Equal(t, "hi", post(t, url, "/v1/completions", body).text(t))
	require.EqualValues(t, 2, encoded.Load(), "equal items are encoded once")
	require.Equal(t, []string{`{"item":"a"}`, `{"item":"b"}`, `{"item":"a"}`}, e.merged)
	fail = 500
	require.Equal(t, 502, post(t, url, "/v1/completions", body).status, "one failed item fails the request")
	fail = 401
	encoded.Store(0)
	require.Equal(t, 401, post(t, url, "/v1/completions", body).status)
	require.LessOrEqual(t, encoded.Load(), int32(2), "other picks have the same encode engines")
}

type cleaning struct {
	fake
	cleaned chan error
}

func (c *cleaning) Clean(ctx context.Context, _ *connector.Session, cause error, _ connector.Caller) error {
	if ctx.Err() != nil {
		cause = errors.New("cleaned with a dead context")
	}
	c.cleaned <- cause
	return nil
}

func TestCleaningUpHasAContextOfItsOwn(t *testing.T) {
	c := &cleaning{cleaned: make(chan error, 1)}
	x := script(t, c, gone, answer(ok))
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	_, err := x.flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))})
	require.Error(t, err)
	require.ErrorIs(t, <-c.cleaned, pdflow.CodeTimeout)
}

func TestAConnectorThatFailsHarmsNobodyElse(t *testing.T) {
	for name, c := range map[string]*fake{
		"prefill panics": {prefill: func(*connector.Session, *connector.Leg) error { panic("boom") }},
		"decode panics": {decode: func(*connector.Session, *connector.PrefillResult, *connector.Leg) error {
			panic("boom")
		}},
		"prefill panics, together": {order: connector.Together,
			prefill: func(*connector.Session, *connector.Leg) error { panic("boom") }},
		"prefill fails": {prefill: func(*connector.Session, *connector.Leg) error {
			return errors.New("secret")
		}},
		"a clash of two parameters": {
			decode: func(_ *connector.Session, _ *connector.PrefillResult, l *connector.Leg) error {
				l.Param("a", json.RawMessage("1"))
				l.Param("a", json.RawMessage("2"))
				return nil
			}},
	} {
		t.Run(name, func(t *testing.T) {
			d := answer(ok)
			if c.order == connector.Together {
				d = gone // else its response may be first
			}
			x := script(t, c, answer(ok), d)
			r := post(t, x.url, "/v1/completions", completion("a", ""))
			require.Equal(t, 500, r.status)
			_, code := r.fault(t)
			require.Equal(t, "internal", code)
			require.NotContains(t, r.body, "secret")
			require.NotContains(t, r.body, "boom")
		})
	}
}

func TestAbilitiesThatAnOrderNeeds(t *testing.T) {
	for _, o := range []connector.Order{connector.DecodeFirst, connector.DecodeThenPrefill, connector.Order(9)} {
		_, err := pdflow.New(&fake{order: o}, pickNothing)
		require.Error(t, err, o)
	}
}

var pickNothing = pick.Func(func(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	return pdflow.Pick{}, pdflow.CodeNoEndpoint
})
