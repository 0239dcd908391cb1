// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
)

// ofSize is a request with a body of so many bytes.
func ofSize(n int) string {
	return `{"model":"m","prompt":"` + strings.Repeat("a", n-24) + `"}`
}

// A body is refused before it is read if the others in flight leave no room for it, and served afterwards.
// A number of bytes that nobody can have is refused, and changes nothing.
func TestABudgetRefusesWhatWouldOverflow(t *testing.T) {
	b := &pdflow.Budget{Bytes: 10}
	require.True(t, b.Take(4))
	require.False(t, b.Take(math.MaxInt64))
	require.EqualValues(t, 4, b.InUse())
	require.EqualValues(t, 1, b.Refused())
}

func TestBodiesInFlightAreBounded(t *testing.T) {
	for _, length := range []string{"known", "unknown"} {
		t.Run(length, func(t *testing.T) {
			budget := &pdflow.Budget{Bytes: 250_000}
			hold, came := make(chan struct{}), make(chan struct{}, 3)
			x := script(t, &fake{}, func(s *scripted, w http.ResponseWriter, r *http.Request, body string) {
				came <- struct{}{}
				<-hold
				answer(ok)(s, w, r, body)
			}, answer(ok), pdflow.WithBudget(budget))
			release := sync.OnceFunc(func() { close(hold) })
			t.Cleanup(release)
			send := func() reply {
				body := io.Reader(strings.NewReader(ofSize(100_000)))
				if length == "unknown" {
					body = io.MultiReader(body)
				}
				req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, x.url+"/v1/completions", body)
				require.NoError(t, err)
				req.Header.Set("Content-Type", "application/json")
				resp, err := client.Do(req)
				require.NoError(t, err)
				defer resp.Body.Close()
				data, err := io.ReadAll(resp.Body)
				return reply{status: resp.StatusCode, header: resp.Header, body: string(data), err: err}
			}
			var wg sync.WaitGroup
			n := 2
			if length == "unknown" {
				n = 1 // its buffers are larger than its bytes
			}
			for range n {
				wg.Go(func() { assert.Equal(t, 200, send().status) })
				<-came
			}
			assert.GreaterOrEqual(t, budget.InUse(), int64(n*100_000))
			r := send()
			assert.Equal(t, http.StatusServiceUnavailable, r.status)
			assert.Equal(t, "overloaded", gjson.Get(r.body, "error.code").String(), r.body)
			assert.Equal(t, "1", r.header.Get("Retry-After"))
			assert.EqualValues(t, 1, budget.Refused())
			release()
			wg.Wait()
			assert.Equal(t, 200, send().status)
			require.Eventually(t, func() bool { return budget.InUse() == 0 }, 20*time.Second, time.Millisecond)
		})
	}
}

// A prefill response for which there is no room ends the request: another pair's would be as large.
func TestPrefillResponsesInFlightAreBounded(t *testing.T) {
	budget := &pdflow.Budget{Bytes: 1 << 20}
	large := `{"a":"` + strings.Repeat("a", 2<<20) + `"}`
	x := script(t, &fake{}, answer(large), answer(ok), pdflow.WithBudget(budget))
	r := post(t, x.url, "/v1/completions", `{"prompt":"a"}`)
	assert.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	assert.Equal(t, "overloaded", gjson.Get(r.body, "error.code").String(), r.body)
	require.Eventually(t, func() bool { return budget.InUse() == 0 }, 20*time.Second, time.Millisecond)
}

// Two attempts at a prefill response of 1 GB that announces no length cost 470 MB when a growing buffer read it.
func TestAHugePrefillResponseCostsLittle(t *testing.T) {
	piece := []byte(strings.Repeat("a", 1<<20))
	huge := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "application/json")
		for range 1 << 10 {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	}
	x := script(t, &fake{}, huge, answer(ok), pdflow.WithRetry(config.Retry{MaxAttempts: 2,
		BackoffBase: time.Millisecond}))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r := post(t, x.url, "/v1/completions", `{"prompt":"a"}`)
	runtime.ReadMemStats(&after)
	assert.Equal(t, http.StatusBadGateway, r.status, r.body)
	allocated := after.TotalAlloc - before.TotalAlloc
	assert.Less(t, allocated, uint64(160<<20), "two attempts read 64 MiB each")
	t.Logf("%.1f MB", float64(allocated)/1e6)
}

// blocking is a transport whose requests wait, with their bodies unread, until it is closed.
type blocking struct {
	came  sync.WaitGroup
	ended chan struct{}
}

func (b *blocking) RoundTrip(r *http.Request) (*http.Response, error) {
	b.came.Done()
	<-b.ended
	_ = r.Body.Close()
	return nil, io.ErrUnexpectedEOF
}

// endlessA gives the letter a.
type endlessA struct{}

func (endlessA) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'a'
	}
	return len(p), nil
}

// TestMemoryOfARequest measures what a request holds while it waits for prefill, by the size of its body.
// PDKIT_UPDATE=1 writes the figures into docs/reliability/memory.md.
func TestMemoryOfARequest(t *testing.T) {
	const head, tail = `{"model":"m","prompt":"`, `"}`
	rows, once := "", config.Retry{MaxAttempts: 1}
	for _, c := range []struct {
		name              string
		size, n, prefills int
		retry             config.Retry
	}{
		{"2 KB", 2 << 10, 500, 1, once}, {"128 KB", 128 << 10, 50, 1, once}, {"1 MB", 1 << 20, 10, 1, once},
		{"32 MB", 32 << 20, 2, 1, once},
		{"1 MB, hedged prefill", 1 << 20, 3, 2, config.Retry{Hedge: time.Millisecond}}, // more are not hedged at once
	} {
		budget, engines := &pdflow.Budget{Bytes: 1 << 30}, &blocking{ended: make(chan struct{})}
		flow, _ := newFlow(t, &storing{}, []discovery.Endpoint{endpoint(t, "http://127.0.0.1:1", discovery.RolePrefill),
			endpoint(t, "http://127.0.0.1:2", discovery.RolePrefill),
			endpoint(t, "http://127.0.0.1:3", discovery.RoleDecode)},
			pdflow.WithTransport(engines), pdflow.WithBudget(budget),
			pdflow.WithRetry(c.retry))
		engines.came.Add(c.n * c.prefills)
		var wg sync.WaitGroup
		before := heap()
		for range c.n {
			body := io.MultiReader(strings.NewReader(head),
				io.LimitReader(endlessA{}, int64(c.size-len(head)-len(tail))),
				strings.NewReader(tail))
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/completions", body)
			r.Header.Set("Content-Type", "application/json")
			r.ContentLength = int64(c.size)
			wg.Go(func() { flow.ServeHTTP(httptest.NewRecorder(), r) })
		}
		engines.came.Wait()
		each, taken := (heap()-before)/float64(c.n), budget.InUse()/int64(c.n)
		close(engines.ended)
		wg.Wait()
		assert.EqualValues(t, c.size, taken, c.name)
		if !raceDetector {
			assert.Less(t, each, 1.1*float64(c.size)+64<<10, c.name)
		}
		assert.Zero(t, budget.InUse())
		rows += fmt.Sprintf("| %s | %d | %.0f KB |\n", c.name, taken, each/1024)
	}
	t.Log(rows)
	if os.Getenv("PDKIT_UPDATE") == "1" {
		require.NoError(t, os.WriteFile("../docs/reliability/memory.md", []byte(fmt.Sprintf(memoryPage, rows)), 0o644))
	}
}

// heap is what is in use after a collection, in bytes.
func heap() float64 {
	runtime.GC()
	runtime.GC() // pools are emptied in two
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc + m.StackInuse)
}

const memoryPage = `# Memory of requests in flight

<!-- Written by: PDKIT_UPDATE=1 go test -run TestMemoryOfARequest ./pdflow -->

A request holds its body once, from its first byte until its response has ended: the flow sends the legs from those bytes. If the body announces no length (chunked), the flow holds it twice for a moment when its end is known. The table is measured, without the connections to the client and to the engine.

| body | taken of the budget, bytes | in memory |
|---|---|---|
%s
The flow holds a response of a prefill or encode engine until the attempt has ended. It reads up to 64 MiB; a larger response fails the attempt (502), and two attempts at one of 1 GB that announces no length allocate less than 160 MiB. The flow passes responses of decode engines on in pieces of 4 to 32 KB. If a stream may be rescued, the flow holds each event until it is whole, up to 16 MiB; a larger event cuts the stream.

A budget bounds all bodies and prefill responses together: ` + "`spec.maxBytesInFlight`" + ` of the Gateway (default: a quarter of the memory limit, or 1 GiB), ` + "`pdflow.WithBudget`" + ` of a flow or a Mux in a program. The flow takes bytes of the budget before it allocates memory. A body gets up to 16 KiB at first. When these are full it gets eight times as much, and so on (where it announces no length, twice as much, from 4 KiB on). So a client that announces much and sends nothing takes little. A body that does not fill what it has got is ended with 408, code ` + "`body_timeout`" + `: it may bring nothing for 10 s, a sixth of ` + "`Timeouts.Body`" + `; then the share that is filled must keep pace with the share of the 60 s that is over. Bodies and responses of more than 64 KiB may take seven eighths of the budget; the last eighth is kept for smaller ones. If nothing is left for a request, it gets 503, code ` + "`overloaded`" + `, with Retry-After; for a body nothing was sent to an engine, and its connection is closed. The gateway's metrics ` + "`pd.bytes.in_flight`" + ` and ` + "`pd.bytes.refused`" + ` show it.
`
