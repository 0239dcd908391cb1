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
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/enginesim"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// prompt has 43 tokens: the simulated engines take each byte for one.
const prompt = `"Where does the crane stand after the storm?"`

// Over a prefill and a decode engine that are known beforehand, a gateway is a flow in a server.
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
	engines, err := static.New(p, d)
	if err != nil {
		log.Fatal(err)
	}
	set := discovery.NewSet(engines)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go set.Run(ctx)

	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()))
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Shutdown(ctx)

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

	var answer struct {
		Usage struct {
			Completion int `json:"completion_tokens"`
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		log.Fatal(err)
	}
	fmt.Println(resp.Status, resp.Mode, answer.Usage.Completion, "tokens")
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
	_, err := flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` +
		prompt + `}`)})

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

// A flow in front of what a program serves already: the client APIs' paths are the flow's, all others stay.
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

	mux := pdflow.NewMux(nil)
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
func ExampleNewSplit() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	set, stop := exampleSet(prefill, decode)
	defer stop()

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

	split, err := pdflow.NewSplit(proven, candidate, 10)
	if err != nil {
		log.Fatal(err)
	}
	mux := pdflow.NewMux(nil)
	if err := mux.SetRoutes(map[string]pdflow.Server{"tiny": split}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(examplePost(mux, `{"model":"tiny","prompt":`+prompt+`}`))
	// Output:
	// 200 disaggregated
}

// With all prefill engines gone, decode engines serve whole requests, which X-PD-Mode tells.
func ExampleWithFallback() {
	prefill, decode := exampleEngines()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithFallback(connector.FallbackDecode),
		pdflow.WithRetry(connector.Retry{MaxAttempts: 1}))
	defer flow.Shutdown(context.Background())

	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`}`))
	prefill.Close()
	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`}`))
	// Output:
	// 200 disaggregated
	// 200 fallback
}

// legPrinter sees legs begin and end. An observer must be quick, and it is called from several goroutines.
type legPrinter struct{}

func (legPrinter) LegStart(_ context.Context, _ *connector.Session, leg pdflow.LegKind) {
	fmt.Println(leg, "begins")
}

func (legPrinter) LegEnd(_ context.Context, _ *connector.Session, o *pdflow.LegOutcome, _ *connector.PrefillResult) {
	fmt.Println(o.Leg, "ends with status", o.Status)
}

// An observer implements LegObserver, SessionObserver, or both.
func ExampleObserver() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithObserver(legPrinter{}))
	defer flow.Shutdown(context.Background())

	examplePost(flow, `{"prompt":`+prompt+`}`)
	// Output:
	// prefill begins
	// prefill ends with status 200
	// decode begins
	// decode ends with status 200
}

// Shutdown lets what runs come to its end and answers 503 to what is new. Call it before the server's own.
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

	_, err := flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` +
		prompt + `}`)})
	fmt.Println(errors.Is(err, pdflow.ErrDraining))
	// Output:
	// <nil> <nil>
	// true
}

// exampleEngines starts a simulated prefill engine and a decode engine that can pull its KV.
func exampleEngines() (prefill, decode *enginesim.Engine) {
	prefill, decode, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{})
	if err != nil {
		log.Fatal(err)
	}
	return prefill, decode
}

// exampleSet is a set that knows the engines.
func exampleSet(prefill, decode *enginesim.Engine) (set *discovery.Set, stop func()) {
	p, _ := discovery.New(prefill.URL(), discovery.RolePrefill)
	d, _ := discovery.New(decode.URL(), discovery.RoleDecode)
	engines, err := static.New(p, d)
	if err != nil {
		log.Fatal(err)
	}
	set = discovery.NewSet(engines)
	ctx, cancel := context.WithCancel(context.Background())
	go set.Run(ctx)
	return set, cancel
}

// exampleFlow is a flow over a set that knows the engines.
func exampleFlow(prefill, decode *enginesim.Engine, opts ...pdflow.Option) *pdflow.Flow {
	set, stop := exampleSet(prefill, decode)
	if err := set.WaitReady(context.Background(), func(s *discovery.Snapshot) bool {
		return len(s.Endpoints) == 2
	}); err != nil {
		log.Fatal(err)
	}
	stop() // a set keeps what it knows
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
