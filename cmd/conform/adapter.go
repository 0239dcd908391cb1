// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"net/http"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

const (
	// adapter is a LoRA adapter of the model.
	adapter = "tiny-lora"
	// learning is how long a gateway may take to notice that engines have loaded an adapter.
	learning = 15 * time.Second
)

// load loads the adapter on all engines, and waits until the gateway serves it. It returns the last answer if not.
func (s *Scene) load(ctx context.Context) (served bool, last answer) {
	for _, e := range append(s.engines(), s.alone) {
		e.LoadAdapter(adapter)
	}
	for until := time.Now().Add(learning); time.Now().Before(until) && ctx.Err() == nil; {
		if last = s.post(ctx, completions, body("model", adapter)); last.status == http.StatusOK {
			return true, last
		}
		time.Sleep(50 * time.Millisecond)
	}
	return false, last
}

// asked sends requests for the adapter, each of which must be served.
func (s *Scene) asked(ctx context.Context) error {
	for range 8 {
		content := body("model", adapter)
		if err := s.whole(ctx, s.post(ctx, completions, content), completions, content); err != nil {
			return err
		}
	}
	return s.clean(ctx)
}

func adapterServes(ctx context.Context, s *Scene) error {
	if served, last := s.load(ctx); !served {
		return breach("status 200 within 15 s", "%s", last)
	}
	return s.asked(ctx)
}

// adapterLost has one engine lose the adapter, as at a restart.
func adapterLost(of func(*Scene) *enginesim.Engine) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		if served, _ := s.load(ctx); !served {
			return errSkip("the gateway does not serve adapters")
		}
		of(s).UnloadAdapter(adapter)
		return s.asked(ctx)
	}
}
