// SPDX-License-Identifier: Apache-2.0

package responses_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow/responses"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fleet is engines d0, d1, …, of which each answers by its own function.
type fleet struct {
	set *discovery.Set
	mu  sync.Mutex
	ask []saying
	n   int // requests
	at  int // at once
	max int
}

func (f *fleet) RoundTrip(r *http.Request) (*http.Response, error) {
	f.mu.Lock()
	f.n++
	f.at++
	f.max = max(f.max, f.at)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.at--
	}()
	var i int
	if _, err := fmt.Sscanf(r.URL.Host, "d%d", &i); err != nil {
		return nil, err
	}
	status, err := f.ask[i](r)
	if err != nil {
		return nil, err
	}
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader("{}"))}, nil
}

// saying is what an engine answers.
type saying = func(*http.Request) (int, error)

func says(status int) saying {
	return func(*http.Request) (int, error) { return status, nil }
}

func fails(err error) saying {
	return func(*http.Request) (int, error) { return 0, err }
}

func newFleet(t *testing.T, ask ...saying) (*fleet, *responses.Index) {
	t.Helper()
	f := &fleet{ask: ask}
	var engines []discovery.Endpoint
	for i := range ask {
		e, err := discovery.New(fmt.Sprintf("http://d%d:1", i), discovery.RoleDecode)
		require.NoError(t, err)
		e.ID = fmt.Sprintf("d%d", i)
		engines = append(engines, e)
	}
	p, err := discovery.New("http://p:1", discovery.RolePrefill)
	require.NoError(t, err)
	f.set, err = static.NewSet(append(engines, p)...)
	require.NoError(t, err)
	return f, responses.New(f.set, f)
}

func client() http.Header { return http.Header{"Authorization": {"Bearer k"}} }

// What the engines say decides who has a response. Decode engines only are asked.
func TestWhoHasAResponse(t *testing.T) {
	refused := fails(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED})
	for name, c := range map[string]struct {
		asks   []saying
		engine string
		err    error
	}{
		"one of two":                      {[]saying{says(404), says(200)}, "d1", nil},
		"nobody":                          {[]saying{says(404), says(404)}, "", responses.ErrNotFound},
		"a store that is off":             {[]saying{says(400), says(405), says(501)}, "", responses.ErrNotFound},
		"a process that has ended":        {[]saying{says(404), refused}, "", responses.ErrNotFound},
		"an engine that fails":            {[]saying{says(404), says(500)}, "", responses.ErrUnavailable},
		"an engine that is busy":          {[]saying{says(429)}, "", responses.ErrUnavailable},
		"an engine that cannot be asked":  {[]saying{says(404), fails(io.EOF)}, "", responses.ErrUnavailable},
		"one beside an engine that fails": {[]saying{fails(io.EOF), says(200)}, "d1", nil},
		"a client that may not ask":       {[]saying{says(404), says(401)}, "d1", nil},
		"a transport that panics": {[]saying{says(404),
			func(*http.Request) (int, error) { panic("x") }}, "", responses.ErrUnavailable},
		"no engine at all": {nil, "", responses.ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, x := newFleet(t, c.asks...)
			engine, err := x.Find(t.Context(), "resp_1", client)
			assert.Equal(t, c.engine, engine)
			assert.ErrorIs(t, err, c.err)
		})
	}
}

func TestTheClientsKeysAreSent(t *testing.T) {
	f, x := newFleet(t, func(r *http.Request) (int, error) {
		if r.Header.Get("Authorization") != "Bearer k" || r.URL.Path != "/v1/responses/resp_1" {
			return 401, nil
		}
		return 200, nil
	})
	engine, err := x.Find(t.Context(), "resp_1", func() http.Header { return http.Header{} })
	assert.Equal(t, "d0", engine, "it tells the client itself")
	require.NoError(t, err)
	_, known := x.Known("resp_1")
	assert.False(t, known)
	_, err = x.Find(t.Context(), "resp_1", client)
	require.NoError(t, err)
	_, known = x.Known("resp_1")
	assert.True(t, known)
	assert.Equal(t, 2, f.n, "one client's refusal says nothing of another's")
}

func TestWhatIsKnownIsNotAskedFor(t *testing.T) {
	f, x := newFleet(t, says(404), says(404))
	x.Learn("resp_1", "d1", "")
	engine, err := x.Find(t.Context(), "resp_1", nil)
	assert.Equal(t, "d1", engine)
	require.NoError(t, err)
	assert.Zero(t, f.n)
	x.Forget("resp_1", "d0")
	_, known := x.Known("resp_1")
	assert.True(t, known, "another engine's word")
	x.Forget("resp_1", "d1")
	_, err = x.Find(t.Context(), "resp_1", client)
	assert.ErrorIs(t, err, responses.ErrNotFound)
	x.Learn("resp_1", "d1", "")
	_, known = x.Known("resp_1")
	assert.True(t, known)
	x.Learn("resp_2", "gone", "")
	_, err = x.Find(t.Context(), "resp_2", client)
	assert.ErrorIs(t, err, responses.ErrNotFound, "its engine has left")
}

// The name by which a client has asked for a response's model is kept when its engine is looked for once more.
func TestTheNameByWhichAModelWasAskedFor(t *testing.T) {
	_, x := newFleet(t, says(404), says(200))
	assert.Empty(t, x.Model("resp_1"))
	x.Learn("resp_1", "d0", "gpt-4o")
	x.Forget("resp_1", "d0")
	assert.Equal(t, "gpt-4o", x.Model("resp_1"))
	_, err := x.Find(t.Context(), "resp_1", client)
	require.NoError(t, err)
	assert.Equal(t, "gpt-4o", x.Model("resp_1"))
	x.Learn("resp_1", "d1", "other")
	assert.Equal(t, "other", x.Model("resp_1"))
	x.Learn("resp_2", "d1", strings.Repeat("x", 257))
	assert.Empty(t, x.Model("resp_2"), "a client may choose it")
}

// An engine that fails its health probes is asked itself.
func TestAnEngineThatIsNotReady(t *testing.T) {
	f, x := newFleet(t, says(404), says(200))
	x.Learn("resp_1", "d1", "")
	f.set.SetHealthy("d1", false)
	engine, err := x.Find(t.Context(), "resp_1", client)
	assert.Equal(t, "d1", engine)
	require.NoError(t, err)
	assert.Equal(t, 2, f.n)
	f.ask[1] = fails(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED})
	x.Learn("resp_2", "d1", "")
	_, err = x.Find(t.Context(), "resp_2", client)
	assert.ErrorIs(t, err, responses.ErrNotFound)
}

func TestIDsThatNoEngineGives(t *testing.T) {
	f, x := newFleet(t, says(200))
	for _, id := range []string{"", ".", "..", "a/b", "a b", "a%2f", "a?b", "ä", strings.Repeat("a", 257)} {
		x.Learn(id, "d0", "")
		if strings.ContainsAny(id, "/?% ") {
			x.Forget(id, "d0")
		}
		_, err := x.Find(t.Context(), id, client)
		assert.ErrorIs(t, err, responses.ErrNotFound, id)
	}
	assert.Zero(t, f.n)
}

// The oldest goes when there are too many.
func TestWhatIsRememberedIsBounded(t *testing.T) {
	_, x := newFleet(t, says(404))
	for i := range 1<<16 + 10 {
		x.Learn(fmt.Sprint("resp_", i), "d0", "")
	}
	_, known := x.Known("resp_9")
	assert.False(t, known)
	_, known = x.Known("resp_10")
	assert.True(t, known)
}

func TestSearchesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := func(*http.Request) (int, error) { time.Sleep(10 * time.Millisecond); return 404, nil }
		f, x := newFleet(t, slow, slow)
		var wg sync.WaitGroup
		var mu sync.Mutex
		none, later := 0, 0
		for i := range 1000 {
			wg.Go(func() {
				_, err := x.Find(t.Context(), fmt.Sprint("resp_", i), client)
				mu.Lock()
				defer mu.Unlock()
				if errors.Is(err, responses.ErrNotFound) {
					none++
				} else if errors.Is(err, responses.ErrUnavailable) {
					later++
				}
			})
		}
		wg.Wait()
		assert.Equal(t, []int{128, 872}, []int{none, later})
		assert.Equal(t, []int{256, 16}, []int{f.n, f.max})
		time.Sleep(time.Second)
		for range 100 {
			wg.Go(func() { _, _ = x.Find(t.Context(), "resp_same", client) })
		}
		wg.Wait()
		assert.Equal(t, 258, f.n, "one search for all who wait")
		time.Sleep(900 * time.Millisecond)
		_, err := x.Find(t.Context(), "resp_same", client)
		assert.ErrorIs(t, err, responses.ErrNotFound)
		assert.Equal(t, 258, f.n, "and for who comes soon after")
		time.Sleep(200 * time.Millisecond)
		_, _ = x.Find(t.Context(), "resp_same", client)
		assert.Equal(t, 260, f.n)
	})
}

// Who leaves does not end the search of those who wait. An engine that is silent ends it after two seconds.
func TestAClientThatLeavesAndAnEngineThatIsSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent := func(r *http.Request) (int, error) { <-r.Context().Done(); return 0, r.Context().Err() }
		_, x := newFleet(t, silent)
		began := time.Now()
		ctx, leave := context.WithCancel(t.Context())
		leave()
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = x.Find(ctx, "resp_1", client) })
		wg.Go(func() {
			time.Sleep(time.Second)
			_, err := x.Find(t.Context(), "resp_1", client)
			assert.ErrorIs(t, err, responses.ErrUnavailable)
			assert.Equal(t, 2*time.Second, time.Since(began))
		})
		wg.Wait()
	})
}

// Two engines, of which the second has a response that the index has not seen.
func Example() {
	set := exampleSet("d0", "d1")
	index := responses.New(set, exampleEngines{"d1": "resp_2"})
	index.Learn("resp_1", "d0", "")
	for _, id := range []string{"resp_1", "resp_2", "resp_3"} {
		engine, err := index.Find(context.Background(), id, func() http.Header { return http.Header{} })
		fmt.Println(id, engine, err)
	}
	// Output:
	// resp_1 d0 <nil>
	// resp_2 d1 <nil>
	// resp_3  responses: no decode engine has the response
}

// exampleEngines have one response each, by their hosts.
type exampleEngines map[string]string

func (e exampleEngines) RoundTrip(r *http.Request) (*http.Response, error) {
	status := http.StatusNotFound
	if r.URL.Path == "/v1/responses/"+e[r.URL.Host] {
		status = http.StatusOK
	}
	return &http.Response{StatusCode: status, Body: http.NoBody}, nil
}

func exampleSet(hosts ...string) *discovery.Set {
	var engines []discovery.Endpoint
	for _, host := range hosts {
		e, _ := discovery.New("http://"+host, discovery.RoleDecode) // a good URL
		engines = append(engines, e)
	}
	set, _ := static.NewSet(engines...)
	return set
}
