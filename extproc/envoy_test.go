// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/extproc"
	"github.com/pdkit/pdkit/pdflow"
)

func nixlWorld(t *testing.T, p, d enginesim.Config, opts ...pdflow.Option) *world {
	t.Helper()
	c, err := nixl.New(nil)
	require.NoError(t, err)
	return newWorld(t, c, p, d, opts...)
}

const prompt = "Two engines, one response: the first reads the prompt, the second writes what follows."

func completion(stream bool) string {
	body, _ := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": 8, "stream": stream})
	return string(body)
}

func post(t *testing.T, ctx context.Context, url, body string, header ...string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return http.DefaultClient.Do(r)
}

// ask returns status, header and body.
func ask(t *testing.T, url, body string, header ...string) (int, http.Header, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	resp, err := post(t, ctx, url, body, header...)
	require.NoError(t, err)
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, resp.Header, string(got)
}

// text is what a response writes, streamed or not.
func text(t *testing.T, body string) (out string) {
	t.Helper()
	pieces := []string{body}
	if strings.HasPrefix(body, "data: ") {
		require.True(t, strings.HasSuffix(body, "data: [DONE]\n\n"))
		pieces = strings.Split(strings.TrimSuffix(body, "data: [DONE]\n\n"), "\n\n")
		pieces = pieces[:len(pieces)-1]
	}
	for _, piece := range pieces {
		out += gjson.Get(strings.TrimPrefix(piece, "data: "), "choices.0.text").String()
	}
	return out
}

// The decode engine takes the KV over, and the client gets what one engine alone would write.
func TestEnvoySendsDecode(t *testing.T) {
	for name, stream := range map[string]bool{"whole": false, "streamed": true} {
		t.Run(name, func(t *testing.T) {
			w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
			url := w.envoy()
			status, header, body := ask(t, url+"/v1/completions?x=1", completion(stream),
				"X-Request-Id", "mine", "Authorization", "Bearer k", "Cookie", "c",
				"X-Data-Parallel-Rank", "3", "X-Envoy-Retry-On", "5xx", extproc.DestinationHeader, "127.0.0.1:1")
			require.Equal(t, http.StatusOK, status, body)
			assert.Equal(t, "disaggregated", header.Get("X-Pd-Mode"))
			assert.Equal(t, "mine", header.Get("X-Request-Id"))
			assert.Equal(t, []pdflow.Code{""}, w.wait(1))
			assert.Equal(t, pdflow.ModeDisaggregated, w.outcomes()[0].Mode)

			seen := w.d.Requests()
			require.Len(t, seen, 1)
			assert.Equal(t, "/v1/completions", seen[0].Path)
			assert.True(t, gjson.GetBytes(seen[0].Body, "kv_transfer_params.do_remote_prefill").Bool())
			assert.Equal(t, "Bearer k", seen[0].Header.Get("Authorization"))
			assert.Equal(t, strconv.Itoa(len(seen[0].Body)), seen[0].Header.Get("Content-Length"))
			for _, name := range []string{"Cookie", "X-Data-Parallel-Rank", "X-Envoy-Retry-On", "Accept-Encoding"} {
				assert.NotContains(t, seen[0].Header, name)
			}
			stats := w.d.Stats()
			assert.Zero(t, stats.LocalCompute, "D computes nothing of the prompt")
			assert.EqualValues(t, len(prompt), stats.ExternalKVTransfer)
			assert.NoError(t, w.p.CheckKV())
			assert.NoError(t, w.d.CheckKV())
			_, _, alone := ask(t, w.p.URL()+"/v1/completions", completion(false))
			assert.Equal(t, text(t, alone), text(t, body))
		})
	}
}

// Through Envoy the client gets the same response as from ServeHTTP.
func TestErrorsAreThoseOfServeHTTP(t *testing.T) {
	fails := func(kind enginesim.FaultKind, status int) *enginesim.Fault {
		return &enginesim.Fault{Kind: kind, Status: status, Count: -1}
	}
	for name, c := range map[string]struct {
		path, body string
		header     []string
		fault      *enginesim.Fault
		want       int
		attempts   int
	}{
		"prefill fails":          {fault: fails(enginesim.FaultStatus, 500), want: 502, attempts: 2},
		"prefill resets":         {fault: fails(enginesim.FaultReset, 0), want: 502, attempts: 2},
		"prefill cannot be read": {fault: fails(enginesim.FaultGarbage, 0), want: 502, attempts: 2},
		"prefill refuses":        {fault: fails(enginesim.FaultStatus, 422), want: 422, attempts: 1},
		"not JSON":               {body: `{"prompt":`, want: 400},
		"another type":           {header: []string{"Content-Type", "text/plain"}, want: 415},
		"encoded":                {header: []string{"Content-Encoding", "gzip"}, want: 415},
		"messages":               {path: "/v1/messages", body: `[]`, want: 400},
	} {
		t.Run(name, func(t *testing.T) {
			w := nixlWorld(t, enginesim.Config{}, enginesim.Config{},
				pdflow.WithRetry(config.Retry{BackoffBase: time.Millisecond}))
			if c.fault != nil {
				w.p.Inject(*c.fault)
			}
			path, body := cmp.Or(c.path, "/v1/completions"), cmp.Or(c.body, completion(true))
			header := append([]string{"X-Request-Id", "mine"}, c.header...)
			r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			for i := 0; i < len(header); i += 2 {
				r.Header.Set(header[i], header[i+1])
			}
			direct := httptest.NewRecorder()
			w.flow.ServeHTTP(direct, r)
			require.Equal(t, c.want, direct.Code)

			status, got, response := ask(t, w.envoy()+path, body, header...)
			assert.Equal(t, c.want, status)
			assert.JSONEq(t, direct.Body.String(), response)
			for _, name := range []string{"Content-Type", "Content-Length", "X-Request-Id", "X-Pd-Mode",
				"Retry-After"} {
				assert.Equal(t, direct.Header().Get(name), got.Get(name), name)
			}
			assert.Len(t, w.wait(2*c.attempts), 2*c.attempts)
			assert.Empty(t, w.d.Requests())
		})
	}
}

func TestAPrefillThatFailsIsRetried(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	w.p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500})
	status, _, _ := ask(t, w.envoy()+"/v1/completions", completion(true))
	assert.Equal(t, 200, status)
	assert.Equal(t, []pdflow.Code{pdflow.CodePrefillFailed, ""}, w.wait(2))
	assert.Len(t, w.d.Requests(), 1)
}

// trusting lets clients on loopback say how Envoy sends their requests, as programs within a cluster may.
const trusting = `use_remote_address: true
                internal_address_config: { cidr_ranges: [{ address_prefix: 127.0.0.0, prefix_len: 8 }] }
                stream_idle_timeout: 0s`

// The client gets decode's error response. Envoy sends the leg only once, even if the client's headers ask it to retry.
func TestDecodeFails(t *testing.T) {
	for name, c := range map[string]struct {
		fault enginesim.Fault
		want  int
		code  pdflow.Code
	}{
		"500":   {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500}, 500, pdflow.CodeDecodeFailed},
		"400":   {enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400}, 400, pdflow.CodeDecodeRejected},
		"reset": {enginesim.Fault{Kind: enginesim.FaultReset}, 503, pdflow.CodeDecodeFailed},
	} {
		t.Run(name, func(t *testing.T) {
			w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
			w.d.Inject(c.fault)
			status, _, _ := ask(t, w.envoy("stream_idle_timeout: 0s", trusting)+"/v1/completions", completion(true),
				"X-Envoy-Retry-On", "5xx,reset", "X-Envoy-Max-Retries", "3")
			assert.Equal(t, c.want, status)
			assert.Equal(t, []pdflow.Code{c.code}, w.wait(1))
			assert.Equal(t, 1, len(w.d.Requests()), "sent once") //nolint:testifylint // Len would print them all
		})
	}
}

func TestAClientThatLeavesDuringPrefillEndsIt(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	w.p.Inject(enginesim.Fault{Kind: enginesim.FaultStall})
	url := w.envoy()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for len(w.p.Requests()) == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	_, err := post(t, ctx, url+"/v1/completions", completion(true))
	require.ErrorIs(t, err, context.Canceled)
	assert.Equal(t, []pdflow.Code{pdflow.CodeClientGone}, w.wait(1))
	idle, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	require.NoError(t, w.p.WaitIdle(idle), "P sees that nobody waits")
	assert.Empty(t, w.d.Requests())
}

// With NONE the server learns when a response ends, and not how. With STREAMED it learns whether its end came.
func TestHowAStreamEnds(t *testing.T) {
	streamed := []string{"response_body_mode: NONE", "response_body_mode: STREAMED"}
	for name, c := range map[string]struct {
		changes []string
		leave   bool
		broken  bool
		gaveUp  bool // with a finish_reason
		want    pdflow.Code
	}{
		"NONE, whole":                 {},
		"NONE, the client leaves":     {leave: true},
		"NONE, decode breaks":         {broken: true},
		"STREAMED, whole":             {changes: streamed},
		"STREAMED, the client leaves": {changes: streamed, leave: true, want: pdflow.CodeClientGone},
		"STREAMED, decode breaks":     {changes: streamed, broken: true, want: pdflow.CodeClientGone},
		"NONE, decode gives up":       {gaveUp: true},
		"STREAMED, decode gives up":   {changes: streamed, gaveUp: true, want: pdflow.CodeStreamBroken},
	} {
		t.Run(name, func(t *testing.T) {
			itl := 20 * time.Millisecond
			if c.leave { // the stream has no end but the client's
				itl = time.Second
			}
			w := nixlWorld(t, enginesim.Config{}, enginesim.Config{ITL: itl})
			if c.broken {
				w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
			}
			if c.gaveUp {
				w.d.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, AfterChunks: 3})
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			resp, err := post(t, ctx, w.envoy(c.changes...)+"/v1/completions", completion(true))
			require.NoError(t, err)
			defer resp.Body.Close()
			_, err = io.ReadFull(resp.Body, make([]byte, 10))
			require.NoError(t, err)
			if c.leave {
				assert.Len(t, w.flow.Sessions(), 1, "the request lasts as long as its stream")
				cancel()
			}
			text, err := io.ReadAll(resp.Body)
			if !c.leave && !c.broken && (!c.gaveUp || c.changes == nil) {
				assert.NoError(t, err)
			} else {
				assert.Error(t, err, "a cut stream does not look whole")
				assert.NotContains(t, string(text), "[DONE]")
			}
			assert.Equal(t, []pdflow.Code{c.want}, w.wait(1))
			if c.leave {
				require.Eventually(t, func() bool { return w.d.Stats().Aborted == 1 }, 20*time.Second, time.Millisecond)
			}
		})
	}
}

// Clients have names of their own for models also where the response goes past the flow: streamed, with
// response_body_mode STREAMED, so that Envoy puts what the server writes in the place of what decode has written
// (kubernetes-sigs/gateway-api-inference-extension issue 1625).
func TestClientsNamesForModels(t *testing.T) {
	streamed := []string{"response_body_mode: NONE", "response_body_mode: STREAMED"}
	fails := &enginesim.Fault{Kind: enginesim.FaultStatus, Status: 400, Count: -1,
		Body: `{"error":{"message":"big at 10.0.0.7:8000 cannot do it","type":"BadRequestError"}}`}
	for name, c := range map[string]struct {
		changes        []string
		path, more     string
		fault          *enginesim.Fault
		status         int
		holds, without string
	}{
		"streamed": {streamed, "/v1/completions", `"prompt":"hello","stream":true`, nil, 200, "data: [DONE]", "big"},
		"streamed, chat": {streamed, "/v1/chat/completions",
			`"messages":[{"role":"user","content":"x"}],"stream":true`, nil, 200, "data: [DONE]", "big"},
		"streamed, responses": {streamed, "/v1/responses", `"input":"hello","stream":true`, nil, 200,
			"response.completed", "big"},
		"whole":       {streamed, "/v1/completions", `"prompt":"hello"`, nil, 200, `"choices"`, "big"},
		"whole, NONE": {nil, "/v1/completions", `"prompt":"hello"`, nil, 200, `"choices"`, "big"},
		"an error": {streamed, "/v1/completions", `"prompt":"hello","stream":true`, fails, 400, "gpt-4o at ",
			"10.0.0.7"},
		"streamed, NONE": {nil, "/v1/completions", `"prompt":"hello","stream":true`, nil, 400, "response_body_mode",
			"big"},
	} {
		t.Run(name, func(t *testing.T) {
			w := nixlWorld(t, enginesim.Config{Model: "big"}, enginesim.Config{Model: "big"},
				pdflow.WithModel("big", "gpt-4o", "other"))
			if c.fault != nil {
				w.d.Inject(*c.fault)
			}
			status, header, body := ask(t, w.envoy(c.changes...)+c.path, `{"model":"gpt-4o",`+c.more+`}`)
			assert.Equal(t, c.status, status, body)
			assert.Contains(t, body, c.holds)
			assert.NotContains(t, body, c.without)
			if status == http.StatusOK {
				assert.Equal(t, "disaggregated", header.Get("X-Pd-Mode"))
				assert.Contains(t, body, `"model":"gpt-4o"`)
				assert.Equal(t, []pdflow.Code{""}, w.wait(1))
			}
		})
	}
}

// An event reaches the client before the next one comes, and a stream that is cut does not look whole.
func TestARenamedStreamGoesOnAsItComes(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{Model: "big"}, enginesim.Config{Model: "big", ITL: time.Second},
		pdflow.WithModel("big", "gpt-4o"))
	w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 2})
	resp, err := post(t, t.Context(), w.envoy("response_body_mode: NONE", "response_body_mode: STREAMED")+
		"/v1/completions", `{"model":"gpt-4o",`+completion(true)[1:])
	require.NoError(t, err)
	defer resp.Body.Close()
	begin := time.Now()
	first := make([]byte, 4096)
	n, err := resp.Body.Read(first)
	require.NoError(t, err)
	assert.Less(t, time.Since(begin), 900*time.Millisecond)
	assert.Contains(t, string(first[:n]), `"model":"gpt-4o"`)
	assert.True(t, strings.HasSuffix(string(first[:n]), "\n\n"), "an event at a time")
	_, err = io.Copy(io.Discard, resp.Body)
	require.Error(t, err)
}

// A whole response whose finish_reason says that decode gave up is not passed on, where Envoy shows it.
func TestAWholeResponseThatDecodeGaveUpIsCut(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	w.d.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, AfterChunks: 3, Ending: "error"})
	resp, err := post(t, t.Context(), w.envoy("response_body_mode: NONE", "response_body_mode: STREAMED")+
		"/v1/completions", completion(false))
	if err == nil { // else the connection was cut before the response's head
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		assert.True(t, err != nil || resp.StatusCode == http.StatusBadGateway, "%d: %s", resp.StatusCode, text)
		assert.NotContains(t, string(text), "choices")
	}
	assert.Equal(t, []pdflow.Code{pdflow.CodeStreamBroken}, w.wait(1))
}

func TestABodyOverTheLimit(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	url := w.envoy()
	for name, c := range map[string]struct {
		size  int
		known bool
		ours  bool
	}{
		"over the server's, said":   {7 << 20, true, true},
		"over the server's, unsaid": {7 << 20, false, true},
		"over Envoy's":              {9 << 20, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			var body io.Reader = strings.NewReader(`{"prompt":"` + strings.Repeat("x", c.size) + `"}`)
			if !c.known {
				body = io.MultiReader(body)
			}
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions", body)
			require.NoError(t, err)
			r.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(r)
			require.NoError(t, err)
			defer resp.Body.Close()
			got, _ := io.ReadAll(resp.Body)
			assert.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
			assert.Equal(t, c.ours, gjson.GetBytes(got, "error.code").String() == "body_too_large", string(got))
		})
	}
	url = w.envoy("8388608", "16777216")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/v1/completions",
		io.MultiReader(strings.NewReader(`{"prompt":"`+strings.Repeat("x", 12<<20)+`"}`)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, "over gRPC's")

	status, _, _ := ask(t, url+"/v1/completions", `{"prompt":"x","max_tokens":1,"user":"`+strings.Repeat("x", 5<<20)+
		`"}`)
	assert.Equal(t, 200, status, "a body within the limit")
}

// Other paths pass, but not to where a client wants them to go.
func TestOtherPathsPassUntouched(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	host := strings.TrimPrefix(w.d.URL(), "http://")
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.envoy()+"/v1/models", http.NoBody)
	require.NoError(t, err)
	r.Header.Set(extproc.DestinationHeader, host)
	resp, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, "there is no destination")

	url := w.envoy("cluster: decode, timeout", "cluster: others, timeout", "  clusters:\n", `  clusters:
    - name: others
      type: STATIC
      load_assignment:
        cluster_name: others
        endpoints:
          - lb_endpoints:
              - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: `+portOf(host)+` } } }
`)
	status, _, body := ask(t, url+"/tokenize", completion(false))
	assert.Equal(t, 200, status, body)
	seen := w.d.Requests()
	require.Len(t, seen, 1)
	assert.Equal(t, completion(false), string(seen[0].Body))
	assert.Empty(t, w.p.Requests())
}

// Legs that run together: Envoy ends decode when prefill fails, else it would wait for its KV until a timeout.
func TestPrefillFailsBesideDecode(t *testing.T) {
	c, err := mooncake.New(nil)
	require.NoError(t, err)
	w := newWorld(t, c, enginesim.Config{Connector: "mooncake"}, enginesim.Config{Connector: "mooncake"})
	url := w.envoy()
	for _, stream := range []bool{false, true} {
		status, _, body := ask(t, url+"/v1/completions", completion(stream))
		require.Equal(t, 200, status, body)
	}
	assert.Equal(t, []pdflow.Code{"", ""}, w.wait(2))
	assert.NoError(t, w.d.CheckKV())

	w.p.Inject(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Leg: enginesim.LegPrefill, Count: -1})
	begun := time.Now()
	status, _, body := ask(t, url+"/v1/completions", completion(true))
	assert.Equal(t, 502, status)
	assert.Equal(t, "prefill_failed", gjson.Get(body, "error.code").String())
	assert.Less(t, time.Since(begun), 10*time.Second)
	idle, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	require.NoError(t, w.d.WaitIdle(idle), "Envoy has ended the decode leg")
	assert.Equal(t, pdflow.CodePrefillFailed, w.wait(3)[2])
}

func TestManyAtOnce(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	url := w.envoy()
	const n = 200
	_, _, alone := ask(t, url+"/v1/completions", completion(false))
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			status, _, body := ask(t, url+"/v1/completions", completion(i%2 == 0))
			if assert.Equal(t, 200, status) {
				assert.Equal(t, text(t, alone), text(t, body))
			}
		})
	}
	wg.Wait()
	for _, code := range w.wait(n + 1) {
		assert.Empty(t, code)
	}
	assert.NoError(t, w.p.CheckKV())
	assert.NoError(t, w.d.CheckKV())
	assert.Zero(t, w.d.Stats().LocalCompute)
}

// Envoy closes an idle connection before an engine does: a request on one that is being closed would be lost.
func TestNoConnectionIsLeftForTheEngineToClose(t *testing.T) {
	c, err := nixl.New(nil)
	require.NoError(t, err)
	p, err := enginesim.Start(enginesim.Config{Connector: "nixl", KVRole: enginesim.RoleProducer})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() })
	var idle, closed atomic.Int64 // connections of an engine that closes none
	d := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"text":"x","finish_reason":"stop"}]}`)
	}))
	d.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateIdle:
			idle.Add(1)
		case http.StateClosed:
			closed.Add(1)
		}
	}
	d.Start()
	t.Cleanup(d.Close)
	w := &world{t: t, p: p}
	w.start(c, p.URL(), d.URL, nil)
	status, _, body := ask(t, w.envoy()+"/v1/completions", completion(false))
	require.Equal(t, 200, status, body)
	require.Eventually(t, func() bool { return idle.Load() == 1 }, 20*time.Second, 5*time.Millisecond)
	require.Eventually(t, func() bool { return closed.Load() == 1 }, 20*time.Second, 5*time.Millisecond)
}

// A request that two engines cannot serve together becomes a single decode step.
func TestOneEngineServesWhatTwoCannot(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	status, header, body := ask(t, w.envoy()+"/v1/completions", `{"prompt":"hi","max_tokens":2,"prompt_logprobs":1}`)
	require.Equal(t, 200, status, body)
	assert.Equal(t, "aggregated", header.Get("X-Pd-Mode"))
	assert.Equal(t, []pdflow.Code{""}, w.wait(1))
	assert.Empty(t, w.p.Requests())
}

func TestTheServerIsAway(t *testing.T) {
	w := nixlWorld(t, enginesim.Config{}, enginesim.Config{})
	w.addr = "127.0.0.1:1"
	status, _, _ := ask(t, w.envoy()+"/v1/completions", completion(false))
	assert.Equal(t, 503, status)
	assert.Empty(t, w.d.Requests())
}
