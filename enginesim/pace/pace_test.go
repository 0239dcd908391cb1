// SPDX-License-Identifier: Apache-2.0

package pace_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/pace"
)

// Requests in real time get their tokens when the model, driven without a clock, says.
func TestTokensComeWhenTheModelSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spec := model.Llama8B()
		spec.Blocks = 700
		e, err := pace.New(spec, model.Link{})
		require.NoError(t, err)
		alone, err := model.New(spec)
		require.NoError(t, err)

		type times struct{ first, end float64 }
		want, got := map[int]times{}, map[int]times{}
		read := func(at float64) {
			for _, ev := range alone.Advance(at) {
				x := want[ev.Request.ID]
				switch ev.Kind {
				case model.First:
					x.first = ev.At
				case model.Ended:
					x.end = ev.At
				default:
				}
				want[ev.Request.ID] = x
			}
		}
		var mu sync.Mutex
		var wg sync.WaitGroup
		begun := time.Now()
		for i := range 60 {
			request := func() *model.Request {
				return &model.Request{ID: i, Prompt: 50 + i*37%900, Output: 1 + i*11%90}
			}
			at := time.Since(begun).Seconds()
			for next, ok := alone.Next(); ok && next <= at; next, ok = alone.Next() {
				read(next)
			}
			require.NoError(t, alone.Add(request(), at))
			wg.Go(func() {
				turn, err := e.Join(request())
				assert.NoError(t, err)
				defer turn.Leave()
				var x times
				for k := range request().Output {
					assert.NoError(t, turn.Token(t.Context()))
					if x.end = time.Since(begun).Seconds(); k == 0 {
						x.first = x.end
					}
				}
				mu.Lock()
				defer mu.Unlock()
				got[i] = x
			})
			synctest.Wait()
			time.Sleep(time.Duration(5+i*7%90) * time.Millisecond)
		}
		wg.Wait()
		for next, ok := alone.Next(); ok; next, ok = alone.Next() {
			read(next)
		}
		require.Len(t, got, 60)
		for i, w := range want {
			require.InDelta(t, w.first, got[i].first, 1e-6, "request %d", i)
			require.InDelta(t, w.end, got[i].end, 1e-6, "request %d", i)
		}
	})
}

func TestALeftTurnFreesItsPlaceAndAFetchQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, err := pace.New(model.Spec{StepTime: model.StepTime{Base: 1}, MaxRunning: 1, BlockSize: 16,
			BytesPerToken: 10}, model.Link{Latency: .5, BytesPerSecond: 100})
		require.NoError(t, err)
		first, err := e.Join(&model.Request{Prompt: 1, Output: 100})
		require.NoError(t, err)
		second, err := e.Join(&model.Request{Prompt: 1, Output: 1})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.ErrorIs(t, second.Token(ctx), context.DeadlineExceeded, "there is one place")
		begun := time.Now()
		first.Leave()
		first.Leave()
		require.NoError(t, second.Token(t.Context()))
		require.InDelta(t, 2, time.Since(begun).Seconds(), 1.01, "after the step that ran")
		second.Leave()
		(*pace.Turn)(nil).Leave()
		_, err = e.Join(&model.Request{})
		require.Error(t, err)

		begun = time.Now()
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { assert.NoError(t, e.Fetch(t.Context(), 20)) })
		}
		wg.Wait()
		require.InDelta(t, 4.5, time.Since(begun).Seconds(), 1e-6)
		ctx, cancel = context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, e.Fetch(ctx, 20), context.Canceled)
	})
}

func ExampleEngine() {
	e, err := pace.New(model.Spec{StepTime: model.StepTime{Base: .01}, BlockSize: 16}, model.Link{})
	if err != nil {
		panic(err)
	}
	begun := time.Now()
	turn, err := e.Join(&model.Request{Prompt: 100, Output: 3})
	if err != nil {
		panic(err)
	}
	defer turn.Leave()
	for range 3 {
		_ = turn.Token(context.Background())
	}
	fmt.Println(time.Since(begun) >= 30*time.Millisecond)
	// Output: true
}
