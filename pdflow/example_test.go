// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// prompt has 43 tokens: the simulated engines take each byte for one.
const prompt = `"Where does the crane stand after the storm?"`

// A gateway for a prefill and a decode engine whose addresses are known: a flow in an http.Server.
func ExampleNew() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()

	p, err := discovery.New(prefill.URL(), discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	d, err := discovery.New(decode.URL(), discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	set, err := static.NewSet(p, d)
	if err != nil {
		log.Fatal(err)
	}

	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Shutdown(context.Background())

	gateway := httptest.NewServer(flow) // or http.ListenAndServe("127.0.0.1:8000", flow)
	defer gateway.Close()

	resp, err := http.Post(gateway.URL+"/v1/completions", "application/json",
		strings.NewReader(`{"prompt":`+prompt+`,"max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	fmt.Println(resp.StatusCode, resp.Header.Get("X-PD-Mode"))
	fmt.Println("tokens that decode took over:", decode.Stats().ExternalKVTransfer)
	// Output:
	// 200 disaggregated
	// tokens that decode took over: 43
}

// A scheduler that has chosen the engines itself says so in Request.Pick.
func ExampleFlow_Do() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	p, _ := discovery.New(prefill.URL(), discovery.RolePrefill)
	d, _ := discovery.New(decode.URL(), discovery.RoleDecode)
	resp, err := flow.Do(context.Background(), &pdflow.Request{
		API:  connector.APICompletions,
		Body: []byte(`{"prompt":` + prompt + `,"max_tokens":8}`),
		Pick: &pdflow.Pick{Prefill: p, Decode: d, Done: func(o *pdflow.Outcome) {
			fmt.Println("legs ended:", o.Prefill.Status, o.Decode.Status)
		}},
	})
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		log.Fatal(err)
	}
	resp.Body.Close() // always: it ends the legs, and only then Done is called

	var response struct {
		Usage struct {
			Completion int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(body, &response); err != nil {
		log.Fatal(err)
	}
	fmt.Println(resp.Status, resp.Mode, response.Usage.Completion, "tokens")
	// Output:
	// legs ended: 200 200
	// 200 disaggregated 8 tokens
}

// Every error is a *pdflow.Error, whose Code is for programs and whose Message may be shown to clients.
func ExampleFlow_Do_error() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	prefill.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusServiceUnavailable, Count: -1})
	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` + prompt + `}`)}
	_, err := flow.Do(context.Background(), in)

	if e, ok := errors.AsType[*pdflow.Error](err); ok {
		fmt.Println(e.Code, "of the leg", e.Leg, "becomes status", e.HTTPStatus())
	}
	// Output:
	// prefill_failed of the leg prefill becomes status 502
}

// A flow is an http.Handler. Streams pass through as the engine sends them.
func ExampleFlow_ServeHTTP() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions",
		strings.NewReader(`{"messages":[{"role":"user","content":`+prompt+`}],"max_tokens":3,"stream":true}`))
	r.Header.Set("Content-Type", "application/json")
	flow.ServeHTTP(w, r)

	fmt.Println(w.Code, w.Header().Get("Content-Type"), w.Header().Get("X-PD-Mode"))
	fmt.Println("ends with [DONE]:", strings.HasSuffix(w.Body.String(), "data: [DONE]\n\n"))
	// Output:
	// 200 text/event-stream; charset=utf-8 disaggregated
	// ends with [DONE]: true
}

// A response of Do goes to the client by Send, as ServeHTTP would write it: flushed, bounded in time, cut if it breaks.
func ExampleResponse_Send() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 32<<20))
		if err != nil {
			http.Error(w, "the body is refused", http.StatusBadRequest)
			return
		}
		in := &pdflow.Request{API: connector.APIOf(r.URL.Path), Header: r.Header, Body: body}
		resp, err := flow.Do(r.Context(), in)
		if e, ok := errors.AsType[*pdflow.Error](err); ok {
			e.Send(w, r)
			return
		}
		if err := resp.Send(w, r); err != nil {
			log.Print(err) // the client knows: write nothing more
		}
	})
	fmt.Println(examplePost(handler, `{"prompt":`+prompt+`}`))
	fmt.Println(examplePost(handler, `{"prompt":7`))
	// Output:
	// 200 disaggregated
	// 400
}

// A reverse proxy of the standard library runs inference over two engines, and proxies everything else.
func ExampleFlow_RoundTripper() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())
	target, err := url.Parse(decode.URL())
	if err != nil {
		log.Fatal(err)
	}

	proxy := httputil.NewSingleHostReverseProxy(target) // where /v1/models and all other paths go
	proxy.Transport = flow.RoundTripper(http.DefaultTransport)

	fmt.Println(examplePost(proxy, `{"prompt":`+prompt+`}`))
	w := httptest.NewRecorder()
	proxy.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/models", nil))
	fmt.Println(w.Code)
	// Output:
	// 200 disaggregated
	// 200
}

// A flow in front of a program's own handlers: the flow serves the client APIs' paths, and the program all others.
func ExampleFlow_Middleware() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	mine := http.NewServeMux()
	mine.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "well") })
	handler := flow.Middleware(mine)

	fmt.Println(examplePost(handler, `{"prompt":`+prompt+`}`))
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
	fmt.Println(w.Code, w.Body)
	// Output:
	// 200 disaggregated
	// 200 well
}

// Several models behind one listener, each with a flow of its own.
func ExampleMux() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{"tiny": flow}); err != nil { // "*" would be for any model
		log.Fatal(err)
	}
	fmt.Println(examplePost(mux, `{"model":"tiny","prompt":`+prompt+`}`))
	fmt.Println(examplePost(mux, `{"model":"huge","prompt":`+prompt+`}`))
	// Output:
	// 200 disaggregated
	// 404
}

// A tenth of one model's requests tries another connector.
func ExampleFlow_Split() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	set := exampleSet(prefill, decode)

	current, err := plainhttp.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	next, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	proven, err := pdflow.New(current, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	candidate, err := pdflow.New(next, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	defer proven.Shutdown(context.Background())
	defer candidate.Shutdown(context.Background())

	split, err := proven.Split(candidate, 10)
	if err != nil {
		log.Fatal(err)
	}
	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{"tiny": split}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(examplePost(mux, `{"model":"tiny","prompt":`+prompt+`}`))
	// Output:
	// 200 disaggregated
}

// If no prefill engine is left, decode engines serve whole requests. X-PD-Mode of the response says so.
func ExampleWithFallback() {
	prefill, decode := exampleEngines()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithFallback(config.FallbackDecode),
		pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
	defer flow.Shutdown(context.Background())

	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`}`))
	prefill.Close()
	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`}`))
	// Output:
	// 200 disaggregated
	// 200 fallback
}

// An observer must be quick, and it is called from several goroutines.
func ExampleObserver() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithObserver(pdflow.Observer{
		LegStart: func(_ context.Context, _ *connector.Session, leg pdflow.LegKind) { fmt.Println(leg, "begins") },
		LegEnd: func(_ context.Context, _ *connector.Session, o *pdflow.LegOutcome, _ *connector.PrefillResult) {
			fmt.Println(o.Leg, "ends with status", o.Status)
		},
	}))
	defer flow.Shutdown(context.Background())

	examplePost(flow, `{"prompt":`+prompt+`}`)
	// Output:
	// prefill begins
	// prefill ends with status 200
	// decode begins
	// decode ends with status 200
}

// Engines report a stream's tokens only if asked. Telemetry.Usage asks, and removes the report from what the client gets.
func ExampleWithTelemetry_usage() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	counts := pdflow.WithTelemetry(pdflow.Telemetry{Usage: true})
	flow := exampleFlow(prefill, decode, counts, pdflow.WithObserver(pdflow.Observer{
		SessionEnd: func(_ context.Context, o *pdflow.Outcome) { // once for each attempt
			fmt.Println("tokens in:", o.Usage.Input, "out:", o.Usage.Output)
		},
	}))

	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`,"max_tokens":3,"stream":true}`))
	flow.Shutdown(context.Background())
	// Output:
	// tokens in: 43 out: 3
	// 200 disaggregated
}

// The flow uses the request ID that the program gives, in place of the client's X-Request-Id.
func ExampleWithRequestID() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithRequestID(func(r *http.Request) string {
		return "tenant-7." + r.Header.Get("X-Sequence")
	}))
	defer flow.Shutdown(context.Background())

	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":`+prompt+`}`))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Sequence", "42")
	flow.ServeHTTP(w, r)
	fmt.Println(w.Code, w.Header().Get("X-Request-Id"))
	// Output:
	// 200 tenant-7.42
}

// legTeller is a RoundTripper that knows which leg it sends.
type legTeller struct{ next http.RoundTripper }

func (t legTeller) RoundTrip(r *http.Request) (*http.Response, error) {
	if leg, ok := pdflow.LegFromContext(r.Context()); ok {
		fmt.Println(leg.Connector, leg.Leg, "attempt", leg.Attempt)
	}
	return t.next.RoundTrip(r)
}

func ExampleLegFromContext() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	engines := transport.New(nil)
	defer engines.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithTransport(legTeller{engines}))
	defer flow.Shutdown(context.Background())

	examplePost(flow, `{"prompt":`+prompt+`}`)
	// Output:
	// nixl prefill attempt 1
	// nixl decode attempt 1
}

// metricPrinter stands for a MeterProvider of OpenTelemetry's SDK. It prints the requests that are measured.
type (
	metricPrinter    struct{ noop.MeterProvider }
	meterPrinter     struct{ noop.Meter }
	histogramPrinter struct {
		noop.Float64Histogram
		name string
	}
)

func (metricPrinter) Meter(string, ...metric.MeterOption) metric.Meter { return meterPrinter{} }

func (meterPrinter) Float64Histogram(name string, _ ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return histogramPrinter{name: name}, nil
}

func (h histogramPrinter) Record(_ context.Context, _ float64, opts ...metric.RecordOption) {
	if h.name == "pd.request.duration" {
		set := metric.NewRecordConfig(opts).Attributes()
		model, _ := set.Value("gen_ai.request.model")
		fmt.Println(h.name, "of", model.AsString())
	}
}

// Two models, each with a flow of its own, and metrics that tell them apart.
func ExampleWithTelemetry() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	meters := metricPrinter{}
	routes := map[string]pdflow.Server{}
	for _, model := range []string{"tiny", "huge"} {
		flow := exampleFlow(prefill, decode, pdflow.WithTelemetry(pdflow.Telemetry{
			MeterProvider: meters,
			Attributes:    []attribute.KeyValue{attribute.String("gen_ai.request.model", model)},
		}))
		defer flow.Shutdown(context.Background())
		routes[model] = flow
	}
	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(routes); err != nil {
		log.Fatal(err)
	}
	examplePost(mux, `{"model":"tiny","prompt":`+prompt+`}`)
	// Output:
	// pd.request.duration of tiny
}

// Shutdown waits for running requests and answers new ones with 503. Call it before the server's Shutdown.
func ExampleFlow_Shutdown() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	server := httptest.NewServer(flow)
	defer server.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second) // streams that take longer are cut
	defer cancel()
	fmt.Println(flow.Shutdown(ctx), server.Config.Shutdown(ctx))

	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` + prompt + `}`)}
	_, err := flow.Do(context.Background(), in)
	fmt.Println(errors.Is(err, pdflow.CodeDraining))
	// Output:
	// <nil> <nil>
	// true
}

// exampleEngines starts a simulated prefill engine and a decode engine that can pull its KV.
func exampleEngines() (prefill, decode *enginesim.Engine) {
	port, err := freeport.One() // for who asks prefill after its end
	if err != nil {
		log.Fatal(err)
	}
	prefill, decode, err = enginesim.Pair(enginesim.Config{Listen: "127.0.0.1:" + port}, enginesim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return prefill, decode
}

// exampleSet is a set that knows the engines.
func exampleSet(prefill, decode *enginesim.Engine) *discovery.Set {
	p, _ := discovery.New(prefill.URL(), discovery.RolePrefill)
	d, _ := discovery.New(decode.URL(), discovery.RoleDecode)
	set, err := static.NewSet(p, d)
	if err != nil {
		log.Fatal(err)
	}
	return set
}

// exampleFlow is a flow over a set that knows the engines.
func exampleFlow(prefill, decode *enginesim.Engine, opts ...pdflow.Option) *pdflow.Flow {
	set := exampleSet(prefill, decode)
	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()), opts...)
	if err != nil {
		log.Fatal(err)
	}
	return flow
}

// examplePost asks a handler for a completion and returns the status and how it was served.
func examplePost(h http.Handler, body string) string {
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	h.ServeHTTP(w, r)
	return strings.TrimSpace(fmt.Sprint(w.Code, " ", w.Header().Get("X-PD-Mode")))
}
