// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// noHandoff is a response of P that names no KV.
const noHandoff = `{"id":"cmpl-1","object":"text_completion","created":1,"model":"tiny","choices":[{"index":0,` +
	`"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":200,"completion_tokens":1,"total_tokens":201}`

// couplingCases are about what joins the two legs.
var couplingCases = []Case{
	{ID: "coupling/handoff-null", Severity: Must,
		Check: onAllP(enginesim.Fault{Kind: enginesim.FaultGarbage, Body: noHandoff + `,"kv_transfer_params":null}`}),
		Rule: "P answers 200 with kv_transfer_params null: the client gets an error, or KV of a further prefill; " +
			"D never computes the prompt silently."},
	{ID: "coupling/handoff-absent", Severity: Must,
		Check: onAllP(enginesim.Fault{Kind: enginesim.FaultGarbage, Body: noHandoff + `}`}),
		Rule:  "The same where the member is missing, as with an engine that runs without its connector."},
	{ID: "coupling/handoff-incomplete", Severity: Should, Check: incomplete,
		Rule: "A handoff without remote_block_ids does not reach D: vLLM's engine core dies of it."},
	{ID: "coupling/handoff-null-members", Severity: Should, Check: nullMembers,
		Rule: "Each member of the handoff is null in turn: null is absent, so that a handoff whose block ids, " +
			"engine, request, host or port is null does not reach D, and no answer is wrong or D's own work."},
	{ID: "coupling/prefill-garbage", Severity: Must, Check: onAllP(enginesim.Fault{Kind: enginesim.FaultGarbage}),
		Rule: "P answers 200 with what is not JSON: the same."},
	{ID: "coupling/handoff-null-once", Severity: Must,
		Check: onOneP(enginesim.Fault{Kind: enginesim.FaultGarbage, Body: noHandoff + `,"kv_transfer_params":null}`}),
		Rule:  "The same where only one response of P is wrong."},
	{ID: "coupling/concurrent", Severity: Must, Check: concurrent,
		Rule: "64 requests at a time: each gets its own answer, and each handoff is used exactly once."},
	{ID: "coupling/streams", Severity: Must, Check: answered(completions, func(...any) string {
		return body("stream", true)
	}), Rule: "A stream's KV comes from P, too, and its handoff is used exactly once."},
	{ID: "coupling/same-prompt", Severity: Must, Check: samePrompt,
		Rule: "The same prompt sent twice has a handoff each time; nothing of the first answer is used again."},
}

// honest is a breach if a request that met a fault of P has a wrong answer, one that D computed itself, or is blamed on
// the client.
func (s *Scene) honest(ctx context.Context, a answer, content string) error {
	const want = "an error with status 5xx, or an answer with the KV of another prefill"
	if a.status == http.StatusOK && a.err == nil && !a.failedEvent() {
		if err := s.whole(ctx, a, completions, content); err != nil {
			return err
		}
	} else if a.status != 0 && a.status < http.StatusInternalServerError && a.err == nil && !a.failedEvent() {
		return breach(want, "%s", a)
	}
	if found := s.ledger(ctx); strings.Contains(found, "computed again") {
		return breach(want, "%s, and D computed the prompt itself", a)
	}
	return nil
}

func onAllP(f enginesim.Fault) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		everywhere(s.P, f)
		content := body()
		return s.honest(ctx, s.post(ctx, completions, content), content)
	}
}

// onOneP sends requests until the fault has struck, since a gateway chooses P.
func onOneP(f enginesim.Fault) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		s.P[0].Inject(f)
		for range 6 {
			content := body()
			if err := s.honest(ctx, s.post(ctx, completions, content), content); err != nil {
				return err
			}
		}
		if len(s.legs(s.P[:1])) == 0 {
			return errSkip("no request reached the first prefill engine")
		}
		return nil
	}
}

func incomplete(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultMutateHandoff, Mutate: func(handoff map[string]any) {
		delete(handoff, "remote_block_ids")
	}})
	s.post(ctx, completions, body())
	for _, d := range s.legs(s.D) {
		if params, ok := d.members["kv_transfer_params"].(map[string]any); ok && params["remote_block_ids"] == nil {
			return breach("no decode leg with such a handoff", "one was sent")
		}
	}
	return nil
}

// needed are the members without which vLLM's decode engine dies or hangs (docs/protocols/nixl.md, section 3).
var needed = []string{"remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port"}

func nullMembers(ctx context.Context, s *Scene) error {
	for _, name := range append(needed, "do_remote_prefill", "do_remote_decode", "tp_size", "dcp_size", "pp_size",
		"remote_num_tokens", "transfer_mode", "remote_prefill_cached_tokens") {
		for _, p := range s.P {
			p.ClearFaults()
		}
		everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultMutateHandoff,
			Mutate: func(handoff map[string]any) { handoff[name] = nil }})
		s.mark()
		content := body()
		if err := s.honest(ctx, s.post(ctx, completions, content), content); err != nil {
			return err
		}
		for _, d := range s.legs(s.D) {
			params, ok := d.members["kv_transfer_params"].(map[string]any)
			if ok && params[name] == nil && slices.Contains(needed, name) {
				return breach("no decode leg whose handoff has "+name+" null", "one was sent")
			}
		}
	}
	return nil
}

func concurrent(ctx context.Context, s *Scene) error {
	type exchange struct {
		content string
		answer  answer
	}
	all := make([]exchange, 64)
	var group sync.WaitGroup
	for i := range all {
		all[i].content = body("max_tokens", 8+i%3, "stream", i%2 == 0)
		group.Go(func() { all[i].answer = s.post(ctx, completions, all[i].content) })
	}
	group.Wait()
	for _, x := range all {
		if err := s.whole(ctx, x.answer, completions, x.content); err != nil {
			return err
		}
	}
	return s.clean(ctx)
}

func samePrompt(ctx context.Context, s *Scene) error {
	content := body()
	for range 2 {
		if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
			return err
		}
	}
	if n := len(s.legs(s.P)); n != 2 {
		return breach("a prefill leg for each", "%d", n)
	}
	return s.clean(ctx)
}

// retryCases are about engines that refuse or fail before the client has anything.
var retryCases = []Case{
	{ID: "retry/prefill-400", Severity: Must, Check: prefillRefuses,
		Rule: "P's 400 reaches the client as 4xx, and D is not asked: the request is wrong, not the engine."},
	{ID: "retry/prefill-400-text", Severity: Should, Check: prefillRefusesText,
		Rule: "The text of P's 400 reaches the client, who needs it to mend the request."},
	{ID: "retry/prefill-400-once", Severity: Should, Check: prefillRefusesOnce,
		Rule: "P's 400 is not tried at other engines: they would refuse it, too."},
	{ID: "retry/prefill-500", Severity: Must, Check: onAllP(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500}),
		Rule: "All prefill engines answer 500: the client gets 5xx; D never computes the prompt silently."},
	{ID: "retry/prefill-500-once", Severity: Must,
		Check: onOneP(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500}),
		Rule:  "P answers 500 once: the request is prefilled elsewhere or fails with 5xx; D never computes it."},
	{ID: "retry/prefill-reset", Severity: Must, Check: onOneP(enginesim.Fault{Kind: enginesim.FaultReset}),
		Rule: "P breaks the connection before it answers: the same."},
	{ID: "retry/prefill-refused", Severity: Should, Check: refused(func(s *Scene) *enginesim.Engine { return s.P[0] }),
		Rule: "One of two prefill engines refuses connections: requests go to the other, none is lost."},
	{ID: "retry/prefill-all-refused", Severity: Must, Check: allRefused,
		Rule: "All prefill engines refuse connections: 5xx within 15 s; D never computes the prompt silently."},
	{ID: "retry/decode-refused", Severity: Should, Check: refused(func(s *Scene) *enginesim.Engine { return s.D[0] }),
		Rule: "One of two decode engines refuses connections: requests go to the other, none is lost."},
	{ID: "retry/decode-500", Severity: Must,
		Check: decodeFails(enginesim.Fault{Kind: enginesim.FaultStatus, Status: 500}),
		Rule: "D answers 500: a further attempt has a new prefill. The same handoff is not sent twice, since its KV " +
			"may be released."},
	{ID: "retry/decode-load-failure", Severity: Must, Check: decodeFails(enginesim.Fault{
		Kind: enginesim.FaultLoadFailure}), Rule: "D cannot load the KV (500): the same."},
	{ID: "retry/decode-400", Severity: Should, Check: decodeRefuses,
		Rule: "D's 400 reaches the client as 4xx, with its text."},
	{ID: "retry/rate-limit", Severity: Should, Check: busy(http.StatusTooManyRequests),
		Rule: "429 with Retry-After of all prefill engines reaches the client, who is to wait."},
	{ID: "retry/overload", Severity: Should, Check: busy(http.StatusServiceUnavailable),
		Rule: "503 of all prefill engines reaches the client as 5xx with Retry-After."},
	{ID: "retry/recovers", Severity: Should, Check: recovers,
		Rule: "After faults of all engines have ended, requests are served again within 15 s."},
}

var badRequest = enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusBadRequest,
	Body: `{"error":{"message":"conform: temperature is wrong","type":"BadRequestError","param":null,"code":400}}`}

func prefillRefuses(ctx context.Context, s *Scene) error {
	everywhere(s.P, badRequest)
	a := s.post(ctx, completions, body())
	if a.status < 400 || a.status >= 500 {
		return breach("a status of 4xx", "%s", a)
	}
	if n := len(s.legs(s.D)); n > 0 {
		return breach("no decode leg", "%d", n)
	}
	return nil
}

func prefillRefusesText(ctx context.Context, s *Scene) error {
	everywhere(s.P, badRequest)
	if a := s.post(ctx, completions, body()); !strings.Contains(string(a.body), "conform: temperature is wrong") {
		return breach("P's message in the response", "%s", a)
	}
	return nil
}

func prefillRefusesOnce(ctx context.Context, s *Scene) error {
	everywhere(s.P, badRequest)
	s.post(ctx, completions, body())
	if n := len(s.legs(s.P)); n != 1 {
		return breach("one prefill leg", "%d", n)
	}
	return nil
}

func refused(choose func(*Scene) *enginesim.Engine) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		choose(s).Inject(enginesim.Fault{Kind: enginesim.FaultRefuse})
		for range 6 {
			content := body()
			if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
				return err
			}
		}
		return nil
	}
}

func allRefused(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultRefuse})
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	content := body()
	a := s.post(ctx, completions, content)
	if ctx.Err() != nil {
		return breach("an error within 15 s", "no response")
	}
	return s.honest(context.WithoutCancel(ctx), a, content)
}

// decodeFails lets D fail once, at whichever engine comes first.
func decodeFails(f enginesim.Fault) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		f.Leg = enginesim.LegDecode
		for _, e := range s.D {
			e.Inject(f)
		}
		content := body()
		a := s.post(ctx, completions, content)
		if a.status == http.StatusOK {
			if err := s.whole(ctx, a, completions, content); err != nil {
				return err
			}
		} else if a.status < http.StatusInternalServerError {
			return breach("a status of 5xx, or 200 after a new prefill", "%s", a)
		}
		var seen []string
		for _, d := range s.legs(s.D) {
			params, ok := d.members["kv_transfer_params"].(map[string]any)
			id, _ := params["remote_request_id"].(string)
			if !ok || id == "" {
				return breach("each decode leg with a handoff", "one without")
			}
			if slices.Contains(seen, id) {
				return breach("a new prefill for each decode leg", "a handoff that was sent twice")
			}
			seen = append(seen, id)
		}
		return nil
	}
}

func decodeRefuses(ctx context.Context, s *Scene) error {
	everywhere(s.D, badRequest)
	a := s.post(ctx, completions, body())
	if a.status < 400 || a.status >= 500 || !strings.Contains(string(a.body), "conform: temperature is wrong") {
		return breach("a status of 4xx with D's message", "%s", a)
	}
	return nil
}

func busy(status int) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultStatus, Status: status,
			Header: http.Header{"Retry-After": {"7"}}})
		a := s.post(ctx, completions, body())
		right := a.status == status
		if status >= http.StatusInternalServerError {
			right = a.status >= http.StatusInternalServerError
		}
		if !right || a.header.Get("Retry-After") == "" {
			return breach("the engines' status with Retry-After", "%s, Retry-After %q", a, a.header.Get("Retry-After"))
		}
		return nil
	}
}

// recovery is how long a gateway may rest engines that had faults. Tests use less.
var recovery = 15 * time.Second

func recovers(ctx context.Context, s *Scene) error {
	everywhere(s.engines(), enginesim.Fault{Kind: enginesim.FaultStatus, Status: http.StatusInternalServerError})
	for range 8 {
		s.post(ctx, completions, body())
	}
	for _, e := range s.engines() {
		e.ClearFaults()
	}
	var a answer
	for until := time.Now().Add(recovery); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		content := body()
		if a = s.post(ctx, completions, content); a.status == http.StatusOK {
			return s.whole(ctx, a, completions, content)
		}
	}
	return breach("status 200 within 15 s", "%s", a)
}
