// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// fakeFleet is engines that are functions, behind a flow, for tests in fake time.
type fakeFleet struct {
	flow   *pdflow.Flow
	seen   *outcomes
	told   book
	spans  tree
	answer func(host string, nth int) response

	mu   sync.Mutex
	legs []sentLeg
	n    map[string]int
}

type sentLeg struct {
	host string
	at   time.Time
}

// RoundTrip answers a leg as the engine that it goes to.
func (f *fakeFleet) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		_, _ = io.Copy(io.Discard, r.Body)
	}
	f.mu.Lock()
	f.legs = append(f.legs, sentLeg{r.URL.Host, time.Now()})
	f.n[r.URL.Host]++
	answer := f.answer(r.URL.Host, f.n[r.URL.Host])
	f.mu.Unlock()
	return answer(r)
}

func (f *fakeFleet) sent() []sentLeg {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.legs)
}

// hosts are the engines that got legs, in that order.
func (f *fakeFleet) hosts() string {
	var all []string
	for _, l := range f.sent() {
		all = append(all, l.host)
	}
	return strings.Join(all, " ")
}

func (f *fakeFleet) do(body string) error {
	resp, err := f.flow.Do(context.Background(), &pdflow.Request{API: connector.APICompletions, Body: []byte(body)})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

// newFakeFleet starts a flow for engines of these names: p… prefill, d… decode. A colon and the length of an engine's
// context may follow a name.
func newFakeFleet(t *testing.T, c connector.KVConnector, names string, retry config.Retry,
	answer func(host string, nth int) response, opts ...pdflow.Option) *fakeFleet {
	t.Helper()
	return newFakeFleetOf(t, func(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
		return inner.Pick(ctx, in)
	}, c, names, retry, answer, opts...)
}

// newFakeFleetOf is newFakeFleet with a function between the flow and its picker.
func newFakeFleetOf(t *testing.T, asks func(context.Context, pdflow.Picker, *pdflow.PickInput) (pdflow.Pick, error),
	c connector.KVConnector, names string, retry config.Retry, answer func(host string, nth int) response,
	opts ...pdflow.Option) *fakeFleet {
	t.Helper()
	var eps []discovery.Endpoint
	for name := range strings.FieldsSeq(names) {
		role := discovery.RolePrefill
		if name[0] == 'd' {
			role = discovery.RoleDecode
		}
		name, context, known := strings.Cut(name, ":")
		e := endpoint(t, "http://"+name, role)
		if known {
			e.Attributes = map[string]string{"maxModelLen": context}
		}
		eps = append(eps, e)
	}
	f := &fakeFleet{answer: answer, n: map[string]int{}, seen: &outcomes{}}
	var err error
	picker := &openPicks{}
	inner := around{pick.New(setOf(t, eps...), pick.RoundRobin(), pick.WithSeed(1)), picker.pick}
	f.flow, err = pdflow.New(c, around{inner, asks},
		append([]pdflow.Option{pdflow.WithTransport(f), pdflow.WithRetry(retry), pdflow.WithoutPickWait(),
			pdflow.WithTimeouts(config.Timeouts{Prefill: 10 * time.Second, Decode: 10 * time.Second}),
			metered(&f.told), traced(&f.spans),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: f.seen.SessionEnd})}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, f.flow.Shutdown(context.Background()))
		require.Zero(t, picker.open.Load(), "each pick is told its end, once")
	})
	return f
}

// openPicks counts picks whose end was not told.
type openPicks struct{ open atomic.Int32 }

func (p *openPicks) pick(ctx context.Context, inner pdflow.Picker, in *pdflow.PickInput) (pdflow.Pick, error) {
	x, err := inner.Pick(ctx, in)
	if err == nil {
		p.open.Add(1)
		done := x.Done
		x.Done = func(o *pdflow.Outcome) { p.open.Add(-1); done(o) }
	}
	return x, err
}

// inMemory is a fleet of one pair that answers after a time, and is tried once.
func inMemory(t *testing.T, answers time.Duration, opts ...pdflow.Option) *fakeFleet {
	t.Helper()
	return newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 1},
		func(string, int) response { return after(answers, replies(200)) }, opts...)
}

type response = func(*http.Request) (*http.Response, error)

// after is a response that takes its time, and ends with its request.
func after(d time.Duration, then response) response {
	return func(r *http.Request) (*http.Response, error) {
		select {
		case <-time.After(d):
			return then(r)
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
}

func replies(code int, header ...string) response {
	return func(*http.Request) (*http.Response, error) {
		h := http.Header{"Content-Type": {"application/json"}}
		for i := 0; i+1 < len(header); i += 2 {
			h.Set(header[i], header[i+1])
		}
		return &http.Response{StatusCode: code, Header: h, ContentLength: int64(len(ok)),
			Body: io.NopCloser(strings.NewReader(ok))}, nil
	}
}

func hangs(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// streaming responds with events, and then, after a pause, with the end.
func streaming(pause time.Duration, end error, events ...string) response {
	return func(*http.Request) (*http.Response, error) {
		out, in := io.Pipe()
		go func() {
			_, _ = io.WriteString(in, strings.Join(events, ""))
			time.Sleep(pause)
			_ = in.CloseWithError(end)
		}()
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
			ContentLength: -1, TransferEncoding: []string{"chunked"}, Body: out}, nil
	}
}
