// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// cancelCases are about clients that leave. Engines that go on for nobody are the load that kills a busy fleet.
var cancelCases = []Case{
	{ID: "cancel/prefill", Severity: Must, Check: func(ctx context.Context, s *Scene) error {
		return s.leavesWhile(ctx, s.P, body("stream", false))
	}, Rule: "The client leaves while P computes: P's leg ends within 1 s."},
	{ID: "cancel/prefill-no-decode", Severity: Must, Check: noDecode,
		Rule: "The client leaves while P computes: D is not asked, and no KV is left for nobody."},
	{ID: "cancel/decode-waiting", Severity: Must, Check: func(ctx context.Context, s *Scene) error {
		return s.leavesWhile(ctx, s.D, body("stream", true))
	}, Rule: "The client leaves while its request waits in D's queue: D's leg ends within 1 s."},
	{ID: "cancel/stream", Severity: Must, Check: leavesStream,
		Rule: "The client leaves a stream: D's leg ends within 1 s, and its KV is free."},
	{ID: "cancel/unary", Severity: Must, Check: leavesUnary,
		Rule: "The client leaves while D decodes a response that is not streamed: the same."},
	{ID: "cancel/silent-stream", Severity: Must, Check: leavesSilent,
		Rule: "The client leaves a stream while D is silent, so that no write can fail: the same."},
	{ID: "cancel/many", Severity: Must, Check: leaveMany,
		Rule: "16 clients leave at different moments: each handoff is used once or was never made, no KV stays."},
}

// within1s is a breach if engines still work when their second is over.
func (s *Scene) within1s(ctx context.Context) error {
	if s.idle(ctx, soon) != nil {
		return breach("the engines to be idle within 1 s", "they still work for the client that has left")
	}
	return nil
}

// reached waits until an engine of a side works on a request, and reports whether one did.
func (s *Scene) reached(engines []*enginesim.Engine) bool {
	for until := time.Now().Add(5 * time.Second); time.Now().Before(until); time.Sleep(5 * time.Millisecond) {
		if len(s.legs(engines)) > 0 {
			return true
		}
	}
	return false
}

// leave sends a completion whose client leaves once an engine of a side works on it, and a time is over.
func (s *Scene) leave(ctx context.Context, side []*enginesim.Engine, content string, wait time.Duration) error {
	asking, leave := context.WithCancel(ctx)
	defer leave()
	ended := make(chan answer, 1)
	go func() { ended <- s.post(asking, completions, content) }()
	ok := s.reached(side)
	time.Sleep(wait)
	leave()
	if a := <-ended; !ok {
		return breach("a leg at the engines", "none: %s", a)
	}
	return nil
}

func (s *Scene) leavesWhile(ctx context.Context, side []*enginesim.Engine, content string) error {
	everywhere(side, enginesim.Fault{Kind: enginesim.FaultStall})
	if err := s.leave(ctx, side, content, 0); err != nil {
		return err
	}
	return s.within1s(ctx)
}

func noDecode(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond})
	if err := s.leave(ctx, s.P, body(), 0); err != nil {
		return err
	}
	time.Sleep(soon) // P would have answered by now
	if n := len(s.legs(s.D)); n > 0 {
		return breach("no decode leg", "%d", n)
	}
	return s.clean(ctx)
}

func leavesStream(ctx context.Context, s *Scene) error {
	t, err := s.begun(ctx, body("stream", true, "max_tokens", 5000), 3)
	if err != nil {
		return err
	}
	t.leave()
	return s.freed(ctx)
}

func leavesUnary(ctx context.Context, s *Scene) error {
	// D has the KV after the wait, and decodes
	if err := s.leave(ctx, s.D, body("max_tokens", 5000), 100*time.Millisecond); err != nil {
		return err
	}
	return s.freed(ctx)
}

// freed is a breach if engines still work after a second, or hold KV.
func (s *Scene) freed(ctx context.Context) error {
	if err := s.within1s(ctx); err != nil {
		return err
	}
	return s.clean(ctx)
}

func leavesSilent(ctx context.Context, s *Scene) error {
	everywhere(s.D, enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 3})
	t, err := s.begun(ctx, body("stream", true, "max_tokens", 5000), 1) // a gateway may hold some back
	if err != nil {
		return err
	}
	t.leave()
	return s.within1s(ctx)
}

func leaveMany(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 20 * time.Millisecond})
	var leaves [16]context.CancelFunc
	ended := make(chan struct{})
	for i := range leaves {
		asking, leave := context.WithCancel(ctx)
		defer leave()
		leaves[i] = leave
		go func() {
			s.post(asking, completions, body("stream", i%2 == 0, "max_tokens", 5000))
			ended <- struct{}{}
		}()
	}
	ok := s.reached(s.P) // on a busy machine all could have left before
	for _, leave := range leaves {
		leave()
		time.Sleep(4 * time.Millisecond)
	}
	for range leaves {
		<-ended
	}
	if !ok {
		return breach("a prefill leg", "none")
	}
	if err := s.within1s(ctx); err != nil {
		return err
	}
	content := body()
	return s.whole(ctx, s.post(ctx, completions, content), completions, content)
}
