// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/connector/plainhttp"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// The table of faults: one test a row. Engines are enginesim's, so that a leaked or twice-used handoff shows too.

func TestBadRequestsReachNoEngine(t *testing.T) {
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithMaxBody(4096)}})
	chat := "/v1/chat/completions"
	for _, c := range []struct {
		name, path, body string
		header           []string
		status           int
		code             string
	}{
		{"not JSON", chat, `{"model":`, nil, 400, "invalid_request"},
		{"empty", chat, ``, nil, 400, "invalid_request"},
		{"an array", chat, `[]`, nil, 400, "invalid_request"},
		{"null", chat, `null`, nil, 400, "invalid_request"},
		{"trailing bytes", chat, `{"model":"tiny"}{"a":1}`, nil, 400, "invalid_request"},
		{"byte order mark", chat, "\uFEFF{}", nil, 400, "invalid_request"},
		{"duplicate member", chat, `{"stream":true,"messages":[],"stream":false}`, nil, 400, "invalid_request"},
		{"duplicate member by escape", chat, `{"stream":true,"str\u0065am":false}`, nil, 400, "invalid_request"},
		{"bad UTF-8 in a member we read", chat, "{\"model\":\"\xff\"}", nil, 400, "invalid_request"},
		{"model of a wrong type", chat, `{"model":7}`, nil, 400, "invalid_request"},
		{"stream of a wrong type", chat, `{"stream":"yes"}`, nil, 400, "invalid_request"},
		{"stream_options of a wrong type", chat, `{"stream_options":[]}`, nil, 400, "invalid_request"},
		{"max_tokens of a wrong type", chat, `{"max_tokens":"5"}`, nil, 400, "invalid_request"},
		{"max_completion_tokens of a wrong type", chat, `{"max_completion_tokens":1.5}`, nil, 400, "invalid_request"},
		{"max_output_tokens of a wrong type", "/v1/responses", `{"max_output_tokens":{}}`, nil, 400, "invalid_request"},
		{"min_tokens of a wrong type", chat, `{"min_tokens":true}`, nil, 400, "invalid_request"},
		{"n of a wrong type", chat, `{"n":[1]}`, nil, 400, "invalid_request"},
		{"best_of of a wrong type", "/v1/completions", `{"best_of":"2"}`, nil, 400, "invalid_request"},
		{"sampling_params of a wrong type", "/inference/v1/generate", `{"sampling_params":[]}`, nil, 400,
			"invalid_request"},
		{"too large", chat, `{"a":"` + strings.Repeat("x", 5000) + `"}`, nil, 413, "body_too_large"},
		{"wrong Content-Type", chat, `{}`, []string{"Content-Type", "text/plain"}, 415, "unsupported_media_type"},
		{"Content-Encoding", chat, `{}`, []string{"Content-Encoding", "gzip"}, 415, "unsupported_media_type"},
		{"unknown path", "/v1/embeddings", `{}`, nil, 404, "not_found"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := post(t, x.url, c.path, c.body, c.header...)
			require.Equal(t, c.status, r.status, r.body)
			_, code := r.fault(t, x.p, x.d)
			require.Equal(t, c.code, code)
			require.NotContains(t, r.body, "xxxx", "the body stands in the error")
		})
	}
	require.Empty(t, x.p.Requests())
	require.Empty(t, x.d.Requests())
}

func TestABodyOfUnknownLengthIsLimitedToo(t *testing.T) {
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithMaxBody(4096)}})
	req, err := http.NewRequest(http.MethodPost, x.url+"/v1/completions",
		struct{ io.Reader }{strings.NewReader(completion(strings.Repeat("y", 9000), ""))})
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, 413, resp.StatusCode)
	require.Empty(t, x.p.Requests())
}

func TestNullMembersCountAsAbsent(t *testing.T) {
	x := start(t, setup{})
	body := `{"model":"tiny","prompt":"` + longPrompt +
		`","max_tokens":8,"stream":null,"stream_options":null,"n":null,"min_tokens":null,"kv_transfer_params":null}`
	require.Equal(t, alone(t, "/v1/completions", body), post(t, x.url, "/v1/completions", body).text(t))
}

func TestNoReadyEndpointIs503(t *testing.T) {
	x := start(t, setup{noEndpoints: true})
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 503, r.status)
	require.NotEmpty(t, r.header.Get("Retry-After"))
	_, code := r.fault(t)
	require.Equal(t, "no_endpoint", code)
}

func TestPrefill4xxIsTheResponse(t *testing.T) {
	other, err := enginesim.Start(enginesim.Config{Connector: "nixl", KVRole: enginesim.RoleProducer})
	require.NoError(t, err)
	defer other.Close()
	x := start(t, setup{more: []discovery.Endpoint{endpoint(t, other.URL(), discovery.RolePrefill)}})
	for _, e := range []*enginesim.Engine{x.p, other} {
		e.Inject(
			enginesim.Fault{Kind: enginesim.FaultStatus, Status: 429, Header: http.Header{"Retry-After": {"7"}},
				Body: `{"error":{"message":"slow down","type":"rate","param":null,"code":429}}`, Count: -1},
		)
	}
	r := post(t, x.url, "/v1/completions", completion("abc", ""))
	require.Equal(t, 429, r.status)
	require.Equal(t, "7", r.header.Get("Retry-After"))
	require.JSONEq(t, `{"error":{"message":"slow down","type":"rate","param":null,"code":429}}`, r.body)
	require.Len(t, append(x.p.Requests(), other.Requests()...), 1, "another pair was tried")
	require.Empty(t, x.d.Requests(), "decode was called")
}

// prefillFaults are failures of P. Each happens on every attempt.
func TestPrefillFailsOnEveryAttempt(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		fault enginesim.Fault
		sent  bool // the engine records the request
	}{
		{"5xx", enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500}, true},
		{
			"503", enginesim.Fault{Kind: enginesim.FaultStatus, Status: 503,
				Header: http.Header{"Retry-After": {"86400"}}}, true,
		},
		{"garbage", enginesim.Fault{Kind: enginesim.FaultGarbage}, true},
		{"an empty response", enginesim.Fault{Kind: enginesim.FaultGarbage, Body: " "}, true},
		{
			"an error object of status 200",
			enginesim.Fault{Kind: enginesim.FaultGarbage, Body: `{"error":{"message":"x"}}`}, true,
		},
		{"reset before the headers", enginesim.Fault{Kind: enginesim.FaultReset}, true},
		{"reset within the body", enginesim.Fault{Kind: enginesim.FaultResetStream}, true},
		{"a redirect", enginesim.Fault{Kind: enginesim.FaultRedirect, Location: "http://127.0.0.1:1/"}, true},
		{"port closed", enginesim.Fault{Kind: enginesim.FaultRefuse}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{prefill: atOwnPorts(t, enginesim.Config{})})
			c.fault.Count = -1
			x.p.Inject(c.fault)
			r := post(t, x.url, "/v1/completions", completion("abc", ""))
			require.Equal(t, 502, r.status, r.body)
			_, code := r.fault(t, x.p, x.d)
			require.Equal(t, "prefill_failed", code)
			require.Empty(t, x.d.Requests(), "decode was called")
			if c.sent {
				require.Len(t, x.p.Requests(), 2, "one next attempt")
			}
			require.Len(t, x.seen.list(), 2)
		})
	}
}

func TestAnotherPairServesAfterAFailedPrefill(t *testing.T) {
	x := start(t, setup{})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultReset, Count: 1})
	body := completion(longPrompt, `"stream":true`)
	require.Equal(t, alone(t, "/v1/completions", body), post(t, x.url, "/v1/completions", body).text(t))
	o := x.seen.list()
	require.Len(t, o, 2)
	require.Equal(t, pdflow.CodePrefillFailed, o[0].Err.Code)
	require.NotEqual(t, o[0].Session.ID, o[1].Session.ID, "a retry is a new session")
	x.idle()
	require.NoError(t, x.d.CheckKV())
}

func TestTooLargeAPrefillResponseIsGarbage(t *testing.T) {
	x := start(t, setup{})
	x.p.Inject(enginesim.Fault{Kind: enginesim.FaultOversize, Size: 64<<20 + 1, Count: -1})
	r := post(t, x.url, "/v1/completions", completion("abc", ""))
	require.Equal(t, 502, r.status, r.body)
	require.Empty(t, x.d.Requests())
}

// badHandoffs would make a real decode engine die, hang or answer wrongly (docs/protocols/nixl.md §3).
var badHandoffs = map[string]func(map[string]any){
	"no remote_block_ids":           func(h map[string]any) { delete(h, "remote_block_ids") },
	"null remote_block_ids":         func(h map[string]any) { h["remote_block_ids"] = nil },
	"empty remote_block_ids":        func(h map[string]any) { h["remote_block_ids"] = []any{} },
	"nested empty remote_block_ids": func(h map[string]any) { h["remote_block_ids"] = []any{[]any{}} },
	"flat remote_block_ids":         func(h map[string]any) { h["remote_block_ids"] = []any{1, 2} },
	"block ids as strings":          func(h map[string]any) { h["remote_block_ids"] = []any{[]any{"1"}} },
	"fractional block ids":          func(h map[string]any) { h["remote_block_ids"] = []any{[]any{1.5}} },
	"remote_block_ids as an object": func(h map[string]any) { h["remote_block_ids"] = map[string]any{} },
	"no remote_engine_id":           func(h map[string]any) { delete(h, "remote_engine_id") },
	"no remote_host":                func(h map[string]any) { delete(h, "remote_host") },
	"null remote_host":              func(h map[string]any) { h["remote_host"] = nil },
	"no remote_port":                func(h map[string]any) { delete(h, "remote_port") },
	"remote_port as a string":       func(h map[string]any) { h["remote_port"] = "5600" },
	"remote_port 0":                 func(h map[string]any) { h["remote_port"] = 0 },
	"no remote_request_id":          func(h map[string]any) { delete(h, "remote_request_id") },
	"empty remote_request_id":       func(h map[string]any) { h["remote_request_id"] = "" },
	"swapped flags": func(h map[string]any) {
		h["do_remote_prefill"], h["do_remote_decode"] = false, true
	},
	"no do_remote_prefill": func(h map[string]any) { delete(h, "do_remote_prefill") },
	"tp_size as a string":  func(h map[string]any) { h["tp_size"] = "1" },
	"an empty object":      func(h map[string]any) { clear(h) },
}

func TestAMalformedHandoffNeverReachesDecode(t *testing.T) {
	for name, mutate := range badHandoffs {
		t.Run(name, func(t *testing.T) {
			x := start(t, setup{prefill: enginesim.Config{Lease: time.Second}})
			x.p.Inject(enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Mutate: mutate, Count: -1})
			r := post(t, x.url, "/v1/completions", completion(longPrompt, ""))
			require.Equal(t, 502, r.status, r.body)
			_, code := r.fault(t, x.p, x.d)
			require.Equal(t, "transfer_missing", code)
			require.Empty(t, x.d.Requests())
			require.False(t, x.d.Dead())
		})
	}
}

func TestAnAbsentHandoffFallsBackToDecodeWhereThatIsThePolicy(t *testing.T) {
	for _, handoff := range []string{`null`, `"text"`, `[]`, `7`} {
		t.Run(handoff, func(t *testing.T) {
			x := start(t, setup{opts: []pdflow.Option{pdflow.WithFallback(config.FallbackDecode)}})
			x.p.Inject(
				enginesim.Fault{Kind: enginesim.FaultGarbage, Body: `{"id":"x","choices":[],"kv_transfer_params":` +
					handoff + `}`, Count: -1},
			)
			body := completion(longPrompt, "")
			r := post(t, x.url, "/v1/completions", body)
			require.Equal(t, alone(t, "/v1/completions", body), r.text(t))
			require.Equal(t, "fallback", r.header.Get("X-PD-Mode"))
			require.Len(t, x.p.Requests(), 1)
			require.Len(t, x.d.Requests(), 1)
			require.NotContains(t, string(x.d.Requests()[0].Body), "kv_transfer_params")
		})
	}
}

func TestDecodeBreaksBeforeItsFirstByte(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault enginesim.Fault
		code  string
		want  int
	}{
		{"reset", enginesim.Fault{Kind: enginesim.FaultReset, Leg: enginesim.LegDecode}, "decode_failed", 502},
		{
			"reset after the headers", enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode,
				AfterChunks: 0}, "decode_failed", 502,
		},
		{"port closed", enginesim.Fault{Kind: enginesim.FaultRefuse}, "decode_failed", 502},
		{"a redirect", enginesim.Fault{Kind: enginesim.FaultRedirect, Leg: enginesim.LegDecode, Location: "/v1/models"},
			"decode_failed", 502},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{decode: atOwnPorts(t, enginesim.Config{})})
			c.fault.Count = -1
			x.d.Inject(c.fault)
			r := post(t, x.url, "/v1/completions", completion(longPrompt, `"stream":true`))
			require.Equal(t, c.want, r.status, r.body)
			_, code := r.fault(t, x.p, x.d)
			require.Equal(t, c.code, code)
			require.Len(t, x.p.Requests(), 2, "each attempt needs a new prefill")
		})
	}
}

func TestANewPrefillServesAfterAFailedDecode(t *testing.T) {
	x := start(t, setup{})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultReset, Leg: enginesim.LegDecode, Count: 1})
	body := completion(longPrompt, "")
	require.Equal(t, alone(t, "/v1/completions", body), post(t, x.url, "/v1/completions", body).text(t))
	ids := map[string]bool{}
	for _, r := range x.d.Requests() {
		var b struct {
			Params struct {
				ID string `json:"remote_request_id"`
			} `json:"kv_transfer_params"`
		}
		require.NoError(t, json.Unmarshal(r.Body, &b))
		require.False(t, ids[b.Params.ID], "a handoff was sent twice")
		ids[b.Params.ID] = true
	}
	require.Len(t, ids, 2)
}

func TestDecode4xxPassesThrough(t *testing.T) {
	x := start(t, setup{})
	r := post(t, x.url, "/v1/completions", `{"model":"tiny","prompt":"`+longPrompt+`","max_tokens":16,"n":1,"stop":7}`)
	if r.status == 200 {
		x.d.Inject(
			enginesim.Fault{Kind: enginesim.FaultStatus, Status: 422,
				Body: `{"error":{"message":"no","type":"t","param":null,"code":422}}`, Leg: enginesim.LegDecode},
		)
		r = post(t, x.url, "/v1/completions", completion(longPrompt, ""))
		require.Equal(t, 422, r.status)
		require.JSONEq(t, `{"error":{"message":"no","type":"t","param":null,"code":422}}`, r.body)
	}
	require.GreaterOrEqual(t, r.status, 400)
	require.Less(t, r.status, 500)
}

func TestDecode5xxIsShownWhenNoAttemptServes(t *testing.T) {
	x := start(t, setup{})
	x.d.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Count: -1})
	r := post(t, x.url, "/v1/completions", completion(longPrompt, ""))
	require.Equal(t, 500, r.status)
	msg, _ := r.fault(t, x.p, x.d)
	require.Equal(t, "Internal server error", msg)
	require.Len(t, x.p.Requests(), 2, "a next attempt with a new prefill")
}

// vLLM reports a failed KV load of a stream inside status 200 (docs/protocols/nixl.md, recording 56): on chat after a
// chunk with the role.
func TestAStreamThatBeginsWithAnErrorIsA500(t *testing.T) {
	for path, body := range map[string]string{
		"/v1/completions": completion(longPrompt, `"stream":true`),
		"/v1/chat/completions": `{"model":"tiny","messages":[{"role":"user","content":"` + longPrompt +
			`"}],"max_tokens":8,"stream":true}`,
	} {
		t.Run(path, func(t *testing.T) {
			x := start(t, setup{})
			x.d.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Count: 1})
			require.Equal(t, alone(t, path, body), post(t, x.url, path, body).text(t), "the second attempt serves")

			x.d.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Count: -1})
			r := post(t, x.url, path, body)
			require.Equal(t, 500, r.status, r.body)
			msg, _ := r.fault(t, x.p, x.d)
			require.Equal(t, "Internal server error", msg)
		})
	}
}

func TestAStreamThatBreaksIsCut(t *testing.T) {
	for _, c := range []struct {
		name   string
		stream bool
		fault  enginesim.Fault
		chunks int // of the response, at least
	}{
		{"reset", true, enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode, AfterChunks: 4}, 4},
		{"killed", true, enginesim.Fault{Kind: enginesim.FaultKill, Leg: enginesim.LegDecode, AfterChunks: 4}, 4},
		{"terminated", true, enginesim.Fault{}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{decode: enginesim.Config{ITL: 5 * time.Millisecond}})
			if c.name == "terminated" {
				go func() {
					assert.Eventually(t, func() bool {
						s := x.flow.Sessions()
						return len(s) == 1 && s[0].Phase == "stream"
					}, 20*time.Second, time.Millisecond)
					x.d.Terminate()
				}()
			} else {
				x.d.Inject(c.fault)
			}
			r := post(t, x.url, "/v1/completions", `{"model":"tiny","prompt":"`+longPrompt+
				`","max_tokens":4000,"stream":true}`)
			require.Equal(t, 200, r.status)
			require.Error(t, r.err, "the cut stream looks whole: %s", r.body)
			require.NotContains(t, r.body, "[DONE]")
			require.GreaterOrEqual(t, strings.Count(r.body, "data: "), c.chunks, "what was read was not flushed")
			require.Len(t, x.p.Requests(), 1, "nothing is retried after the first byte")
			o := x.seen.list()
			require.Equal(t, pdflow.CodeStreamBroken, o[len(o)-1].Err.Code)
		})
	}
}

func TestPhasesThatRunOutOfTime(t *testing.T) {
	t.Parallel()
	const short = 250 * time.Millisecond // of the phase at hand: the others may take longer on a busy machine
	for _, c := range []struct {
		name   string
		limits config.Timeouts
		at     func(*pd) *enginesim.Engine
		fault  enginesim.Fault
	}{
		{"prefill", config.Timeouts{Prefill: short}, func(x *pd) *enginesim.Engine { return x.p },
			enginesim.Fault{Kind: enginesim.FaultStall}},
		{"decode's first byte", config.Timeouts{Decode: short}, func(x *pd) *enginesim.Engine { return x.d },
			enginesim.Fault{Kind: enginesim.FaultStall}},
		{"decode's first event", config.Timeouts{Decode: short}, func(x *pd) *enginesim.Engine { return x.d },
			enginesim.Fault{Kind: enginesim.FaultStallStream}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{opts: []pdflow.Option{pdflow.WithTimeouts(c.limits)}})
			c.fault.Count = -1
			c.at(x).Inject(c.fault)
			r := post(t, x.url, "/v1/completions", completion(longPrompt, `"stream":true`))
			require.Equal(t, 504, r.status, r.body)
			_, code := r.fault(t, x.p, x.d)
			require.Equal(t, "timeout", code)
			if n := len(x.p.Requests()); n != 0 || c.limits.Prefill == 0 { // P may be later than its limit
				require.Equal(t, 1, n, "a timeout is not retried")
			}
		})
	}
}

func TestASilentStreamIsCut(t *testing.T) {
	for limit := 250 * time.Millisecond; ; limit *= 4 {
		x := start(t, setup{opts: []pdflow.Option{pdflow.WithTimeouts(config.Timeouts{Idle: limit, Silence: limit})}})
		x.d.Inject(enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 3, Count: -1})
		r := post(t, x.url, "/v1/completions", completion(longPrompt, `"stream":true`))
		require.Error(t, r.err)
		n := strings.Count(r.body, "data: ")
		if n < 3 && limit < 10*time.Second {
			continue // D was slow before it fell silent
		}
		require.Equal(t, 3, n)
		return
	}
}

func TestASlowResponseThatGoesOnIsNeverCut(t *testing.T) {
	t.Parallel()
	short := config.Timeouts{}
	short.Decode, short.Idle = 2500*time.Millisecond, 2500*time.Millisecond // of a response of 3 s
	x := start(
		t, setup{decode: enginesim.Config{ITL: 200 * time.Millisecond},
			opts: []pdflow.Option{pdflow.WithTimeouts(short)}},
	)
	body := completion(longPrompt, `"stream":true`)
	require.Equal(t, alone(t, "/v1/completions", body), post(t, x.url, "/v1/completions", body).text(t))
}

func TestAnOldHandoffIsNotSent(t *testing.T) {
	limits := config.Timeouts{Handoff: time.Nanosecond}
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithTimeouts(limits)}})
	r := post(t, x.url, "/v1/completions", completion(longPrompt, ""))
	require.Equal(t, 502, r.status)
	_, code := r.fault(t, x.p, x.d)
	require.Equal(t, "handoff_expired", code)
	require.Empty(t, x.d.Requests())
}

func TestTheHandoffLimitFollowsTheLease(t *testing.T) {
	for lease, want := range map[string]time.Duration{`{}`: 25 * time.Second,
		`{"leaseDuration":"300s"}`: 295 * time.Second, `{"leaseDuration":"4s"}`: 2 * time.Second} {
		var o nixl.Options
		require.NoError(t, json.Unmarshal([]byte(lease), &o))
		c, err := nixl.New(&o)
		require.NoError(t, err)
		f, _ := newFlow(t, c, nil)
		require.Equal(t, want, f.HandoffLimit())
	}
}

// A client that leaves cancels whatever leg runs, at once, and no new leg is sent.
func TestAClientThatLeavesCancelsTheLeg(t *testing.T) {
	for _, c := range []struct {
		name string
		at   func(*pd) *enginesim.Engine
	}{
		{"prefill", func(x *pd) *enginesim.Engine { return x.p }},
		{"decode", func(x *pd) *enginesim.Engine { return x.d }},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := start(t, setup{prefill: enginesim.Config{Lease: time.Second}})
			c.at(x).Inject(enginesim.Fault{Kind: enginesim.FaultStall, Count: -1})
			ctx, cancel := context.WithCancel(context.Background())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions",
				strings.NewReader(completion(longPrompt, "")))
			require.NoError(t, err)
			req.Header.Set("Content-Type", "application/json")
			go func() {
				for len(c.at(x).Requests()) == 0 {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
			_, err = client.Do(req)
			require.ErrorIs(t, err, context.Canceled)
			require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 10*time.Second, time.Millisecond)
			require.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
			x.idle()
			if c.name == "prefill" {
				require.Empty(t, x.d.Requests(), "a new leg was sent after the client had left")
			}
		})
	}
}

func TestAClientThatLeavesAStreamAbortsDecode(t *testing.T) {
	x := start(t, setup{decode: enginesim.Config{ITL: 10 * time.Millisecond}})
	conn, err := net.Dial("tcp", strings.TrimPrefix(x.url, "http://"))
	require.NoError(t, err)
	body := `{"model":"tiny","prompt":"` + longPrompt + `","max_tokens":3000,"stream":true}`
	_, err = io.WriteString(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
		"Content-Length: "+itoa(len(body))+"\r\n\r\n"+body)
	require.NoError(t, err)
	_, err = bufio.NewReader(conn).ReadString('}')
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.Eventually(t, func() bool { return x.d.Stats().Aborted == 1 }, 20*time.Second, time.Millisecond,
		"decode goes on for nobody")
	require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 20*time.Second, time.Millisecond)
	require.Equal(t, pdflow.CodeClientGone, x.seen.list()[0].Err.Code)
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func TestBothContentLengthAndTransferEncoding(t *testing.T) {
	x := start(t, setup{})
	conn, err := net.Dial("tcp", strings.TrimPrefix(x.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	body := completion(longPrompt, "")
	smuggled := "POST /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n"
	_, err = io.WriteString(conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
		"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"+
		hex(len(body))+"\r\n"+body+"\r\n0\r\n\r\n"+smuggled)
	require.NoError(t, err)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, resp.Body)
	require.NoError(t, err)
	require.True(t, resp.Close || resp.StatusCode == 400)
	_, err = http.ReadResponse(r, nil)
	require.Error(t, err, "the connection went on after the clash")
}

func hex(n int) string {
	const digits = "0123456789abcdef"
	var s string
	for ; n > 0; n /= 16 {
		s = string(digits[n%16]) + s
	}
	return s
}

func TestTheEngineThatFailedIsAvoidedByTheNextAttempt(t *testing.T) {
	other, err := enginesim.Start(enginesim.Config{Connector: "nixl", KVRole: enginesim.RoleProducer})
	require.NoError(t, err)
	defer other.Close()
	x := start(t, setup{prefill: atOwnPorts(t, enginesim.Config{}),
		more: []discovery.Endpoint{endpoint(t, other.URL(), discovery.RolePrefill)}})
	x.p.Kill()
	body := completion(longPrompt, "")
	want := alone(t, "/v1/completions", body)
	for range 6 {
		require.Equal(t, want, post(t, x.url, "/v1/completions", body).text(t))
	}
	var rest time.Time // the end of the dead engine's cooldown, or a moment before
	for _, o := range x.seen.list() {
		switch {
		case o.Err == nil:
		case rest.IsZero():
			rest = o.Prefill.End.Add(time.Second)
		default:
			require.False(t, o.Session.CreatedAt.Before(rest), "the dead engine is on cooldown after its first failure")
		}
	}
}

func TestHTTPConnectorRelaysNothing(t *testing.T) {
	c, err := plainhttp.New(nil)
	require.NoError(t, err)
	x := start(t, setup{conn: c})
	body := completion(longPrompt, "")
	r := post(t, x.url, "/v1/completions", body)
	require.Equal(t, alone(t, "/v1/completions", body), r.text(t))
	require.Equal(t, body, string(x.d.Requests()[0].Body))
	require.Zero(t, x.d.Stats().ExternalKVTransfer)
	require.Error(t, x.d.CheckKV(), "decode computed the prompt itself, and the ledger says so")
}
