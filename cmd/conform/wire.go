// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/enginesim"
)

// wireCases are about what the engines receive.
var wireCases = []Case{
	{ID: "wire/completions", Severity: Must, Check: answered(completions, body),
		Rule: "A completion is prefilled by P and decoded by D, with the text of one engine alone."},
	{ID: "wire/chat", Severity: Must, Check: answered(chats, chat),
		Rule: "A chat is prefilled by P and decoded by D, with the text of one engine alone."},
	{ID: "wire/prefill-one-token", Severity: Must, Check: oneToken(completions, "max_tokens"),
		Rule: "P's leg asks for one token: more would be decoded twice."},
	{ID: "wire/max-completion-tokens", Severity: Must, Check: oneToken(chats, "max_completion_tokens"),
		Rule: "A chat's max_completion_tokens is 1 for P and the client's own for D: vLLM prefers it to max_tokens."},
	{ID: "wire/prefill-not-streamed", Severity: Must, Check: notStreamed,
		Rule: "P's leg is not streamed and has no stream_options, which vLLM refuses without stream; D has both."},
	{ID: "wire/min-tokens", Severity: Must, Check: minTokens,
		Rule: "The client's min_tokens reaches D only: vLLM refuses P's leg if it is above max_tokens."},
	{ID: "wire/handoff", Severity: Must, Check: relayed(nil),
		Rule: "P's kv_transfer_params reach D with every member and value, since they say which KV to read."},
	{ID: "wire/handoff-unknown-members", Severity: Must,
		Check: relayed(map[string]any{"x_new": map[string]any{"a": []any{"é\u0001\U0001F600", nil, 2.5, true}}}),
		Rule:  "Members of the handoff that the gateway does not know reach D, too: releases of vLLM add members."},
	{ID: "wire/handoff-integers", Severity: Must,
		Check: relayed(map[string]any{"x_id": int64(9007199254740993)}),
		Rule:  "Integers above 2^53 in the handoff reach D exactly: a rounded id names another request's KV."},
	{ID: "wire/engine-options", Severity: Must, Check: options(map[string]any{"seed": 7, "top_k": 5, "cache_salt": "s",
		"ignore_eos": true, "logit_bias": map[string]any{"5": 1.5}, "priority": 3}),
		Rule: "Options that vLLM knows beyond OpenAI's API reach D, since the answer depends on them."},
	{ID: "wire/prefill-options", Severity: Must, Check: onPrefill,
		Rule: "What changes a prompt's KV reaches P, too (cache_salt): P and D must agree on it."},
	{ID: "wire/unknown-members", Severity: Should, Check: options(map[string]any{"x_new": map[string]any{"a": 1}}),
		Rule: "Members that the gateway does not know reach D: releases of vLLM add options."},
	{ID: "wire/integers", Severity: Must, Check: options(map[string]any{"seed": json.Number("9007199254740993")}),
		Rule: "Integers above 2^53 in the client's body reach D exactly; a rounded seed gives another answer."},
	{ID: "wire/escapes", Severity: Must, Check: escapes,
		Rule: "Prompts with escapes, control characters and characters beyond the BMP have their right text."},
	{ID: "wire/token-prompt", Severity: Should, Check: func(ctx context.Context, s *Scene) error {
		_, _, _, err := s.ask(ctx, completions, body("prompt", []int{1, 2, 3, 4, 5, 6, 7, 8, 9}))
		return err
	}, Rule: "A prompt of token ids is prefilled and decoded as a text is."},
	{ID: "wire/large-prompt", Severity: Must, Check: func(ctx context.Context, s *Scene) error {
		_, _, _, err := s.ask(ctx, completions, body("prompt", prompt(1<<20)))
		return err
	}, Rule: "A prompt of 1 MB is served: contexts of long documents are that large."},
}

func answered(path string, request func(...any) string) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		if _, _, _, err := s.ask(ctx, path, request()); err != nil {
			return err
		}
		return s.clean(ctx)
	}
}

func oneToken(path, limit string) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		content := body("max_tokens", nil, limit, 12)
		if path == chats {
			content = chat("max_tokens", nil, limit, 12)
		}
		_, _, d, err := s.ask(ctx, path, content)
		switch {
		case err != nil:
			return err
		case s.made(s.P) > 1:
			return breach("P to make one token", "%d", s.made(s.P))
		case number(d.members[limit]) != "12":
			return breach("D's "+limit+" to be the client's", "%v", d.members[limit])
		}
		return nil
	}
}

func notStreamed(ctx context.Context, s *Scene) error {
	_, p, d, err := s.ask(ctx, completions, body("stream", true, "stream_options", map[string]bool{
		"include_usage": true}))
	if err != nil {
		return err
	}
	if p.members["stream"] == true || p.members["stream_options"] != nil {
		return breach("P's leg without stream and stream_options", "stream %v, stream_options %v",
			p.members["stream"], p.members["stream_options"])
	}
	if d.members["stream"] != true || d.members["stream_options"] == nil {
		return breach("D's leg with stream and stream_options", "stream %v, stream_options %v", d.members["stream"],
			d.members["stream_options"])
	}
	return nil
}

func minTokens(ctx context.Context, s *Scene) error {
	_, p, d, err := s.ask(ctx, completions, body("min_tokens", 5))
	if err != nil {
		return err
	}
	if n := number(p.members["min_tokens"]); n != "" && n != "0" && n != "1" {
		return breach("P's min_tokens to be at most 1", "%s", n)
	}
	if n := number(d.members["min_tokens"]); n != "5" {
		return breach("D's min_tokens to be the client's", "%q", n)
	}
	return nil
}

// relayed compares what D got with what P gave, and adds members to P's handoff.
func relayed(more map[string]any) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		given := make(chan []byte, 10)
		everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Leg: enginesim.LegPrefill,
			Mutate: func(handoff map[string]any) {
				maps.Copy(handoff, more)
				text, _ := json.Marshal(handoff) // it came as JSON
				given <- text
			}})
		_, _, d, err := s.ask(ctx, completions, body())
		if err != nil {
			return err
		}
		want, got := members(<-given), d.members["kv_transfer_params"]
		object, ok := got.(map[string]any)
		if !ok {
			return breach("D's leg with P's kv_transfer_params", "none")
		}
		for name, value := range want {
			if other, has := object[name]; !has {
				return breach("member "+name+" of the handoff to reach D", "it is missing")
			} else if !same(value, other) {
				return breach("member "+name+" of the handoff to reach D unchanged", "it is changed to %v", other)
			}
		}
		return nil
	}
}

// options compares members of D's leg with the client's.
func options(given map[string]any) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		var pairs []any
		for name, value := range given {
			pairs = append(pairs, name, value)
		}
		content := body(pairs...)
		a := s.post(ctx, completions, content)
		if a.status != http.StatusOK || a.err != nil {
			return breach("a whole response with status 200", "%s", a)
		}
		_, d, err := s.pair()
		if err != nil {
			return err
		}
		want := members([]byte(content))
		for name := range given {
			if !same(want[name], d.members[name]) {
				return breach("the client's "+name+" at D", "%v", d.members[name])
			}
		}
		return nil
	}
}

func onPrefill(ctx context.Context, s *Scene) error {
	_, p, _, err := s.ask(ctx, completions, body("cache_salt", "s1"))
	if err == nil && p.members["cache_salt"] != "s1" {
		err = breach("the client's cache_salt at P", "%v", p.members["cache_salt"])
	}
	return err
}

func escapes(ctx context.Context, s *Scene) error {
	content := strings.Replace(body("prompt", "@"), `"@"`,
		`"a\u00e9\ud83d\ude00\/\\\"\t\u0001\u2028é😀 `+prompt(50)+`"`, 1)
	_, _, _, err := s.ask(ctx, completions, content)
	return err
}

// headerCases are about what goes with the bodies.
var headerCases = []Case{
	{ID: "wire/authorization", Severity: Should, Check: header("Authorization", "Bearer conform"),
		Rule: "Authorization reaches both engines, which may have keys of their own (--api-key)."},
	{ID: "wire/request-id", Severity: Should, Check: header("X-Request-Id", "conform-1"),
		Rule: "The client's X-Request-Id reaches both engines, so that one id finds a request in all logs."},
	{ID: "wire/traceparent", Severity: Should, Check: traceparent,
		Rule: "Both legs belong to the trace of the client's traceparent."},
	{ID: "wire/hop-by-hop", Severity: Should, Check: hopByHop,
		Rule: "Headers that Connection names stay between client and gateway (RFC 9110, section 7.6.1)."},
	{ID: "wire/health", Severity: Should, Check: health,
		Rule: "The health path (--ready) answers 200 at the clients' address: load balancers in front ask there."},
	{ID: "wire/models", Severity: Should, Check: func(ctx context.Context, s *Scene) error {
		if ok, what := s.answers(ctx, http.MethodGet, "/v1/models", ""); !ok {
			return breach("GET /v1/models to answer with 200", "%s", what)
		}
		return nil
	}, Rule: "GET /v1/models answers: clients of OpenAI's API ask for it first."},
}

func health(ctx context.Context, s *Scene) error {
	if s.ready == "" {
		return errSkip("the gateway was started without a health path (--ready)")
	}
	if ok, what := s.answers(ctx, http.MethodGet, s.ready, ""); !ok {
		return breach("GET of it to answer with 200", "%s", what)
	}
	return nil
}

func header(name, value string) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		_, p, d, err := s.ask(ctx, completions, body(), name, value)
		if err == nil && (p.Header.Get(name) != value || d.Header.Get(name) != value) {
			err = breach("the client's "+name+" at P and D", "P: %v, D: %v", p.Header.Get(name) == value,
				d.Header.Get(name) == value)
		}
		return err
	}
}

func traceparent(ctx context.Context, s *Scene) error {
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	_, p, d, err := s.ask(ctx, completions, body(), "Traceparent", "00-"+trace+"-00f067aa0ba902b7-01")
	if err != nil {
		return err
	}
	inP := strings.Contains(p.Header.Get("Traceparent"), trace)
	inD := strings.Contains(d.Header.Get("Traceparent"), trace)
	if !inP || !inD {
		return breach("the client's trace at P and D", "P: %v, D: %v", inP, inD)
	}
	return nil
}

func hopByHop(ctx context.Context, s *Scene) error {
	_, p, d, err := s.ask(ctx, completions, body(), "Connection", "X-Hop", "X-Hop", "1", "Te", "trailers")
	if err != nil {
		return err
	}
	for _, l := range []leg{p, d} {
		if l.Header.Get("X-Hop") != "" || slices.ContainsFunc(l.Header.Values("Connection"), func(v string) bool {
			return strings.Contains(strings.ToLower(v), "x-hop")
		}) {
			return breach("no header that Connection named at the engines", "it was sent on")
		}
	}
	return nil
}
