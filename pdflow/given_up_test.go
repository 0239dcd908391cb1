// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// Responses that end with a failure, as engines write them: docs/retries.md, "An end that is a failure".

// givenUp is a request of an API, a good response and those of an engine that gave it up.
type givenUp struct {
	api                  connector.API
	body                 string
	good, whole          string
	first, token, failed string // of a stream: its preamble, an event with content, and its end
}

func chunk(data string) string       { return "data: " + data + "\n\n" }
func typed(name, data string) string { return "event: " + name + "\n" + chunk(data) }

var givenUps = map[string]givenUp{
	"chat": {connector.APIChat, `{"messages":[{"role":"user","content":"a"}]`,
		`{"choices":[{"message":{"content":"a"},"finish_reason":"length"}]}`,
		`{"choices":[{"message":{"content":"a"},"finish_reason":"error"}]}`,
		chunk(`{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}`),
		chunk(`{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}`),
		chunk(`{"choices":[{"delta":{},"finish_reason":"error"}]}`) + chunk("[DONE]")},
	"two choices": {connector.APIChat, `{"messages":[{"role":"user","content":"a"}],"n":2`,
		`{"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"stop"}]}`,
		`{"choices":[{"index":0,"finish_reason":"stop"},{"index":1,"finish_reason":"abort"}]}`,
		chunk(`{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`),
		chunk(`{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}`),
		chunk(`{"choices":[{"index":1,"delta":{},"finish_reason":"abort"}]}`) +
			chunk(`{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`) + chunk("[DONE]")},
	"completions": {connector.APICompletions, `{"prompt":"a"`,
		`{"choices":[{"text":"a","finish_reason":"stop"}]}`,
		`{"choices":[{"text":"","finish_reason":"cancelled"}],"kv_transfer_params":null}`, "",
		chunk(`{"choices":[{"text":"a","finish_reason":null}]}`),
		chunk(`{"choices":[{"text":"","finish_reason":"timeout"}]}`) + chunk("[DONE]")},
	"generate": {connector.APISGLang, `{"text":"a"`,
		`{"text":"a","meta_info":{"finish_reason":{"type":"length","length":1}}}`,
		`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}`, "",
		chunk(`{"text":"a","meta_info":{"finish_reason":null}}`),
		chunk(`{"text":"a","meta_info":{"finish_reason":{"type":"abort","message":"Aborted"}}}`) + chunk("[DONE]")},
	"messages": {connector.APIMessages, `{"max_tokens":9,"messages":[{"role":"user","content":"a"}]`,
		`{"type":"message","content":[],"stop_reason":"max_tokens"}`, `{"type":"message","content":[],"usage":{}}`,
		typed("message_start", `{"type":"message_start","message":{"content":[],"stop_reason":null}}`),
		typed("content_block_delta", `{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}`),
		typed("message_delta", `{"type":"message_delta","delta":{"stop_reason":null,"stop_sequence":null}}`) +
			typed("message_stop", `{"type":"message_stop"}`)},
	"responses": {connector.APIResponses, `{"input":"a","metadata":{"status":"failed"}`,
		`{"object":"response","metadata":{"status":"failed"},"status":"incomplete"}`,
		`{"object":"response","metadata":{"status":"failed"},"output":[],"status":"cancelled"}`,
		typed("response.created", `{"type":"response.created","response":{"metadata":{"status":"failed"}}}`),
		typed("response.output_text.delta", `{"type":"response.output_text.delta","delta":"a"}`),
		typed("response.completed", `{"response":{"metadata":{},"status":"cancelled"},"type":"response.completed"}`)},
	"responses, failed": {connector.APIResponses, `{"input":"a"`, `{"object":"response","status":"completed"}`,
		`{"object":"response","error":{"code":"server_error","message":"Generation aborted"},"status":"failed"}`,
		typed("response.created", `{"type":"response.created","response":{"error":null,"status":"in_progress"}}`),
		typed("response.output_text.delta", `{"type":"response.output_text.delta","delta":"a"}`),
		typed("response.failed", `{"type":"response.failed","response":{"error":{"message":"x"},"status":"failed"}}`)},
}

func whole(body string) response {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, ContentLength: int64(len(body)),
			Header: http.Header{"Content-Type": {"application/json"}, "Content-Length": {strconv.Itoa(len(body))}},
			Body:   io.NopCloser(strings.NewReader(body))}, nil
	}
}

// inParts is a stream whose parts come one second after the other.
func inParts(parts ...string) response {
	return func(*http.Request) (*http.Response, error) {
		out, in := io.Pipe()
		go func() {
			for _, part := range parts {
				_, _ = io.WriteString(in, part)
				time.Sleep(time.Second)
			}
			_ = in.Close()
		}()
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
			ContentLength: -1, TransferEncoding: []string{"chunked"}, Body: out}, nil
	}
}

// asks sends a request, and returns the response as far as it came.
func (f *fakeFleet) asks(x *givenUp, more string) (string, error) {
	resp, err := f.flow.Do(context.Background(), &pdflow.Request{API: x.api, Body: []byte(x.body + more + "}")})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	_, err = b.ReadFrom(resp.Body)
	return b.String(), err
}

func withSGLang(t *connector.Traits) { t.APIs = append(connector.APIs(), connector.APISGLang) }

// givingUp starts a fleet whose engines p0 and d0 answer so, and the others well.
func givingUp(t *testing.T, x *givenUp, p0, d0, good response, opts ...pdflow.Option) *fakeFleet {
	t.Helper()
	return newFakeFleet(t, &fake{more: withSGLang}, "p0 p1 d0 d1", config.Retry{MaxAttempts: 3},
		func(host string, _ int) response {
			switch host {
			case "p0":
				return p0
			case "d0":
				return d0
			case "p1":
				return whole(x.good)
			}
			return good
		}, opts...)
}

func TestARequestThatAnEngineGivesUpGoesToAnother(t *testing.T) {
	for name, x := range givenUps {
		for _, leg := range []pdflow.LegKind{pdflow.LegPrefill, pdflow.LegDecode} {
			if leg == pdflow.LegPrefill && strings.Contains(x.body, `"n":2`) {
				continue // one engine serves it
			}
			for _, stream := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					more, good, want := "", whole(x.good), x.good
					bad := whole(x.whole)
					if stream {
						more, want = `,"stream":true`, x.first+x.token
						good, bad = streaming(0, nil, want), streaming(0, nil, x.first, x.failed)
					}
					p0, d0, code := whole(x.good), bad, pdflow.CodeDecodeFailed
					if leg == pdflow.LegPrefill {
						// of prefill's response only the handoff is wanted: it may lack an ending
						said := strings.Replace(x.whole, `"usage":{}`, `"stop_reason":null,"usage":{}`, 1)
						p0, d0, code = whole(said), good, pdflow.CodePrefillFailed
					}
					f := givingUp(t, &x, p0, d0, good)
					for i := range 12 { // of bodies that differ: one body alone starts no cooldown
						got, err := f.asks(&x, more+`,"user":"`+strconv.Itoa(i)+`"`)
						require.NoError(t, err, "%s, %s: %s", name, leg, f.hosts())
						require.Equal(t, want, got, name)
					}
					failed := 0
					for _, o := range f.seen.list() {
						if o.Err == nil {
							continue
						}
						failed++
						assert.Equal(t, code, o.Err.Code, name)
						assert.Equal(t, leg, o.Err.Leg, name)
						assert.Equal(t, string(leg[:1])+"0", o.Err.Endpoint, name)
						assert.True(t, o.Err.EngineFault(), name)
					}
					assert.Contains(t, []int{2, 3, 4}, failed, "%s, %s: the picker then avoids it", name, leg)
					assert.Equal(t, failed, f.told.why("pd.retries", string(code), "failed"), name)
				})
			}
		}
	}
}

func TestAStreamThatItsEngineGivesUpIsCut(t *testing.T) {
	for name, x := range givenUps {
		synctest.Test(t, func(t *testing.T) {
			bad := inParts(x.first+x.token, x.failed)
			f := givingUp(t, &x, whole(x.good), bad, bad)
			got, err := f.asks(&x, `,"stream":true`)
			failure, ok := errors.AsType[*pdflow.Error](err)
			require.True(t, ok, "%s: %v", name, err)
			assert.Equal(t, pdflow.CodeStreamBroken, failure.Code)
			assert.True(t, strings.HasPrefix(got, x.first+x.token), "%s: %s", name, got)
			for _, end := range []string{"[DONE]", "message_stop", "response.completed"} {
				assert.NotContains(t, got, end, name)
			}
			if x.api == connector.APIResponses && strings.Contains(x.failed, "response.failed") {
				assert.Contains(t, got, "response.failed")
			}
			time.Sleep(5 * time.Second) // the engine's
			require.Len(t, f.seen.list(), 1)
			assert.Equal(t, pdflow.CodeStreamBroken, f.seen.list()[0].Err.Code)
			assert.True(t, f.seen.list()[0].Err.EngineFault())
			assert.Contains(t, f.told.labels("pd.attempts", "error.type"), string(pdflow.CodeStreamBroken))
		})
	}
}

// If every engine gives a request up, the client gets 502, not an engine's 200.
func TestARequestThatAllGiveUpIsAnError(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(`{"choices":[{"text":"","finish_reason":"error"}]}`))
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	assert.Equal(t, 502, r.status)
	_, code := r.fault(t)
	assert.Equal(t, "decode_failed", code)
}

// In a stream that has not begun, an error has the status that it has without one: a client's mistake is for the client
// to see, and no fault of the engine.
func TestAnErrorInAStreamHasTheStatusThatItHasWithoutOne(t *testing.T) {
	for _, c := range []struct {
		path, body, event string
		status            int
		code              pdflow.Code
	}{
		{"/v1/completions", completion("a", `"stream":true`),
			chunk(`{"error":{"message":"too long","type":"BadRequestError","code":400}}`) + chunk("[DONE]"),
			400, pdflow.CodeDecodeRejected},
		{"/v1/completions", completion("a", `"stream":true`),
			chunk(`{"error":{"message":"queue is full","type":"SERVICE_UNAVAILABLE","code":503}}`),
			503, pdflow.CodeDecodeFailed},
		{"/v1/completions", completion("a", `"stream":true`), chunk(`{"error":{"message":"x","code":"400"}}`),
			500, pdflow.CodeDecodeFailed},
		{"/v1/messages", `{"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"a"}]}`,
			typed("error", `{"type":"error","error":{"type":"invalid_request_error","message":"too long"}}`),
			400, pdflow.CodeDecodeRejected},
		// what it has beside Anthropic's members, or in place of them, decides here, too
		{"/v1/messages", `{"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"a"}]}`,
			chunk(`{"error":{"message":"too long","type":"BadRequestError","param":"input_tokens","code":400}}`),
			400, pdflow.CodeDecodeRejected},
		{"/v1/messages", `{"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"a"}]}`,
			typed("error", `{"type":"error","error":{"type":"BadRequestError","message":"too long","code":400}}`),
			400, pdflow.CodeDecodeRejected},
		{"/v1/messages", `{"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"a"}]}`,
			typed("error", `{"message":"overloaded"}`), 500, pdflow.CodeDecodeFailed},
		{"/v1/completions", completion("a", `"stream":true`), chunk(`{"id":"` + strings.Repeat("x", 3<<10) +
			`","error":{"message":"too long","code":400}}`), 400, pdflow.CodeDecodeRejected},
		{"/generate", `{"text":"a","stream":true}`,
			chunk(`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"\"long\"","status_code":400}}}`) +
				chunk("[DONE]"), 400, pdflow.CodeDecodeRejected},
		{"/generate", `{"text":"a","stream":true}`,
			chunk(`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"full","status_code":500}}}`),
			500, pdflow.CodeDecodeFailed},
		{"/generate", `{"text":"a","stream":true}`,
			chunk(`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}`),
			502, pdflow.CodeDecodeFailed},
	} {
		x := script(t, &fake{more: withSGLang}, answer(ok),
			func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
				w.Header().Set("Content-Type", "text/event-stream")
				_, _ = io.WriteString(w, c.event)
			})
		r := post(t, x.url, c.path, c.body)
		assert.Equal(t, c.status, r.status, "%s: %s", c.event, r.body)
		last := x.seen.list()[len(x.seen.list())-1]
		assert.Equal(t, c.code, last.Err.Code, c.event)
		assert.Equal(t, c.status >= 500, last.Err.EngineFault(), c.event)
	}
}

// A client may cancel what it runs in the background: that says nothing of the engine.
func TestAClientMayCancelWhatRunsInTheBackground(t *testing.T) {
	for _, status := range []string{"cancelled", "queued"} {
		answered := `{"object":"response","status":"` + status + `"}`
		x := script(t, &fake{}, answer(ok), answer(answered))
		r := post(t, x.url, "/v1/responses", `{"input":"a","background":true}`)
		assert.Equal(t, 200, r.status)
		assert.Equal(t, answered, r.body)
	}
}

// The endings of simulated engines, in each API that they share with nixl, whole and streamed.
func TestAnEngineThatEndsWithAFailureIsNotTheLastWord(t *testing.T) {
	t.Parallel()
	x, other := rescuingWith(t, enginesim.Config{},
		enginesim.Config{KVRole: enginesim.RoleConsumer, ITL: 5 * time.Millisecond}, pdflow.WithRescue(0))
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} {
		for _, stream := range []string{"", `,"stream":true`} {
			body := map[string]string{"/v1/completions": `{"prompt":"a","max_tokens":9`,
				"/v1/responses": `{"input":"a","max_output_tokens":9`}[path]
			if body == "" {
				body = `{"messages":[{"role":"user","content":"a"}],"max_tokens":9`
			}
			for _, leg := range []string{enginesim.LegPrefill, enginesim.LegDecode} {
				e := x.p
				if leg == enginesim.LegDecode {
					e = x.d
				}
				e.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, Leg: leg, Path: path})
				r := post(t, x.url, path, body+stream+"}")
				assert.Equal(t, 200, r.status, "%s %s %s: %s", path, leg, stream, r.body)
				assert.NoError(t, r.err, "%s %s %s: %s", path, leg, stream, r.body)
				assert.NotContains(t, r.body, "abort")
				assert.NotContains(t, r.body, "cancelled")
			}
			if stream == "" {
				continue
			}
			for _, e := range []*enginesim.Engine{x.d, other} {
				e.Inject(enginesim.Fault{Kind: enginesim.FaultEnding, Leg: enginesim.LegDecode, AfterChunks: 3})
			}
			r := post(t, x.url, path, body+stream+"}")
			assert.Error(t, r.err, "%s: %s", path, r.body)
			x.d.ClearFaults()
			other.ClearFaults()
		}
	}
}
