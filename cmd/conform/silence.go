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

func silenceWithin(ctx context.Context, s *Scene) error {
	everywhere(s.D, enginesim.Fault{Kind: enginesim.FaultStallStream, AfterChunks: 3, Delay: 5 * time.Second,
		Leg: enginesim.LegDecode})
	content := body("stream", true)
	return s.whole(ctx, s.post(ctx, completions, content), completions, content)
}

// slow is how long prefill takes where it is slow: balancers in front of real gateways cut after a minute.
const slow = 6 * time.Second

func slowPrefill(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultDelay, Delay: slow})
	content := body("stream", true)
	a := s.post(ctx, completions, content)
	before, _, _ := strings.Cut("\n"+string(a.body), "\ndata:")
	for line := range strings.Lines(before) {
		if line = strings.TrimRight(line, "\r\n"); a.status == http.StatusOK && line != "" && line[0] != ':' {
			return breach("nothing but comments before the first event", "a line of %d bytes", len(line))
		}
	}
	return s.whole(ctx, a, completions, content)
}

func slowPrefillFails(ctx context.Context, s *Scene) error {
	everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultStall})
	breaks := time.AfterFunc(slow, func() { everywhere(s.P, enginesim.Fault{Kind: enginesim.FaultRefuse}) })
	defer breaks.Stop()
	content := body("stream", true)
	return s.honest(ctx, s.post(ctx, completions, content), content)
}

// hangingPair lets the pair that has served a request never exchange KV again. Engines' own limits are minutes.
func hangingPair(ctx context.Context, s *Scene) error {
	content := body()
	if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
		return err
	}
	used := func(e *enginesim.Engine) bool { return len(s.legs([]*enginesim.Engine{e})) > 0 }
	p, d := slices.IndexFunc(s.P, used), slices.IndexFunc(s.D, used)
	if p < 0 || d < 0 {
		return errSkip("the request was not disaggregated")
	}
	peer, hangs := s.P[p].EngineID(), s.D[d]
	hangs.Inject(enginesim.Fault{Kind: enginesim.FaultHangTransfer, Leg: enginesim.LegDecode, Peer: peer, Count: -1})
	s.mark()
	wave := func(within time.Duration, errorsToo bool) error {
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		var all sync.WaitGroup
		wrong := make([]error, 8)
		for i := range wrong {
			content := body("stream", true)
			time.Sleep(10 * time.Millisecond) // in turn, so that each pair gets some
			all.Go(func() {
				a := s.post(ctx, completions, content)
				switch {
				case ctx.Err() != nil && a.err != nil:
					wrong[i] = breach("an end within "+within.String(), "none")
				case errorsToo && (a.broken() || a.failedEvent() || a.status >= http.StatusInternalServerError):
				default:
					wrong[i] = s.whole(context.WithoutCancel(ctx), a, completions, content)
				}
			})
		}
		all.Wait()
		for _, err := range wrong {
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := wave(15*time.Second, true); err != nil {
		return err
	}
	met := false
	for _, l := range s.legs([]*enginesim.Engine{hangs}) {
		params, _ := l.members["kv_transfer_params"].(map[string]any)
		met = met || params["remote_engine_id"] == peer
	}
	if !met {
		return errSkip("no request reached that pair")
	}
	return wave(5*time.Second, false)
}
