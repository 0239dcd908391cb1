// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// However a request ends, its bytes are back in the budget, all of them and none twice, when its handler returns.

const budgetBytes = 1 << 20

// counting is a budget, and a handler that takes of it. The count of the budget is noted when the handler returns.
type counting struct {
	*pdflow.Budget
	left chan int64
	most atomic.Int64 // in use while an engine worked; one that comes late may see none, since the request is over
	came atomic.Bool  // an engine was asked
	late bool         // an engine may come when the request is over
}

func newCounting() *counting {
	return &counting{Budget: &pdflow.Budget{Bytes: budgetBytes}, left: make(chan int64, 9)}
}

func (c *counting) handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { c.left <- c.InUse() }() // also when the handler panics
		h.ServeHTTP(w, r)
	})
}

// during is an engine that notes what is in use while it works.
func (c *counting) during(t *testing.T, h handler) handler {
	return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		inUse := c.InUse()
		assert.LessOrEqual(t, inUse, int64(budgetBytes))
		for most := c.most.Load(); inUse > most && !c.most.CompareAndSwap(most, inUse); most = c.most.Load() {
		}
		if inUse > 0 || !c.late {
			c.came.Store(true)
		}
		h(x, w, r, body)
	}
}

func (c *counting) requireEmpty(t *testing.T) {
	t.Helper()
	select {
	case n := <-c.left:
		require.Zero(t, n, "bytes that the budget has lost (or got twice, if negative)")
	case <-time.After(10 * time.Second):
		t.Fatal("the handler does not return")
	}
	if c.came.Load() {
		require.GreaterOrEqual(t, c.most.Load(), int64(len(large)), "the client's body counts while an engine works")
	}
}

// large is a client's request of several reads.
var large = ofSize(50_000)

// inTurns answers with one handler after the other, and with the last from then on.
func inTurns(all ...handler) handler {
	var mu sync.Mutex
	return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
		mu.Lock()
		h := all[0]
		if len(all) > 1 {
			all = all[1:]
		}
		mu.Unlock()
		h(x, w, r, body)
	}
}

// breaksOff is an engine that breaks its response off.
func breaksOff(contentType, body string) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", contentType)
		_, _ = io.WriteString(w, body)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
}

func refusal(code int) handler {
	return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, `{"error":{"message":"`+strings.Repeat("no ", 1000)+`"}}`)
	}
}

const event = `data: {"choices":[{"text":"hi"}]}` + "\n\n"

type budgetCase struct {
	conn connector.KVConnector
	p, d handler
	body string // "": large
	opts []pdflow.Option
	want int // status
}

func budgetCases() map[string]budgetCase {
	twice := []pdflow.Option{pdflow.WithRetry(config.Retry{MaxAttempts: 2, BackoffBase: time.Millisecond})}
	brief := pdflow.WithTimeouts(config.Timeouts{Prefill: 30 * time.Millisecond, Decode: 30 * time.Millisecond})
	alone, together := pdflow.WithFallback(config.FallbackDecode), &fake{order: connector.Together}
	return map[string]budgetCase{
		"served": {want: 200},
		"streamed": {want: 200, d: func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, event+"data: [DONE]\n\n")
		}},
		"P refuses":                     {want: 400, p: refusal(400)},
		"P fails":                       {want: 502, p: refusal(500)},
		"P fails at each attempt":       {want: 502, p: refusal(500), opts: twice},
		"P fails once":                  {want: 200, p: inTurns(refusal(503), answer(ok)), opts: twice},
		"P breaks its response off":     {want: 502, p: breaksOff("application/json", `{"a":`), opts: twice},
		"P's response is no JSON":       {want: 502, p: answer("no")},
		"P's response does not fit":     {want: 503, p: answer(strings.Repeat(" ", budgetBytes))},
		"P is silent":                   {want: 504, p: gone, opts: []pdflow.Option{brief}},
		"D refuses":                     {want: 400, d: refusal(400)},
		"D fails at each attempt":       {want: 500, d: refusal(500), opts: twice},
		"D fails once":                  {want: 200, d: inTurns(refusal(500), answer(ok)), opts: twice},
		"D breaks its response off":     {want: 200, d: breaksOff("application/json", `{"choices":[`)},
		"D breaks its stream off":       {want: 200, d: breaksOff("text/event-stream", event)},
		"D is silent":                   {want: 504, d: gone, opts: []pdflow.Option{brief}},
		"D serves alone after P failed": {want: 200, p: refusal(500), opts: []pdflow.Option{alone}},
		"together":                      {conn: together, want: 200},
		"together, P fails":             {conn: together, want: 502, p: refusal(500), d: gone},
		"together, D fails":             {conn: together, want: 500, p: gone, d: refusal(500)},
		"decode first":                  {conn: &cold{fake{order: connector.DecodeFirst}}, want: 200},
		"decode first, then prefill": {conn: &cold{fake{order: connector.DecodeFirst}}, want: 200,
			d: inTurns(answer(`{"choices":[{"text":"hi","finish_reason":"cache_threshold"}]}`), answer(ok))},
		"decode then prefill": {conn: newAsking(connector.DecodeThenPrefill), want: 200},
		"one engine serves": {conn: &refusing{}, want: 200, opts: []pdflow.Option{
			pdflow.WithUnsupported(config.UnsupportedAggregate)}},
		"the connector panics": {conn: &fake{decode: func(*connector.Session, *connector.PrefillResult,
			*connector.Leg) error {
			panic("boom")
		}}, want: 500},
		"an observer panics": {want: 500, opts: []pdflow.Option{pdflow.WithObserver(pdflow.Observer{
			SessionStart: func(context.Context, *connector.Session) { panic("boom") }})}},
		"the body is no JSON":   {want: 400, body: "no" + large},
		"the body is too large": {want: 413, body: ofSize(200_000), opts: []pdflow.Option{pdflow.WithMaxBody(100_000)}},
		"the body does not fit": {want: 503, body: ofSize(2 * budgetBytes)},
	}
}

// refusing is a connector whose two engines carry no request together.
type refusing struct{ fake }

func (*refusing) CheckRequest(*connector.ClientRequest) error {
	return &connector.UnsupportedError{Member: "prompt"}
}

func TestEveryEndingGivesTheBudgetBack(t *testing.T) {
	for name, c := range budgetCases() {
		t.Run(name, func(t *testing.T) {
			count := newCounting()
			count.late = c.want == http.StatusGatewayTimeout
			conn, p, d, body := c.conn, c.p, c.d, c.body
			if conn == nil {
				conn = &fake{}
			}
			if p == nil {
				p = answer(ok)
			}
			if d == nil {
				d = answer(ok)
			}
			if body == "" {
				body = large
			}
			x := script(t, conn, count.during(t, p), count.during(t, d),
				append(c.opts, pdflow.WithBudget(count.Budget))...)
			r := post(t, serve(t, count.handler(x.flow)), "/v1/completions", body)
			require.Equal(t, c.want, r.status, r.body)
			count.requireEmpty(t)
		})
	}
}

func TestAClientThatLeavesGivesTheBudgetBack(t *testing.T) {
	begins := func(then handler) handler {
		return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, event)
			_ = http.NewResponseController(w).Flush()
			then(x, w, r, body)
		}
	}
	for name, c := range map[string]struct {
		order connector.Order
		p, d  handler
		cut   bool // by the flow's shutdown, while the client stays
	}{
		"while P computes":                    {p: gone},
		"in P's response":                     {p: begins(gone)},
		"while D computes":                    {d: gone},
		"in the stream":                       {d: begins(gone)},
		"together":                            {order: connector.Together, p: gone, d: gone},
		"at the shutdown, while P computes":   {p: gone, cut: true},
		"at the shutdown, in the stream":      {d: begins(gone), cut: true},
		"at the shutdown, while both compute": {order: connector.Together, p: gone, d: gone, cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			count, came := newCounting(), make(chan struct{}, 9)
			waits := func(h handler) handler {
				if h == nil {
					return answer(ok)
				}
				return func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
					came <- struct{}{}
					h(x, w, r, body)
				}
			}
			x := script(t, &fake{order: c.order}, count.during(t, waits(c.p)), count.during(t, waits(c.d)),
				pdflow.WithBudget(count.Budget))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			url := serve(t, count.handler(x.flow))
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				r, _ := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions",
					strings.NewReader(large))
				r.Header.Set("Content-Type", "application/json")
				if resp, err := client.Do(r); err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			}()
			<-came
			if c.cut {
				now, stop := context.WithCancel(t.Context())
				stop()
				_ = x.flow.Shutdown(now)
			} else {
				leave()
			}
			count.requireEmpty(t)
			<-ended
		})
	}
}

// A client that leaves in the middle of its body.
func TestABodyThatBreaksOffGivesTheBudgetBack(t *testing.T) {
	count := newCounting()
	x := script(t, &fake{}, answer(ok), answer(ok), pdflow.WithBudget(count.Budget))
	body, more := io.Pipe()
	url := serve(t, count.handler(x.flow)) + "/v1/completions"
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, body)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	go func() {
		_, _ = io.WriteString(more, large)
		for count.InUse() < int64(len(large)) {
			time.Sleep(time.Millisecond)
		}
		_ = more.CloseWithError(errors.New("the client has gone"))
	}()
	_, err = client.Do(r)
	require.Error(t, err)
	count.requireEmpty(t)
	require.Empty(t, x.all())
}

// Responses of encode engines are counted, too, with those of items that fail meanwhile.
func TestAnEncodeStageGivesTheBudgetBack(t *testing.T) {
	for want, engine := range map[int]handler{200: answer(ok), 502: inTurns(answer(ok), refusal(500))} {
		count := newCounting()
		x := script(t, &encoding{}, count.during(t, answer(ok)), answer(ok), pdflow.WithBudget(count.Budget))
		x.pair.Encode = []discovery.Endpoint{endpoint(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter,
			r *http.Request) {
			count.during(t, engine)(x, w, r, "")
		})), discovery.RoleEncode)}
		flow, err := pdflow.New(&encoding{}, pickOf(x), pdflow.WithBudget(count.Budget))
		require.NoError(t, err)
		r := post(t, serve(t, count.handler(flow)), "/v1/completions", large)
		require.Equal(t, want, r.status, r.body)
		count.requireEmpty(t)
		require.NoError(t, flow.Shutdown(t.Context()))
	}
}

// A flow that another one falls back to takes of the same budget.
func TestAFallbackFlowGivesTheBudgetBack(t *testing.T) {
	for want, d := range map[int]handler{200: answer(ok), 500: refusal(500)} {
		count := newCounting()
		second := script(t, &fake{}, count.during(t, answer(ok)), count.during(t, d), pdflow.WithBudget(count.Budget))
		first := script(t, &fake{}, count.during(t, refusal(500)), answer(ok), pdflow.WithBudget(count.Budget),
			pdflow.WithFallback(config.FallbackConnector, second.flow))
		r := post(t, serve(t, count.handler(first.flow)), "/v1/completions", large)
		require.Equal(t, want, r.status, r.body)
		require.NotEmpty(t, second.all())
		count.requireEmpty(t)
	}
}

// The caller of Begin has the body; the flow counts P's response until the request has ended, however.
func TestStepsGiveTheBudgetBack(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, s *pdflow.Steps, f *fakeFleet){
		"End": func(_ *testing.T, s *pdflow.Steps, _ *fakeFleet) { s.End(nil) },
		"forgotten": func(t *testing.T, _ *pdflow.Steps, f *fakeFleet) {
			time.Sleep(51 * time.Millisecond)
			synctest.Wait()
			require.Empty(t, f.flow.Sessions())
		},
		"Shutdown": func(t *testing.T, s *pdflow.Steps, f *fakeFleet) {
			now, stop := context.WithCancel(t.Context())
			stop()
			_ = f.flow.Shutdown(now)
			s.End(nil)
		},
	} {
		for legs := range 3 { // that are sent before the end
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					budget := &pdflow.Budget{Bytes: budgetBytes}
					opts := []pdflow.Option{pdflow.WithBudget(budget)}
					if name == "forgotten" {
						opts = append(opts, pdflow.WithTimeouts(config.Timeouts{Steps: 50 * time.Millisecond}))
					}
					f := inMemory(t, 0, opts...)
					s, err := f.flow.Begin(t.Context(),
						&pdflow.Request{API: connector.APICompletions, Body: []byte(large)})
					require.NoError(t, err)
					defer s.End(nil)
					for range legs {
						step, _, err := s.Next(t.Context())
						require.NoError(t, err)
						step.Send(f)
					}
					_, _, err = s.Next(t.Context())
					require.NoError(t, err)
					if legs > 0 {
						require.EqualValues(t, len(ok), budget.InUse())
					}
					end(t, s, f)
					require.Zero(t, budget.InUse())
				})
			})
		}
	}
}

// A rescue ends the attempt that broke, and its prefill's bytes with it.
func TestARescueGivesTheBudgetBack(t *testing.T) {
	for _, left := range []bool{true, false} {
		count := newCounting()
		x, other := rescuing(t, pdflow.WithBudget(count.Budget), pdflow.WithRetry(config.Retry{MaxAttempts: 1}))
		if !left {
			require.NoError(t, other.Close())
		}
		x.url = serve(t, count.handler(x.flow))
		r := x.struck(rescuable(""), enginesim.FaultResetStream, 3)
		require.Equal(t, left, r.err == nil, r.err)
		count.requireEmpty(t)
	}
}

// While P finishes a leg of a client that has left, the request is held, and so is what P has answered so far.
func TestALegThatRunsOnHoldsItsBytes(t *testing.T) {
	for _, cut := range []bool{false, true} {
		count, begun, ends := newCounting(), make(chan struct{}), make(chan struct{})
		d := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
			<-begun
			gone(x, w, r, body)
		}
		p := func(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, `{"a":"`+strings.Repeat("a", 10_000))
			_ = http.NewResponseController(w).Flush()
			close(begun)
			select {
			case <-ends:
				_, _ = io.WriteString(w, `"}`)
			case <-r.Context().Done():
			}
		}
		x := script(t, &runsOn{fake: fake{order: connector.Together}}, p, d, pdflow.WithBudget(count.Budget))
		url := serve(t, count.handler(x.flow))
		ctx, leave := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(large))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/json")
		left := make(chan error)
		go func() { _, err := client.Do(r); left <- err }()
		<-begun
		full := int64(len(large) + 10_000)
		require.Eventually(t, func() bool { return count.InUse() >= full }, 20*time.Second, time.Millisecond)
		leave()
		require.Error(t, <-left)
		require.GreaterOrEqual(t, <-count.left, full, "the handler has returned, and the leg runs on")
		now, stop := context.WithCancel(t.Context())
		if cut {
			stop()
		} else {
			close(ends)
		}
		_ = x.flow.Shutdown(now)
		stop()
		require.Zero(t, count.InUse())
	}
}

// Many requests at the same time: the budget never grants more than it has, and refuses nothing that fits.
func TestABudgetUnderContention(t *testing.T) {
	const most = 1000
	b := &pdflow.Budget{Bytes: most}
	var all sync.WaitGroup
	var above, refused atomic.Int64
	for range 4 {
		all.Go(func() { // fits always
			for range 1_000_000 {
				if !b.Take(1) {
					refused.Add(1)
					continue
				}
				if b.InUse() > most {
					above.Add(1)
				}
				b.Give(1)
			}
		})
		all.Go(func() { // fits only while no other does this
			for range 1_000_000 {
				if b.Take(most - 100) {
					b.Give(most - 100)
				}
			}
		})
	}
	all.Wait()
	require.Zero(t, above.Load(), "more than the budget has")
	require.Zero(t, refused.Load(), "refused although it fits")
	require.Zero(t, b.InUse())
}
