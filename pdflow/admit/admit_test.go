// SPDX-License-Identifier: Apache-2.0

package admit_test

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/admit"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fleet is a picker that takes the first engine of each role that need not be avoided.
type fleet struct {
	prefill, decode []string
	err             error
	returned        atomic.Int64
}

func (f *fleet) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	choose := func(ids []string, role discovery.Role, named string) discovery.Endpoint {
		id := cmp.Or(named, ids[0])
		for _, other := range ids {
			if !in.Avoids(other) && named == "" {
				id = other
				break
			}
		}
		return discovery.Endpoint{ID: id, URL: &url.URL{Scheme: "http", Host: id}, Role: role}
	}
	if f.err != nil {
		return pdflow.Pick{}, f.err
	}
	return pdflow.Pick{Prefill: choose(f.prefill, discovery.RolePrefill, in.Prefill),
		Decode: choose(f.decode, discovery.RoleDecode, in.Decode),
		Done:   func(*pdflow.Outcome) { f.returned.Add(1) }}, nil
}

func onePair() *fleet { return &fleet{prefill: []string{"p"}, decode: []string{"d"}} }

func newPicker(t *testing.T, f *fleet, o *admit.Options) *admit.Picker {
	t.Helper()
	p, err := admit.New(pick.Func(f.Pick), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func pickOf(t *testing.T, p *admit.Picker) pdflow.Pick {
	t.Helper()
	x, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
	require.NoError(t, err)
	return x
}

func overloaded(t *testing.T, err error) {
	t.Helper()
	e, ok := errors.AsType[*pdflow.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, pdflow.CodeOverloaded, e.Code)
	assert.Equal(t, 503, e.HTTPStatus())
	assert.GreaterOrEqual(t, e.RetryAfter, time.Second)
}

// full says that a first attempt is refused now.
func full(t *testing.T, p *admit.Picker) {
	t.Helper()
	_, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
	overloaded(t, err)
}

// preparing is a picker that has to ask about requests.
type preparing struct {
	pdflow.Picker
	prepared atomic.Int64
}

func (p *preparing) Prepare(_ context.Context, in *pdflow.PickInput) *pdflow.PickInput {
	p.prepared.Add(1)
	return in
}

// What a full queue refuses makes no engine work.
func TestWhatIsRefusedAtOnceIsNotPrepared(t *testing.T) {
	inner := &preparing{Picker: pick.Func(onePair().Pick)}
	p, err := admit.New(inner, &admit.Options{PrefillLimit: 1, Queue: 1})
	require.NoError(t, err)
	defer p.Close()
	pickOf(t, p)
	ctx, leave := context.WithCancel(t.Context())
	var waits sync.WaitGroup
	waits.Go(func() {
		_, err := p.Pick(ctx, &pdflow.PickInput{Attempt: 1})
		assert.ErrorIs(t, err, context.Canceled)
	})
	require.Eventually(t, func() bool { return p.Queued() == 1 }, 10*time.Second, time.Millisecond)
	full(t, p)
	leave()
	waits.Wait()
	assert.EqualValues(t, 2, inner.prepared.Load())
	assert.EqualValues(t, 1, p.State().Refused["queue_full"])
}

func TestRequestsWaitInOrderForAPrefillEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{PrefillLimit: 1})
		first := pickOf(t, p)
		var order []int
		picks := make(chan pdflow.Pick, 3)
		for i := range 3 {
			go func() {
				x, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
				assert.NoError(t, err)
				order = append(order, i)
				picks <- x
			}()
			synctest.Wait()
		}
		assert.Equal(t, 3, p.Queued())
		assert.Empty(t, order)
		first.PrefillDone(&pdflow.LegOutcome{})
		for range 3 {
			x := <-picks
			synctest.Wait()
			assert.Empty(t, picks, "one place, one request")
			x.PrefillDone(&pdflow.LegOutcome{})
			x.Done(&pdflow.Outcome{})
			x.Done(&pdflow.Outcome{}) // gives nothing back twice
		}
		assert.Equal(t, []int{0, 1, 2}, order)
		assert.Zero(t, p.Queued())
	})
}

func TestADecodeEngineIsFullUntilTheResponseHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{DecodeLimit: 1, Queue: -1})
		x := pickOf(t, p)
		x.PrefillDone(&pdflow.LegOutcome{})
		full(t, p)
		again, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 2})
		require.NoError(t, err, "a request that was admitted is not refused at its second attempt")
		again.Done(&pdflow.Outcome{})
		x.Done(&pdflow.Outcome{})
		pickOf(t, p)
	})
}

// A request that names a full engine waits for that one, and holds up nobody whom another engine can serve.
func TestARequestWaitsForTheEngineThatItNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, &fleet{prefill: []string{"p0", "p1"}, decode: []string{"d0", "d1"}},
			&admit.Options{DecodeLimit: 1})
		named := &pdflow.PickInput{Attempt: 1, Decode: "d0"}
		first, err := p.Pick(t.Context(), named)
		require.NoError(t, err)
		require.Equal(t, "d0", first.Decode.ID)
		got := make(chan pdflow.Pick, 3)
		wait := func(in *pdflow.PickInput) {
			go func() {
				x, err := p.Pick(t.Context(), in)
				if assert.NoError(t, err) {
					got <- x
				}
			}()
			synctest.Wait()
		}
		wait(named)
		require.Equal(t, 1, p.Queued())
		second := pickOf(t, p)
		require.Equal(t, "d1", second.Decode.ID, "at once")
		wait(&pdflow.PickInput{Attempt: 1})
		require.Equal(t, 2, p.Queued(), "all engines are full")
		second.Done(&pdflow.Outcome{})
		synctest.Wait()
		third := <-got
		require.Equal(t, "d1", third.Decode.ID, "who came later goes first, since d0 is still full")
		wait(&pdflow.PickInput{Attempt: 1})
		first.Done(&pdflow.Outcome{})
		synctest.Wait()
		require.Equal(t, "d0", (<-got).Decode.ID)
		require.Equal(t, 1, p.Queued(), "the named one came first")
		require.Empty(t, got)
		third.Done(&pdflow.Outcome{})
		require.Equal(t, "d1", (<-got).Decode.ID)
	})
}

// Requests that wait for one engine, as the follow-ups of its responses, take no place in the queue of those that
// others can serve, nor of those that wait for another engine. For each engine no more wait than the queue holds.
func TestWhoWaitsForANamedEngineTakesNobodysPlace(t *testing.T) {
	for name, o := range map[string]admit.Options{"fixed": {DecodeLimit: 1, PrefillLimit: 100, Queue: 4},
		"adaptive": {DecodeLimit: 1, PrefillLimit: 100, Queue: 4, Adaptive: true},
		"priority": {DecodeLimit: 1, PrefillLimit: 100, Queue: 4, Priority: admit.PriorityHeader("X-Priority")}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPicker(t, &fleet{prefill: []string{"p"}, decode: []string{"d0", "d1", "d2"}}, &o)
				ctx, leave := context.WithCancel(t.Context())
				defer synctest.Wait()
				defer leave()
				refused := 0
				arrive := func(decode string) {
					go func() {
						x, err := p.Pick(ctx, &pdflow.PickInput{Attempt: 1, Decode: decode,
							Header: http.Header{"X-Priority": {map[string]string{"d0": "5"}[decode]}}})
						if err != nil && ctx.Err() == nil {
							overloaded(t, err)
							refused++
						} else if x.Decode.ID == "d2" {
							x.Done(&pdflow.Outcome{})
						}
					}()
					synctest.Wait()
				}
				for range 20 {
					arrive("d0")
				}
				require.Equal(t, 4, p.Queued())
				require.Equal(t, 15, refused)
				arrive("d1")
				arrive("d1")
				require.Equal(t, 5, p.Queued(), "d1's own queue")
				for range 10 {
					arrive("")
				}
				require.Equal(t, 5, p.Queued(), "d2 serves them")
				held := pickOf(t, p)
				require.Equal(t, "d2", held.Decode.ID)
				for range 4 {
					arrive("")
				}
				require.Equal(t, 9, p.Queued())
				require.Equal(t, 15, refused)
				arrive("")
				require.Equal(t, 9, p.Queued())
				require.Equal(t, 16, refused)
				held.Done(&pdflow.Outcome{})
				synctest.Wait()
				require.Equal(t, 5, p.Queued(), "those that d2 served have not waited for the others")
			})
		})
	}
}

func TestAFullEngineIsPassedBy(t *testing.T) {
	f := &fleet{prefill: []string{"p1", "p2"}, decode: []string{"d1", "d2", "d3"}}
	p := newPicker(t, f, &admit.Options{PrefillLimit: 2, DecodeLimit: 1, Queue: -1})
	var used []string
	for range 3 {
		x := pickOf(t, p)
		used = append(used, x.Prefill.ID+x.Decode.ID)
	}
	assert.Equal(t, []string{"p1d1", "p1d2", "p2d3"}, used)
	full(t, p)
	assert.EqualValues(t, 1, f.returned.Load(), "a pick that is not used is given back")
}

// An operator sees what each engine has and may have, who waits, and why requests were refused.
func TestStateTellsPlacesQueueAndRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{PrefillLimit: 1, DecodeLimit: 4, Queue: 1})
		assert.Equal(t, map[string]int64{"queue_full": 0, "wait": 0, "timeout": 0}, p.State().Refused)
		x := pickOf(t, p)
		ctx, leave := context.WithCancel(t.Context())
		go func() { _, _ = p.Pick(ctx, &pdflow.PickInput{Attempt: 1}) }()
		synctest.Wait()
		full(t, p)
		s := p.State()
		assert.Equal(t, 1, s.Queued)
		assert.Equal(t, map[string]int64{"queue_full": 1, "wait": 0, "timeout": 0}, s.Refused)
		assert.ElementsMatch(t, []admit.EngineState{{ID: "p", Prefill: admit.Occupancy{InFlight: 1, Limit: 1},
			Decode: admit.Occupancy{Limit: 4}}, {ID: "d", Prefill: admit.Occupancy{Limit: 1},
			Decode: admit.Occupancy{InFlight: 1, Limit: 4}}}, s.Engines)
		leave()
		x.Done(&pdflow.Outcome{})
		synctest.Wait()
		assert.Zero(t, p.State().Queued)
	})
}

func TestRefusalsOfTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := onePair()
		p := newPicker(t, f, &admit.Options{PrefillLimit: 1, Queue: 1, QueueTimeout: 3 * time.Second})
		first := pickOf(t, p)
		errs, start := make(chan error), time.Now()
		wait := func(ctx context.Context) {
			go func() { _, err := p.Pick(ctx, &pdflow.PickInput{Attempt: 1}); errs <- err }()
			synctest.Wait()
		}
		wait(t.Context())
		full(t, p)
		assert.Zero(t, time.Since(start), "the queue is full")
		overloaded(t, <-errs)
		assert.Equal(t, 3*time.Second, time.Since(start))

		ctx, leave := context.WithCancel(t.Context())
		wait(ctx)
		leave()
		require.ErrorIs(t, <-errs, context.Canceled)
		assert.Zero(t, p.Queued(), "who leaves gives the place in the queue back")

		wait(t.Context())
		f.err = pdflow.CodeNoEndpoint
		first.Done(&pdflow.Outcome{})
		require.ErrorIs(t, <-errs, pdflow.CodeNoEndpoint, "nothing to wait for")
	})
}

// With a priority header that the configuration trusts, the least number goes first, and sends the last one away from a
// full queue. Without it the header counts for nothing.
func TestPrioritiesOrderTheQueue(t *testing.T) {
	for trusted, want := range map[string]struct{ order, refused []string }{
		"X-Priority": {[]string{"-1", "", "x", "2"}, []string{"7", "7"}},
		"":           {[]string{"7", "", "2", "x"}, []string{"7", "-1"}},
	} {
		synctest.Test(t, func(t *testing.T) {
			o := &admit.Options{PrefillLimit: 1, Queue: 4}
			if trusted != "" {
				o.Priority = admit.PriorityHeader(trusted)
			}
			p := newPicker(t, onePair(), o)
			first := pickOf(t, p)
			var order, refused []string
			ask := func(priority string) {
				in := &pdflow.PickInput{Attempt: 1, Header: http.Header{}}
				if priority != "" {
					in.Header.Set("X-Priority", priority)
				}
				go func() {
					x, err := p.Pick(t.Context(), in)
					if err != nil {
						overloaded(t, err)
						refused = append(refused, priority)
						return
					}
					order = append(order, priority)
					x.Done(&pdflow.Outcome{})
				}()
				synctest.Wait()
			}
			for _, priority := range []string{"7", "", "2", "x", "7", "-1"} {
				ask(priority)
			}
			assert.Equal(t, want.refused, refused)
			first.Done(&pdflow.Outcome{})
			synctest.Wait()
			assert.Equal(t, want.order, order)
			assert.Zero(t, p.Queued())
		})
	}
}

// Who would wait longer than the timeout is refused at once.
func TestThePaceOfTheQueueTellsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPicker(t, onePair(), &admit.Options{PrefillLimit: 1, QueueTimeout: 5 * time.Second})
		x := pickOf(t, p)
		picks, errs := make(chan pdflow.Pick, 20), make(chan error, 20)
		arrive := func() {
			go func() {
				x, err := p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
				if err != nil {
					errs <- err
					return
				}
				picks <- x
			}()
			synctest.Wait()
		}
		arrive()
		arrive()
		arrive()
		for range 2 { // one a second
			time.Sleep(time.Second)
			x.Done(&pdflow.Outcome{})
			x = <-picks
		}
		for range 6 {
			arrive()
		}
		assert.Equal(t, 5, p.Queued())
		overloaded(t, <-errs)
		for range 5 {
			x.Done(&pdflow.Outcome{})
			x = <-picks
		}
	})
}

func TestADecodeEngineWithoutKVRoomGetsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var load atomic.Pointer[inspect.Load]
		reads := func(usage float64) { load.Store(&inspect.Load{At: time.Now(), KVUsage: usage}) }
		reads(.97)
		p := newPicker(t, onePair(), &admit.Options{Load: func(id string) inspect.Load {
			if id != "d" {
				return inspect.Load{}
			}
			return *load.Load()
		}})
		pickOf(t, p) // an engine that runs nothing must get something, or its cache would never empty
		start := time.Now()
		go func() { time.Sleep(time.Second); reads(.5) }()
		pickOf(t, p)
		assert.InDelta(t, 1, time.Since(start).Seconds(), .1, "the queue notices the room")
		reads(1)
		time.Sleep(time.Minute)
		pickOf(t, p) // so old a reading says nothing
	})
}

// Adaptive believes an engine that says that requests wait there.
func TestADecodeEnginesOwnQueueIsItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var load inspect.Load
		p := newPicker(t, onePair(), &admit.Options{Adaptive: true, Queue: -1, Load: func(string) inspect.Load {
			return load
		}})
		for range 30 {
			pickOf(t, p).PrefillDone(&pdflow.LegOutcome{})
		}
		time.Sleep(time.Second)
		load = inspect.Load{At: time.Now(), Running: 20, Waiting: 10, Fetching: 10}
		done := pickOf(t, p).Done // KV on its way is no queue
		time.Sleep(time.Second)
		load = inspect.Load{At: time.Now(), Running: 20, Waiting: 10}
		full(t, p)
		done(&pdflow.Outcome{})
		full(t, p)
	})
}

func TestAPanicOfThePickerLeavesTheQueueWhole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := onePair()
		p := newPicker(t, f, &admit.Options{PrefillLimit: 1})
		x := pickOf(t, p)
		panicked := make(chan any)
		go func() {
			defer func() { panicked <- recover() }()
			_, _ = p.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
		}()
		synctest.Wait()
		f.prefill = nil
		x.Done(&pdflow.Outcome{})
		assert.NotNil(t, <-panicked)
		f.prefill = []string{"p"}
		assert.Zero(t, p.Queued())
		pickOf(t, p)
	})
}

// bursting returns picks that panic where their ends are told.
func bursting(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	x, err := onePair().Pick(ctx, in)
	x.PrefillDone = func(*pdflow.LegOutcome) { panic("prefill") }
	x.Done = func(*pdflow.Outcome) { panic("done") }
	return x, err
}

func TestAPanicAtTheEndOfAPickGivesItsPlacesBack(t *testing.T) {
	p, err := admit.New(pick.Func(bursting), &admit.Options{PrefillLimit: 1, DecodeLimit: 1, Queue: -1})
	require.NoError(t, err)
	defer p.Close()
	for range 3 {
		x := pickOf(t, p)
		assert.Panics(t, func() { x.PrefillDone(&pdflow.LegOutcome{}) })
		assert.Panics(t, func() { x.Done(&pdflow.Outcome{}) })
	}
}

// slow is a picker that takes its time, and counts the picks that nobody has given back.
type slow struct {
	*fleet
	taken atomic.Int64
}

func (s *slow) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	time.Sleep(500 * time.Microsecond)
	x, err := s.fleet.Pick(ctx, in)
	s.taken.Add(1)
	x.Done = func(*pdflow.Outcome) { s.taken.Add(-1) }
	return x, err
}

// 300 requests come at once to two places, the inner picker is slow, and each third client leaves soon. All others are
// served, and what they held is free again.
func TestASlowPickerLosesNothing(t *testing.T) {
	inner := &slow{fleet: onePair()}
	p, err := admit.New(pick.Func(inner.Pick),
		&admit.Options{PrefillLimit: 2, DecodeLimit: 2, Queue: 300, QueueTimeout: time.Minute})
	require.NoError(t, err)
	defer p.Close()
	var served, left atomic.Int64
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			if i%3 == 0 {
				time.AfterFunc(time.Duration(i)*100*time.Microsecond, leave)
			}
			x, err := p.Pick(ctx, &pdflow.PickInput{Attempt: 1})
			if err != nil {
				assert.ErrorIs(t, err, context.Canceled)
				assert.Zero(t, i%3, "only those that left")
				left.Add(1)
				return
			}
			served.Add(1)
			time.Sleep(100 * time.Microsecond)
			x.PrefillDone(&pdflow.LegOutcome{})
			x.Done(&pdflow.Outcome{})
		})
	}
	wg.Wait()
	assert.EqualValues(t, 300, served.Load()+left.Load())
	assert.Zero(t, p.Queued())
	assert.Zero(t, inner.taken.Load())
	for range 2 { // both places are there
		x := pickOf(t, p)
		defer x.Done(&pdflow.Outcome{})
	}
	assert.EqualValues(t, 2, inner.taken.Load())
}

func TestNewRefusesWhatMakesNoSense(t *testing.T) {
	_, err := admit.New(nil, nil)
	require.Error(t, err)
	_, err = admit.New(pick.Func(onePair().Pick), &admit.Options{PrefillLimit: -1})
	require.Error(t, err)
	p, err := admit.New(pick.Func(onePair().Pick), nil)
	require.NoError(t, err)
	assert.NoError(t, p.Ready(&pdflow.PickInput{}))
	assert.Nil(t, p.Changed())
}

// The limits are the engines', whichever flow's requests are there. The rules are each flow's own.
func TestFlowsShareTheLimitsOfTheirPicker(t *testing.T) {
	var engines []discovery.Endpoint
	for id, role := range map[string]discovery.Role{"p": discovery.RolePrefill, "d": discovery.RoleDecode} {
		engines = append(engines, discovery.Endpoint{ID: id, URL: &url.URL{Scheme: "http", Host: id}, Role: role})
	}
	set, err := static.NewSet(engines...)
	require.NoError(t, err)
	p, err := admit.New(pick.New(set, pick.RoundRobin()), &admit.Options{PrefillLimit: 1, Queue: -1})
	require.NoError(t, err)
	defer p.Close()
	main, other := p.Bind(nil, connector.Serving{}), p.Bind(nil, connector.Serving{PairOnly: true})
	x, err := main.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
	require.NoError(t, err)
	_, err = other.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
	require.ErrorIs(t, err, pdflow.CodeOverloaded)
	busy := p.State().Engines
	assert.Equal(t, 1, busy[0].Prefill.InFlight+busy[1].Prefill.InFlight, "whichever of the pickers is asked")
	x.Done(&pdflow.Outcome{})
	x, err = other.Pick(t.Context(), &pdflow.PickInput{Attempt: 1})
	require.NoError(t, err)
	x.Done(&pdflow.Outcome{})

	_, err = main.Pick(t.Context(), &pdflow.PickInput{Attempt: 1, Single: true})
	require.NoError(t, err)
	_, err = other.Pick(t.Context(), &pdflow.PickInput{Attempt: 1, Single: true})
	require.ErrorIs(t, err, pdflow.CodeUnsupported, "its rules are the inner picker's")
}
