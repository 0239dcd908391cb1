// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// drainCases are about SIGTERM, which each rollout sends.
var drainCases = []Case{
	{ID: "drain/stream", Severity: Must, Process: true, Check: drainStream,
		Rule: "A stream that runs at SIGTERM ends whole."},
	{ID: "drain/prefill", Severity: Must, Process: true, Check: drainPrefill,
		Rule: "A request whose prefill runs at SIGTERM is still answered."},
	{ID: "drain/new-requests", Severity: Should, Process: true, Check: drainNew,
		Rule: "A new request during the drain is answered, gets 503, or cannot connect; it does not hang or break."},
	{ID: "drain/exit", Severity: Should, Process: true, Check: drainExit,
		Rule: "Without requests the process ends within 10 s after SIGTERM, with status 0."},
}

func drainStream(ctx context.Context, s *Scene) error {
	content := body("stream", true, "max_tokens", 500)
	t, err := s.begun(ctx, content, 3)
	if err != nil {
		return err
	}
	defer t.leave()
	if err := s.gateway.Terminate(); err != nil {
		return err
	}
	if err := s.whole(ctx, t.end(), completions, content); err != nil {
		return err
	}
	return s.clean(ctx)
}

func drainPrefill(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultDelay, Delay: soon})
	content := body()
	ended := make(chan answer, 1)
	go func() { ended <- s.post(ctx, completions, content) }()
	reached := s.reached(s.P)
	if err := s.gateway.Terminate(); err != nil {
		return err
	}
	a := <-ended
	if !reached {
		return breach("a prefill leg", "none: %s", a)
	}
	if err := s.whole(ctx, a, completions, content); err != nil {
		return err
	}
	return s.clean(ctx)
}

func drainNew(ctx context.Context, s *Scene) error {
	t, err := s.begun(ctx, body("stream", true, "max_tokens", 500), 3)
	if err != nil {
		return err
	}
	defer t.leave()
	if err := s.gateway.Terminate(); err != nil {
		return err
	}
	time.Sleep(200 * time.Millisecond)
	fresh := &Scene{gateway: s.gateway, alone: s.alone, client: &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true}}}
	asking, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	content := body()
	a := fresh.post(asking, completions, content)
	switch {
	case asking.Err() != nil:
		return breach("an answer or a refusal", "none within 5 s")
	case a.status == 0, a.status == http.StatusServiceUnavailable:
		return nil
	}
	return s.whole(ctx, a, completions, content)
}

func drainExit(ctx context.Context, s *Scene) error {
	s.client.CloseIdleConnections()
	if err := s.gateway.Terminate(); err != nil {
		return err
	}
	select {
	case <-s.gateway.Exited:
		if code := s.gateway.ExitCode(); code != 0 {
			return breach("exit status 0", "%d", code)
		}
		return nil
	case <-time.After(10 * time.Second):
		return breach("the process to end within 10 s", "it still runs")
	case <-ctx.Done():
		return ctx.Err()
	}
}
