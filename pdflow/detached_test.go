// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// runsOn is a connector whose prefill legs finish once they are sent.
type runsOn struct {
	fake
	lease time.Duration
}

func (f *runsOn) Traits() connector.Traits {
	t := f.fake.Traits()
	t.Ending.PrefillFinishes, t.Ending.Orphans, t.Handoff.Lease = true, true, f.lease
	return t
}

// busy is a prefill engine that answers when it is told to.
type busy struct {
	computes, answer chan struct{}
	ended            chan string // how each leg ended
}

func newBusy(t *testing.T) *busy {
	b := &busy{computes: make(chan struct{}, 99), answer: make(chan struct{}), ended: make(chan string, 99)}
	t.Cleanup(func() {
		select {
		case <-b.answer:
		default:
			close(b.answer)
		}
	})
	return b
}

func (b *busy) serve(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
	b.computes <- struct{}{}
	select {
	case <-b.answer:
		b.ended <- "answered"
		answer(ok)(x, w, r, body)
	case <-r.Context().Done():
		b.ended <- "cancelled"
	}
}

// finishes is a flow in front of a busy P.
type finishes struct {
	*scripted
	p      *busy
	picker *told
}

func newFinishes(t *testing.T, d handler, opts ...pdflow.Option) *finishes {
	t.Helper()
	x := &finishes{p: newBusy(t), picker: &told{}}
	p, computes := x.p.serve, make(chan struct{})
	x.scripted = script(t, &runsOn{fake: fake{order: connector.Together}}, func(s *scripted, w http.ResponseWriter,
		r *http.Request, body string) {
		select {
		case <-computes:
		default:
			close(computes)
		}
		p(s, w, r, body)
	}, func(s *scripted, w http.ResponseWriter, r *http.Request, body string) {
		<-computes
		d(s, w, r, body)
	}, opts...)
	x.picker.pick = x.pair
	return x
}

// use makes the flow's picker the one that is told of legs.
func (x *finishes) use(t *testing.T, opts ...pdflow.Option) {
	t.Helper()
	flow, err := pdflow.New(&runsOn{fake: fake{order: connector.Together}}, pick.Func(x.picker.Pick),
		append([]pdflow.Option{pdflow.WithRetry(config.Retry{MaxAttempts: 1}),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: x.seen.SessionEnd})}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, flow.Shutdown(ctx))
	})
	x.flow, x.url = flow, serve(t, flow)
}

func (p *told) calls() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.of, " ")
}

// doers are the ways to run a request whose client may leave.
var doers = map[string]func(ctx context.Context, t *testing.T, f *pdflow.Flow, body string) error{
	"Do": func(ctx context.Context, t *testing.T, f *pdflow.Flow, body string) error {
		resp, err := f.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(body)})
		if err == nil {
			_ = resp.Body.Close()
		}
		return err
	},
	"steps, sent by the flow": func(ctx context.Context, t *testing.T, f *pdflow.Flow, body string) error {
		return driven(ctx, t, f, body, func(step *pdflow.Step) { step.Send(client.Transport) })
	},
	"steps, sent by the host": func(ctx context.Context, t *testing.T, f *pdflow.Flow, body string) error {
		return driven(ctx, t, f, body, func(step *pdflow.Step) {
			req, err := step.Take()
			if err != nil {
				step.Done(nil, err)
				return
			}
			step.Done(client.Transport.RoundTrip(req))
		})
	},
}

func driven(ctx context.Context, t *testing.T, f *pdflow.Flow, body string, send func(*pdflow.Step)) error {
	s, err := f.Begin(ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(body)})
	require.NoError(t, err)
	defer s.End(nil)
	for {
		step, _, err := s.Next(context.Background())
		if step == nil {
			return err
		}
		go send(step)
	}
}

// When the attempt ends, D's leg ends at once, and P's runs on: the client has its response, the picker hears of the
// attempt, and P's load stays until its leg ends.
func TestASentPrefillRunsOn(t *testing.T) {
	for name, c := range map[string]struct {
		d     handler
		end   func(leave func())
		limit time.Duration // of prefill, and of a leg that runs on
		want  pdflow.Code
		leg   pdflow.LegKind
	}{
		"the client leaves": {d: gone, end: func(leave func()) { leave() }, want: pdflow.CodeClientGone},
		"D fails":           {d: status(500), want: pdflow.CodeDecodeFailed, leg: pdflow.LegDecode},
		"D refuses":         {d: status(400), want: pdflow.CodeDecodeRejected, leg: pdflow.LegDecode},
		"P takes too long":  {d: gone, limit: 2 * time.Second, want: pdflow.CodeTimeout, leg: pdflow.LegPrefill},
	} {
		for by, do := range doers {
			t.Run(name+", "+by, func(t *testing.T) {
				t.Parallel()
				x := newFinishes(t, c.d)
				x.use(t, pdflow.WithTimeouts(config.Timeouts{Prefill: c.limit}))
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				go func() {
					<-x.p.computes
					time.Sleep(10 * time.Millisecond)
					if c.end != nil {
						c.end(leave)
					}
				}()
				err := do(ctx, t, x.flow, completion("a", ""))
				require.ErrorIs(t, err, c.want)
				o := last(x.scripted)
				assert.True(t, o.PrefillRuns)
				assert.False(t, o.Orphan)
				assert.Equal(t, pdflow.LegOutcome{Leg: pdflow.LegPrefill, Endpoint: x.pair.Prefill.ID}, o.Prefill)
				if c.leg != "" {
					assert.Equal(t, c.leg, o.Err.Leg)
				}
				if c.want == pdflow.CodeTimeout {
					assert.Equal(t, x.pair.Prefill.ID, o.Err.Endpoint, "the timeout counts against P")
				}
				assert.Equal(t, "all", x.picker.calls())
				assert.Empty(t, x.p.ended, "the client waited for P's end")
				close(x.p.answer)
				assert.Equal(t, "answered", <-x.p.ended)
				require.Eventually(t, func() bool { return x.picker.calls() == "all prefill" }, 20*time.Second,
					time.Millisecond, "P's load")
			})
		}
	}
}

// A leaver's prefill is bounded by its own time.
func TestAPrefillThatRunsOnHasItsTime(t *testing.T) {
	for limit := 200 * time.Millisecond; ; limit *= 4 {
		x := newFinishes(t, gone)
		x.use(t, pdflow.WithTimeouts(config.Timeouts{Prefill: limit}))
		ctx, leave := context.WithCancel(t.Context())
		go func() {
			select {
			case <-x.p.computes:
				leave()
			case <-ctx.Done():
			}
		}()
		begun := time.Now()
		err := doers["Do"](ctx, t, x.flow, completion("a", ""))
		leave()
		if errors.Is(err, pdflow.CodeTimeout) && limit < 10*time.Second {
			continue // before the client has left
		}
		require.ErrorIs(t, err, pdflow.CodeClientGone)
		assert.Equal(t, "cancelled", <-x.p.ended)
		assert.GreaterOrEqual(t, time.Since(begun), limit)
		assert.Less(t, time.Since(begun), limit+10*time.Second)
		return
	}
}

// Without a prefill timeout nobody would end the leg of a P that never answers, and P would get no pair any more.
func TestAPrefillThatRunsOnEndsWithItsLease(t *testing.T) {
	x := newFinishes(t, gone)
	flow, err := pdflow.New(&runsOn{fake: fake{order: connector.Together}, lease: 200 * time.Millisecond},
		pick.Func(x.picker.Pick), pdflow.WithTimeouts(config.Timeouts{Prefill: config.None, Handoff: config.None}))
	require.NoError(t, err)
	ctx, leave := context.WithCancel(t.Context())
	go func() { <-x.p.computes; leave() }()
	require.ErrorIs(t, doers["Do"](ctx, t, flow, completion("a", "")), pdflow.CodeClientGone)
	assert.Equal(t, "cancelled", <-x.p.ended)
	require.NoError(t, flow.Shutdown(t.Context()))
}

// A leg that was not sent does not go out after its attempt.
func TestAPrefillThatWasNotSentEndsWithItsAttempt(t *testing.T) {
	x := newFinishes(t, gone)
	for _, taken := range []bool{false, true} {
		s := begin(t, x.flow, completion("a", ""), nil)
		step, _, err := s.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, pdflow.LegPrefill, step.Leg)
		if taken {
			go step.Send(client.Transport) // waits for D's leg, which nobody sends
			time.Sleep(20 * time.Millisecond)
		}
		s.End(nil)
		_, err = step.Take()
		require.Error(t, err)
	}
	assert.Empty(t, x.all())
	for _, o := range x.seen.list() {
		assert.False(t, o.PrefillRuns)
	}
}

// brokenConn is a connection that breaks before a byte of a request is out.
type brokenConn struct{ net.Conn }

func (brokenConn) Write([]byte) (int, error) {
	return 0, &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.EPIPE)}
}

// A leg of which no byte has left is sent again. While it connects anew it ends with its attempt.
func TestAPrefillThatIsToBeSentAgainEndsWithItsAttempt(t *testing.T) {
	t.Parallel()
	x := newFinishes(t, gone)
	close(x.p.answer)
	var dials atomic.Int64
	again, ended := make(chan struct{}), make(chan struct{})
	dial := func(ctx context.Context, network, to string) (net.Conn, error) {
		if to == x.pair.Prefill.URL.Host && dials.Add(1) == 2 {
			close(again)
			defer close(ended)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		c, err := new(net.Dialer).DialContext(ctx, network, to)
		if to == x.pair.Prefill.URL.Host && err == nil {
			c = brokenConn{c}
		}
		return c, err
	}
	rt := transport.New(&transport.Options{DialContext: dial, ConnectTimeout: time.Hour})
	x.use(t, pdflow.WithTransport(rt), pdflow.WithTimeouts(config.Timeouts{Prefill: time.Hour}))
	ctx, leave := context.WithCancel(t.Context())
	go func() { <-again; leave() }()
	require.ErrorIs(t, doers["Do"](ctx, t, x.flow, completion("a", "")), pdflow.CodeClientGone)
	assert.False(t, last(x.scripted).PrefillRuns)
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("the leg still connects")
	}
	post(t, x.pair.Prefill.URL.String(), "/v1/completions", completion("a", "")) // D's script waits for P's
}

// Shutdown waits for legs that run on, and cuts them when its time is over.
func TestShutdownWaitsForPrefillsThatRunOn(t *testing.T) {
	for _, cut := range []bool{false, true} {
		x := newFinishes(t, gone)
		ctx, leave := context.WithCancel(t.Context())
		go func() { <-x.p.computes; leave() }()
		require.ErrorIs(t, doers["Do"](ctx, t, x.flow, completion("a", "")), pdflow.CodeClientGone)
		begun := time.Now()
		ctx, stop := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if !cut {
			ctx, stop = context.WithTimeout(t.Context(), 20*time.Second)
			go func() {
				time.Sleep(50 * time.Millisecond)
				close(x.p.answer)
			}()
		}
		err := x.flow.Shutdown(ctx)
		stop()
		if cut {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Equal(t, "cancelled", <-x.p.ended)
			continue
		}
		require.NoError(t, err)
		assert.Equal(t, "answered", <-x.p.ended)
		assert.Greater(t, time.Since(begun), 40*time.Millisecond)
	}
}

// An engine at which too many legs run on gets no further pair: another one does, or the request is refused.
func TestPrefillsThatRunOnAreBounded(t *testing.T) {
	x := newFinishes(t, gone)
	pdflow.LetRunOn(x.flow, 2)
	ctx, leave := context.WithCancel(t.Context())
	errs := make(chan error)
	for range 2 {
		go func() { errs <- doers["Do"](ctx, t, x.flow, completion("a", "")) }()
		<-x.p.computes
	}
	leave()
	for range 2 {
		require.ErrorIs(t, <-errs, pdflow.CodeClientGone)
	}
	before := strings.Count(x.all(), "P")
	r := post(t, x.url, "/v1/completions", completion("a", ""))
	require.Equal(t, 503, r.status, r.body)
	_, code := r.fault(t)
	assert.Equal(t, "overloaded", code)
	assert.NotEmpty(t, r.header.Get("Retry-After"))
	assert.Equal(t, before, strings.Count(x.all(), "P"), "the leg was sent")
	assert.False(t, last(x.scripted).Err.EngineFault())
	close(x.p.answer)
	require.Eventually(t, func() bool {
		ctx, leave := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer leave()
		_ = doers["Do"](ctx, t, x.flow, completion("a", ""))
		return strings.Count(x.all(), "P") > before
	}, 20*time.Second, time.Millisecond, "the engine stays refused")
}

// While legs run on at one engine, another one serves.
func TestAnotherEngineServesMeanwhile(t *testing.T) {
	p, free := newBusy(t), atomic.Int64{}
	serves := func(h handler) discovery.Endpoint {
		x := &scripted{}
		return endpoint(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			h(x, w, r, string(body))
		})), discovery.RolePrefill)
	}
	// What the free engine has computed, by prompt: a leg of the request that left may still wait at D for its own.
	var prompts sync.Map
	computed := func(body string) chan struct{} {
		c, _ := prompts.LoadOrStore(gjson.Get(body, "prompt").String(), make(chan struct{}, 1))
		return c.(chan struct{})
	}
	d := endpoint(t, serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		select {
		case <-computed(string(body)):
			says(200, ok)(w, r)
		case <-r.Context().Done():
		}
	})), discovery.RoleDecode)
	full := serves(p.serve)
	other := serves(func(x *scripted, w http.ResponseWriter, r *http.Request, b string) {
		free.Add(1)
		answer(ok)(x, w, r, b)
		computed(b) <- struct{}{}
	})
	flow, _ := newFlow(t, &runsOn{fake: fake{order: connector.Together}}, []discovery.Endpoint{full, other, d})
	pdflow.LetRunOn(flow, 1)
	n := 0
	do := func(ctx context.Context) (*pdflow.Response, error) {
		n++
		return flow.Do(ctx, &pdflow.Request{API: connector.APICompletions,
			Body: []byte(completion(strconv.Itoa(n), ""))})
	}
	ctx, leave := context.WithCancel(t.Context())
	go func() { <-p.computes; leave() }()
	for ctx.Err() == nil { // until a request met the busy engine, and left
		if resp, err := do(ctx); err == nil {
			_ = resp.Body.Close()
		}
	}
	onlyBusy := func() bool { return pdflow.RunningOn(flow) == 1 } // the other legs have ended
	before := free.Load()
	for range 6 {
		require.Eventually(t, onlyBusy, 20*time.Second, time.Millisecond)
		resp, err := do(t.Context())
		require.NoError(t, err)
		_ = resp.Body.Close()
	}
	assert.Equal(t, before+6, free.Load())
	close(p.answer)
}
