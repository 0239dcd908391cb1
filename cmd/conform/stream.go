// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// streamCases are about what the client reads.
var streamCases = []Case{
	{ID: "stream/flush", Severity: Must, Check: flushed,
		Rule: "Each chunk reaches the client within 1 s, while D still decodes."},
	{ID: "stream/cut", Severity: Must, Check: cut(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3}),
		Rule: "D breaks in the middle of a stream: the client sees a broken connection or an error event, never a " +
			"clean end."},
	{ID: "stream/cut-keeps-chunks", Severity: Should, Check: cutKeeps,
		Rule: "What D had sent before it broke reaches the client."},
	{ID: "stream/cut-kill", Severity: Must, Check: cut(enginesim.Fault{Kind: enginesim.FaultKill, AfterChunks: 3}),
		Rule: "D's process is killed in the middle of a stream: the same."},
	{ID: "stream/cut-unary", Severity: Must, Check: cutUnary,
		Rule: "D breaks in the middle of a response that is not streamed: 5xx, a broken connection, or the right " +
			"answer of a further attempt; never half an answer that looks whole."},
	{ID: "stream/error-event", Severity: Must, Check: errorEvent,
		Rule: "D cannot load the KV of a stream (200 with an error event): the client sees an error, or the right " +
			"answer of a new prefill."},
	{ID: "stream/usage", Severity: Must, Check: usage,
		Rule: "The usage is D's, with the whole prompt and all tokens: it is billed."},
	{ID: "stream/bytes", Severity: Should, Check: streamBytes,
		Rule: "D's events reach the client byte for byte."},
	{ID: "stream/content-type", Severity: Should, Check: contentType,
		Rule: "A stream has the Content-Type text/event-stream: clients choose their parser by it."},
	{ID: "stream/silence", Severity: Must, Check: silence,
		Rule: "A stream that is silent for 3 s goes on afterwards: engines that are busy do that."},
}

func flushed(ctx context.Context, s *Scene) error {
	everywhere(s.D, enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 3})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	read := make(chan error, 1)
	go func() {
		t, err := s.open(ctx, completions, body("stream", true))
		if err == nil {
			defer t.leave()
			err = t.next(3)
		}
		read <- err
	}()
	select {
	case err := <-read:
		if err != nil {
			return breach("three chunks", "%s", cause(err))
		}
		return nil
	case <-time.After(2 * soon): // a second for both legs, one for the chunks
		cancel()
		if err := <-read; err == nil {
			return breach("three chunks within 1 s", "they came later")
		}
		return breach("three chunks within 1 s", "less")
	}
}

func cut(f enginesim.Fault) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		everywhere(s.D, f)
		a := s.post(ctx, completions, body("stream", true, "max_tokens", 20))
		if a.status != http.StatusOK && a.status < http.StatusInternalServerError && a.status != 0 {
			return breach("a cut stream or 5xx", "%s", a)
		}
		if a.status == http.StatusOK && a.err == nil && !a.failedEvent() {
			return breach("a broken connection or an error event", "a clean end: %s", a)
		}
		return nil
	}
}

func cutKeeps(ctx context.Context, s *Scene) error {
	everywhere(s.D, enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
	a := s.post(ctx, completions, body("stream", true, "max_tokens", 20))
	if n := len(a.events()); n < 3 {
		return breach("the three events that D had sent", "%d", n)
	}
	return nil
}

func cutUnary(ctx context.Context, s *Scene) error {
	for _, e := range s.D {
		e.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, Leg: enginesim.LegDecode})
	}
	content := body()
	a := s.post(ctx, completions, content)
	switch {
	case a.broken() || a.status >= http.StatusInternalServerError:
		return nil
	case a.status == http.StatusOK:
		return s.whole(ctx, a, completions, content)
	}
	return breach("5xx, a broken connection, or the right answer", "%s", a)
}

func errorEvent(ctx context.Context, s *Scene) error {
	for _, e := range s.D {
		e.Inject(enginesim.Fault{Kind: enginesim.FaultLoadFailure, Leg: enginesim.LegDecode})
	}
	content := body("stream", true)
	a := s.post(ctx, completions, content)
	if a.broken() || a.failedEvent() || a.status >= http.StatusInternalServerError {
		return nil
	}
	return s.whole(ctx, a, completions, content)
}

func usage(ctx context.Context, s *Scene) error {
	for _, streamed := range []bool{false, true} {
		pairs := []any{"max_tokens", 9, "prompt", prompt(123)}
		if streamed {
			pairs = append(pairs, "stream", true, "stream_options", map[string]bool{"include_usage": true})
		}
		content := body(pairs...)
		a := s.post(ctx, completions, content)
		if err := s.whole(ctx, a, completions, content); err != nil {
			return err
		}
		found := false
		for _, c := range a.chunks() {
			if c.Usage == nil {
				continue
			}
			found = true
			if c.Usage.PromptTokens != 123 || c.Usage.CompletionTokens != 9 {
				return breach("a usage of 123 and 9 tokens", "%d and %d", c.Usage.PromptTokens,
					c.Usage.CompletionTokens)
			}
		}
		if !found {
			return breach("a usage", "none")
		}
	}
	return nil
}

// cachedTokens asks for the same prompt again and again. P's of vLLM before 0.31 do not tell D what they had in their
// cache, so that D counts all that it takes over.
func cachedTokens(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Mutate: func(handoff map[string]any) {
		delete(handoff, "remote_prefill_cached_tokens")
	}})
	text, told := prompt(300), false
	had := map[*enginesim.Engine]bool{}
	for i := range 6 {
		pairs := []any{"prompt", text, "stream", i%2 == 1}
		if i%2 == 1 {
			pairs = append(pairs, "stream_options", map[string]bool{"include_usage": true})
		}
		s.mark()
		content := body(pairs...)
		a := s.post(ctx, completions, content)
		if err := s.whole(ctx, a, completions, content); err != nil {
			return err
		}
		warm := false
		for _, p := range s.P {
			if len(s.legs([]*enginesim.Engine{p})) > 0 {
				warm, had[p] = had[p], true
			}
		}
		for _, c := range a.chunks() {
			if c.Usage == nil || c.Usage.Details.Cached == nil {
				continue
			}
			told = true
			if n := *c.Usage.Details.Cached; (n > 0) != warm || n >= c.Usage.PromptTokens {
				return breach("the count of P's cache", "%d of %d tokens, P had seen the prompt: %v", n,
					c.Usage.PromptTokens, warm)
			}
		}
	}
	if !told {
		return errSkip("the usage tells no cached tokens")
	}
	return nil
}

// ownOfResponse differs from one response to the next.
var ownOfResponse = regexp.MustCompile(`"id": ?"[^"]*"|"created": ?\d+`)

func streamBytes(ctx context.Context, s *Scene) error {
	content := body("stream", true, "stream_options", map[string]bool{"include_usage": true}, "max_tokens", 12)
	alone := &Scene{gateway: &Instance{URL: s.alone.URL()}, client: s.client}
	want, got := alone.post(ctx, completions, content), s.post(ctx, completions, content)
	if got.status != http.StatusOK || got.err != nil {
		return breach("a stream", "%s", got)
	}
	w := strings.SplitAfter(ownOfResponse.ReplaceAllString(string(want.body), ""), "\n\n")
	g := strings.SplitAfter(ownOfResponse.ReplaceAllString(string(got.body), ""), "\n\n")
	if len(w) != len(g) {
		return breach("the bytes that D sends", "another number of events (%d, expected %d)", len(g), len(w))
	}
	for i := range w {
		if w[i] != g[i] {
			return breach("the bytes that D sends", "others in event %d of %d", i+1, len(w)-1)
		}
	}
	return nil
}

func contentType(ctx context.Context, s *Scene) error {
	a := s.post(ctx, completions, body("stream", true))
	if kind := a.header.Get("Content-Type"); !strings.HasPrefix(kind, "text/event-stream") {
		return breach("text/event-stream", "%q", kind)
	}
	return nil
}

func silence(ctx context.Context, s *Scene) error {
	everywhere(s.D, enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 3 * time.Second, Leg: enginesim.LegDecode})
	content := body("stream", true)
	return s.whole(ctx, s.post(ctx, completions, content), completions, content)
}
