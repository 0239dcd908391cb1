// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/clientstest"
)

// failures are how a client's user learns of each fault. What the gateway answers is the same for all.
type failures struct {
	refused, unknown, bad, unavailable string // 400, 404, 502, 503
	cut, cutStream                     string // what breaks before its end
	types                              bool   // the client tells the type that the response names
	late                               string // an error event behind an early head; "": an object that is no exception
}

// matrix has each client, the APIs it speaks and what it can ask for.
var matrix = map[string]struct {
	apis    []string
	n       bool   // several choices
	batch   string // the API that takes several prompts
	usage   bool   // streamed completions tell usage
	failing failures
	// Of completions, where a client has other exceptions there.
	completions *failures
}{
	clientstest.OpenAIPython: {[]string{"chat", "completions", "responses"}, true, "completions", true, failures{
		"BadRequestError", "NotFoundError", "InternalServerError", "InternalServerError",
		"APIConnectionError", "APIConnectionError", false, "APIError"}, nil},
	clientstest.OpenAINode: {[]string{"chat", "completions", "responses"}, true, "completions", true, failures{
		"BadRequestError", "NotFoundError", "InternalServerError", "InternalServerError",
		"TypeError", "TypeError", false, "APIError"}, nil},
	clientstest.OpenAIGo: {[]string{"chat", "completions", "responses"}, true, "completions", true, failures{
		"openai.Error", "openai.Error", "openai.Error", "openai.Error",
		"io.ErrUnexpectedEOF", "io.ErrUnexpectedEOF", false, "*ssestream.StreamError"}, nil},
	clientstest.Anthropic: {[]string{"messages"}, false, "", true, failures{
		"BadRequestError", "NotFoundError", "InternalServerError", "ServiceUnavailableError",
		"APIConnectionError", "RemoteProtocolError", true, "APIStatusError"}, nil},
	clientstest.LangChain: {[]string{"chat", "completions"}, true, "completions", false, failures{
		"OpenAIInvalidRequestError", "OpenAIModelNotFoundError", "OpenAIAPIError", "OpenAIAPIError",
		"OpenAIConnectionError", "OpenAIConnectionError", false, "APIError"}, &failures{
		"BadRequestError", "NotFoundError", "InternalServerError", "InternalServerError",
		"APIConnectionError", "APIConnectionError", false, "APIError"}},
	clientstest.AISDK: {[]string{"chat", "completions"}, false, "", true, failures{
		"AI_APICallError", "AI_APICallError", "AI_APICallError", "AI_APICallError",
		"AI_APICallError", "AI_APICallError", false, ""}, nil},
}

var (
	cities = clientstest.Tool{Name: "weather", Parameters: json.RawMessage(`{"type":"object","properties":` +
		`{"city":{"type":"string"},"days":{"type":"integer"}},"required":["city","days"],` +
		`"additionalProperties":false}`)}
	clock = clientstest.Tool{Name: "time", Parameters: json.RawMessage(`{"type":"object","properties":` +
		`{"zone":{"enum":["CET","UTC"],"type":"string"}},"required":["zone"],"additionalProperties":false}`)}
)

// site is a gateway over two engines, and one engine alone, which says what the answer to a request is.
type site struct {
	*program
	p, d, alone *enginesim.Engine
	slow        *enginesim.Engine // prefills for the model kept, which has keep-alive
}

func newSite(t *testing.T) *site {
	t.Helper()
	shape := enginesim.Config{MaxModelLen: 8192, ITL: time.Millisecond}
	p, d := simPair(t, shape, shape)
	alone := newSim(t, enginesim.Config{MaxModelLen: 8192})
	slow, slowD := simPair(t, enginesim.Config{Model: "kept"}, enginesim.Config{Model: "kept"})
	none := filepath.Join(t.TempDir(), "none.yaml")
	require.NoError(t, os.WriteFile(none, []byte("endpoints: []\n"), 0o600))
	g := start(t, gatewayYAML("")+simYAML("", p, d)+
		serverYAML("kept", "  keepAlive: {after: 100ms}\n  kvConnector: {type: nixl, timeouts: {prefill: 2s}, "+
			"retry: {maxAttempts: 1}}\n", entry(slow.URL(), "prefill", nil), entry(slowD.URL(), "decode", nil))+
		serverYAML("dark", "  kvConnector: {type: nixl}\n  discovery: {file: {path: "+none+"}}\n"))
	return &site{g, p, d, alone, slow}
}

// said is what the decode engine has said to its last request: the same request to the engine alone says it again.
func (s *site) said(t *testing.T) (a clientstest.Answer) {
	t.Helper()
	requests := s.d.Requests()
	last := requests[len(requests)-1]
	body := map[string]json.RawMessage{}
	require.NoError(t, json.Unmarshal(last.Body, &body))
	delete(body, "kv_transfer_params")
	delete(body, "stream")
	delete(body, "stream_options")
	plain, err := json.Marshal(body)
	require.NoError(t, err)
	status, _, response := do(t, http.MethodPost, s.alone.URL()+last.Path, string(plain))
	require.Equal(t, http.StatusOK, status, response)
	return answerOf(t, response)
}

// answerOf reads a whole response of any API.
func answerOf(t *testing.T, response string) (a clientstest.Answer) {
	t.Helper()
	var r struct {
		Choices []struct {
			Text, Finish string
			FinishReason string `json:"finish_reason"`
			Message      struct {
				Content string
				Calls   []struct{ Function clientstest.Call } `json:"tool_calls"`
			}
		}
		Content []struct { // messages
			Type, Text, Name string
			Input            json.RawMessage
		}
		StopReason string     `json:"stop_reason"`
		Output     []struct { // responses
			Type, Name, Arguments string
			Content               []struct{ Text string }
		}
		Status string
		Usage  map[string]any
	}
	require.NoError(t, json.Unmarshal([]byte(response), &r), response)
	for _, c := range r.Choices {
		a.Texts, a.Finish = append(a.Texts, c.Text+c.Message.Content), append(a.Finish, c.FinishReason)
		for _, call := range c.Message.Calls {
			a.Calls = append(a.Calls, call.Function)
		}
	}
	if r.Choices == nil {
		a.Texts, a.Finish = []string{""}, []string{r.StopReason + r.Status}
	}
	for _, c := range r.Content {
		if a.Texts[0] += c.Text; c.Type == "tool_use" {
			a.Calls = append(a.Calls, clientstest.Call{Name: c.Name, Arguments: string(c.Input)})
		}
	}
	for _, o := range r.Output {
		for _, c := range o.Content {
			a.Texts[0] += c.Text
		}
		if o.Type == "function_call" {
			a.Calls = append(a.Calls, clientstest.Call{Name: o.Name, Arguments: o.Arguments})
		}
	}
	a.Usage = make([]int, 2)
	for name, at := range map[string]int{"prompt_tokens": 0, "input_tokens": 0, "cache_read_input_tokens": 0,
		"cache_creation_input_tokens": 0, "completion_tokens": 1, "output_tokens": 1} {
		if n, ok := r.Usage[name].(float64); ok {
			a.Usage[at] += int(n)
		}
	}
	return a
}

// settled waits until both engines are idle, and wants each handoff used once and no KV held.
func (s *site) settled(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, e := range []*enginesim.Engine{s.p, s.d} {
		require.NoError(t, e.WaitIdle(ctx), "a leg goes on")
		eventually(t, func() bool { return e.Stats().UsedBlocks == 0 })
		stats := e.Stats()
		assert.Zero(t, stats.Running+stats.Waiting+stats.PinnedBlocks)
	}
	require.NoError(t, s.p.CheckKV())
}

// Each client gets what the engines said: text, calls, reasons and usage, whole and streamed.
func TestClientLibraries(t *testing.T) {
	for name, client := range matrix {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := clientstest.Start(t, name)
			s := newSite(t)
			for _, api := range client.apis {
				for what, q := range map[string]clientstest.Question{
					"text":               {},
					"text, streamed":     {Stream: true},
					"tools":              {Tools: []clientstest.Tool{cities, clock}, Limit: 200},
					"tools, streamed":    {Tools: []clientstest.Tool{cities, clock}, Limit: 200, Stream: true},
					"a schema":           {Schema: cities.Parameters, Limit: 200},
					"a schema, streamed": {Schema: cities.Parameters, Limit: 200, Stream: true},
					"n":                  {N: 2},
					"n, streamed":        {N: 2, Stream: true},
					"a batch":            {},
				} {
					batch := what == "a batch"
					if (q.Tools != nil || q.Schema != nil) && api == "completions" || batch && client.batch != api ||
						q.N > 1 && (!client.n || api == "responses") ||
						q.N > 1 && q.Stream && name == clientstest.LangChain {
						continue
					}
					t.Run(api+"/"+what, func(t *testing.T) {
						q.URL, q.API, q.Prompt = s.client, api, api+what+strings.Repeat(" a cat on a mat", 20)
						if batch {
							q.Prompt = []string{"one" + what, "two" + what, "three" + what}
						}
						s.answers(t, c, q, batch || q.N > 1, !q.Stream || client.usage || api != "completions")
					})
				}
			}
			for _, api := range client.apis {
				failing := client.failing
				if api == "completions" && client.completions != nil {
					failing = *client.completions
				}
				s.fails(t, c, api, failing)
				s.waits(t, c, api, failing.late)
				s.isLeft(t, c, api)
			}
		})
	}
}

// answers asks one question, and compares the answer with what the engines said. alone is a request of one engine.
func (s *site) answers(t *testing.T, c *clientstest.Client, q clientstest.Question, alone, usage bool) {
	t.Helper()
	before := len(s.p.Requests())
	got := c.Ask(t, q)
	require.Nil(t, got.Error)
	want := s.said(t)
	if q.Schema != nil {
		require.Len(t, got.Texts, 1)
		assert.Equal(t, clean(want.Texts[0]), clean(got.Texts[0]))
	} else {
		assert.Equal(t, want.Texts, got.Texts)
	}
	require.Len(t, got.Calls, len(q.Tools))
	for i, call := range got.Calls {
		assert.Equal(t, q.Tools[i].Name, call.Name)
		assert.JSONEq(t, want.Calls[i].Arguments, call.Arguments)
	}
	if usage {
		assert.Equal(t, want.Finish, got.Finish)
		assert.Equal(t, want.Usage, got.Usage)
		assert.Positive(t, want.Usage[0]*want.Usage[1])
	}
	assert.Equal(t, alone, len(s.p.Requests()) == before, "does the prefill engine take part?")
	s.settled(t)
}

// clean is JSON without the spaces that a client may drop.
func clean(text string) string { return strings.ReplaceAll(text, " ", "") }

// fails plays each fault, streamed and not, and wants the client's own exception.
func (s *site) fails(t *testing.T, c *clientstest.Client, api string, f failures) {
	for _, stream := range []bool{false, true} {
		for what, fault := range map[string]struct {
			q      clientstest.Question
			play   enginesim.Fault
			class  string
			status int
			kind   string // in Anthropic's shape
		}{
			"400 of an engine": {clientstest.Question{Prompt: strings.Repeat("word ", 3000)}, enginesim.Fault{},
				f.refused, 400, "invalid_request_error"},
			"404": {clientstest.Question{Model: "nobody"}, enginesim.Fault{}, f.unknown, 404, "not_found_error"},
			"502": {clientstest.Question{}, enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500, Count: -1,
				Leg: enginesim.LegPrefill}, f.bad, 502, "api_error"},
			"503": {clientstest.Question{Model: "dark"}, enginesim.Fault{}, f.unavailable, 503, "overloaded_error"},
			"cut": {clientstest.Question{}, enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 8,
				Leg: enginesim.LegDecode}, f.cut, 0, ""},
		} {
			name := api + "/" + what
			if stream {
				name += ", streamed"
			}
			t.Run(name, func(t *testing.T) {
				q := fault.q
				if q.URL, q.API, q.Stream = s.client, api, stream; q.Prompt == nil {
					q.Prompt = name + strings.Repeat(" a cat on a mat", 20)
				}
				if fault.play.Kind != 0 {
					for _, e := range []*enginesim.Engine{s.p, s.d} {
						e.Inject(fault.play)
						defer e.ClearFaults()
					}
				}
				if what == "cut" && stream {
					fault.class = f.cutStream
				}
				got := c.Ask(t, q)
				require.NotNil(t, got.Error, "%q was taken for whole", got.Texts)
				assert.Equal(t, fault.class, got.Error.Class, got.Error.Message)
				if fault.status != 0 {
					assert.Equal(t, fault.status, got.Error.Status, got.Error.Message)
				}
				assert.NotContains(t, got.Error.Message, strings.TrimPrefix(s.p.URL(), "http://"))
				assert.NotContains(t, got.Error.Message, strings.TrimPrefix(s.d.URL(), "http://"))
				if f.types && fault.kind != "" {
					assert.Equal(t, fault.kind, got.Error.Type)
				}
			})
		}
	}
}

// waits has the client wait for a slow prefill, and then for one that fails, behind comments and pings.
func (s *site) waits(t *testing.T, c *clientstest.Client, api, late string) {
	t.Run(api+"/kept alive", func(t *testing.T) {
		q := clientstest.Question{URL: s.client, API: api, Model: "kept", Prompt: api + " is kept alive"}
		want := c.Ask(t, q) // whole: it has no comments
		require.Nil(t, want.Error)
		q.Stream = true
		s.slow.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond})
		got := c.Ask(t, q)
		require.Nil(t, got.Error)
		assert.Equal(t, want.Texts, got.Texts)

		s.slow.Inject(enginesim.Fault{Kind: enginesim.FaultStall})
		got = c.Ask(t, q)
		require.NotNil(t, got.Error, "%q was taken for whole", got.Texts)
		assert.Equal(t, late, got.Error.Class)
		assert.Contains(t, got.Error.Message, "the engines did not answer in time")
	})
}

// isLeft lets the client leave, in the stream and before an unstreamed answer: no leg goes on, and no KV is held.
func (s *site) isLeft(t *testing.T, c *clientstest.Client, api string) {
	for _, stream := range []bool{true, false} {
		t.Run(api+"/left"+map[bool]string{true: ", streamed"}[stream], func(t *testing.T) {
			before := s.p.Stats().Aborted + s.d.Stats().Aborted
			q := clientstest.Question{URL: s.client, API: api, Stream: stream, Limit: 7000,
				Prompt: api + "left" + strings.Repeat(" a cat on a mat", 20)}
			if q.Leave = 5; !stream {
				q.Leave, q.Timeout = 0, 2
			}
			got := c.Ask(t, q)
			require.Eventually(t, func() bool { return s.p.Stats().Aborted+s.d.Stats().Aborted == before+1 },
				20*time.Second, time.Millisecond, "the leg goes on")
			s.settled(t)
			if stream {
				assert.Nil(t, got.Error)
				return
			}
			require.NotNil(t, got.Error)
			assert.Zero(t, got.Error.Status)
		})
	}
}
