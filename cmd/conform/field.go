// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// fieldCases are what people who run such fleets have reported.
var fieldCases = []Case{
	{ID: "field/adapter", Severity: Should, Check: adapterServes,
		Rule: "An adapter that all engines have loaded at run time, and list in /v1/models with the model as its " +
			"parent, serves within 15 s."},
	{ID: "field/adapter-on-one-prefill", Severity: Should,
		Check: adapterLost(func(s *Scene) *enginesim.Engine { return s.P[0] }),
		Rule: "One prefill engine has lost the adapter and answers 404 for it: the other serves the requests, none " +
			"is lost."},
	{ID: "field/adapter-on-one-decode", Severity: Should,
		Check: adapterLost(func(s *Scene) *enginesim.Engine { return s.D[0] }),
		Rule:  "The same of one decode engine."},
	{ID: "field/key-of-one-engine", Severity: Should,
		Check: elsewhere(func(s *Scene) *enginesim.Engine { return s.P[0] }, http.StatusUnauthorized,
			`{"error":"Unauthorized"}`),
		Rule: "One engine has a new key already and answers 401: requests go to the other while keys are changed."},
	{ID: "field/error-ending", Severity: Must, Check: errorEnding,
		Rule: `D ends a response by finish_reason "error": the client gets 5xx, a broken connection, or the right ` +
			"answer of a further attempt, never such a response as a good one."},
	{ID: "field/error-ending-stream", Severity: Must, Check: errorEndingStream,
		Rule: `D ends a stream by finish_reason "error" or "abort", after its first tokens or before: the client ` +
			"sees an error event, a broken connection, or the right answer of a further attempt."},
	{ID: "field/api-key", Severity: Should, Check: header("X-Api-Key", "conform"),
		Rule: "X-Api-Key reaches both engines: clients of the Messages API have their key there."},
	{ID: "field/orders", Severity: Must, Check: orders,
		Rule: "Orders to engines reach none: load or unload an adapter, forget the cache, sleep, new weights, " +
			"profile."},
	{ID: "field/heads", Severity: Must, Check: heads,
		Rule: "520 clients that announce bodies of 32 MB and send none keep no other client from its answer."},
	{ID: "field/processes", Severity: Should, Check: processes,
		Rule: "One request after another, after a burst, reaches at least two of eight API servers behind an " +
			"engine's port."},
	{ID: "field/surplus-response", Severity: Must, Check: surplusResponse,
		Rule: "An engine sends a response too many, some milliseconds late: no client gets the response to another's " +
			"request."},
	{ID: "field/silence-within", Severity: Must, Check: silenceWithin,
		Rule: "A stream that is silent for 5 s between two events goes on: a tool parser holds a call's arguments " +
			"back until they are whole."},
	{ID: "field/slow-prefill", Severity: Should, Check: slowPrefill,
		Rule: "Prefill takes 6 s: the stream comes whole, and what the client gets before its first event, if " +
			"anything, are comments of SSE."},
	{ID: "field/slow-prefill-fails", Severity: Must, Check: slowPrefillFails,
		Rule: "Prefill takes 6 s and then breaks at each engine: the client gets 5xx, an error event or a broken " +
			"connection, whatever it got before."},
	{ID: "field/hanging-pair", Severity: Should, Check: hangingPair,
		Rule: "The transfers of one of four pairs never end, and all engines answer their health paths: each client " +
			"has an answer or an error within 15 s, and each that comes afterwards its answer within 5 s."},
	{ID: "field/cached-tokens", Severity: Should, Check: cachedTokens,
		Rule: "The cached tokens of the usage, if it has any, are those of P's prefix cache, not all that D took " +
			"over (vLLM before 0.31): they are billed."},
	{ID: "field/stored-responses", Severity: Should, Check: storedResponses,
		Rule: "GET /v1/responses/ID and previous_response_id reach the decode engine that made the response: only " +
			"that one knows it."},
	{ID: "field/names-in-errors", Severity: Should, Check: namesInErrors,
		Rule: "Addresses in the text of an engine's error do not reach the client."},
}

// elsewhere has one engine refuse all requests with what says something of that engine only.
func elsewhere(of func(*Scene) *enginesim.Engine, status int, text string) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		e := of(s)
		everywhere([]*enginesim.Engine{e}, enginesim.Fault{Kind: enginesim.FaultStatus, Status: status, Body: text})
		for range 8 {
			content := body()
			if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
				return err
			}
		}
		if len(s.legs([]*enginesim.Engine{e})) == 0 {
			return errSkip("no request reached that engine")
		}
		return nil
	}
}

const endedByError = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,` +
	`"text":"","logprobs":null,"finish_reason":"error","stop_reason":null}],"usage":{"prompt_tokens":200,` +
	`"completion_tokens":0,"total_tokens":200}}`

func errorEnding(ctx context.Context, s *Scene) error {
	for _, d := range s.D {
		d.Inject(enginesim.Fault{Kind: enginesim.FaultGarbage, Leg: enginesim.LegDecode, Body: endedByError})
	}
	content := body()
	a := s.post(ctx, completions, content)
	if a.broken() || a.status >= http.StatusInternalServerError {
		return nil
	}
	return s.whole(ctx, a, completions, content)
}

func errorEndingStream(ctx context.Context, s *Scene) error {
	for _, ending := range []string{"error", "abort"} {
		for _, tokens := range []int{3, 0} {
			for _, d := range s.D {
				d.ClearFaults()
				d.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, Leg: enginesim.LegDecode, Ending: ending,
					AfterChunks: tokens})
			}
			content := body("stream", true)
			a := s.post(ctx, completions, content)
			if a.broken() || a.failedEvent() || a.status >= http.StatusInternalServerError {
				continue
			}
			if err := s.whole(ctx, a, completions, content); err != nil {
				return err
			}
		}
	}
	return nil
}

func orders(ctx context.Context, s *Scene) error {
	for _, order := range []string{"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/sleep",
		"/wake_up", "/collective_rpc", "/start_profile", "/update_weights_from_disk", "/flush_cache",
		"/abort_request", "/scale_elastic_ep", "/v1/shutdown"} {
		s.post(ctx, order, body())
		for _, l := range s.legs(s.engines()) {
			if l.Path == order {
				return breach("no order at an engine", "%s reached one", order)
			}
		}
	}
	return nil
}

func heads(ctx context.Context, s *Scene) error {
	var all sync.WaitGroup
	conns := make(chan net.Conn, 520)
	for range cap(conns) {
		all.Go(func() {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.host())
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(conn, "%sContent-Length: %d\r\n\r\n", head, 32<<20)
			conns <- conn
		})
	}
	all.Wait()
	close(conns)
	defer func() {
		for conn := range conns {
			_ = conn.Close()
		}
	}()
	if len(conns) < cap(conns)/2 {
		return errSkip("not enough connections could be opened")
	}
	for range 8 {
		content := body()
		if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
			return err
		}
	}
	return nil
}

// apiServers is how many processes each engine of a scene has behind its port.
const apiServers = 8

func processes(ctx context.Context, s *Scene) error {
	var burst sync.WaitGroup
	for range 64 {
		burst.Go(func() { s.post(ctx, completions, body()) })
	}
	burst.Wait()
	if err := s.idle(ctx, 5*time.Second); err != nil {
		return err
	}
	s.mark()
	for range 40 {
		content := body()
		if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
	for _, e := range s.engines() {
		met := map[int]bool{}
		legs := s.legs([]*enginesim.Engine{e})
		for _, l := range legs {
			met[l.Process] = true
		}
		if len(legs) > 10 && len(met) < 2 {
			return breach("at least two of eight processes to get requests", "one got all %d", len(legs))
		}
	}
	return nil
}

// ofAnother is the response that nobody asked for.
const ofAnother = `{"id":"cmpl-of-another","object":"text_completion","created":1,"model":"tiny","choices":[` +
	`{"index":0,"text":"of another client","finish_reason":"length"}],"usage":{"prompt_tokens":1,` +
	`"completion_tokens":1,"total_tokens":2}}`

// surplusResponse sends requests without a pause: on a connection that is idle when the surplus response comes, anybody
// sees it.
func surplusResponse(ctx context.Context, s *Scene) error {
	for _, d := range s.D {
		d.Inject(enginesim.Fault{Kind: enginesim.FaultSurplus, Leg: enginesim.LegDecode, Count: 4,
			Delay: 3 * time.Millisecond, Body: ofAnother})
	}
	type exchange struct {
		content string
		answer  answer
	}
	var clients sync.WaitGroup
	all := make([][30]exchange, 4)
	for i := range all {
		clients.Go(func() {
			for n := range all[i] {
				content := body()
				all[i][n] = exchange{content, s.post(ctx, completions, content)}
			}
		})
	}
	clients.Wait()
	for i := range all {
		for _, x := range all[i] {
			if x.answer.status >= http.StatusInternalServerError || x.answer.broken() {
				continue // it has been noticed
			}
			if err := s.whole(ctx, x.answer, completions, x.content); err != nil {
				return err
			}
		}
	}
	return nil
}

func namesInErrors(ctx context.Context, s *Scene) error {
	for _, side := range [][]*enginesim.Engine{s.D, s.P} {
		for _, e := range s.engines() {
			e.ClearFaults()
		}
		peer := strings.TrimPrefix(s.P[0].URL(), "http://")
		text, err := json.Marshal(map[string]any{"error": map[string]any{"type": "BadRequestError", "code": 400,
			"message": "no KV from " + peer + " (see http://" + peer + "/health)"}})
		if err != nil {
			return err
		}
		everywhere(side, enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusBadRequest,
			Body: string(text)})
		if a := s.post(ctx, completions, body()); strings.Contains(string(a.body), peer) {
			return breach("no engine's address in the response", "one, with status %d", a.status)
		}
	}
	return nil
}

func storedResponses(ctx context.Context, s *Scene) error {
	const path = "/v1/responses"
	for range 4 {
		made := s.post(ctx, path, object("model", model, "input", prompt(50), "max_output_tokens", 4))
		var r struct{ ID string }
		switch {
		case made.status == http.StatusNotFound || made.status == http.StatusMethodNotAllowed:
			return errSkip("the gateway does not serve the Responses API")
		case made.status != http.StatusOK || json.Unmarshal(made.body, &r) != nil || r.ID == "":
			return breach("a response", "%s", made)
		}
		if ok, what := s.answers(ctx, http.MethodGet, path+"/"+r.ID, ""); !ok {
			return breach("GET of the response to answer with 200", "%.60s", what[strings.Index(what, " ")+1:])
		}
		next := s.post(ctx, path, object("model", model, "input", prompt(50), "max_output_tokens", 4,
			"previous_response_id", r.ID))
		if next.status != http.StatusOK {
			return breach("a response to what follows", "%s", next)
		}
	}
	return nil
}
