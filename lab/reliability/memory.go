// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/lab/internal/apis"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// inMemory is what open streams cost a handler that has no network below it: the library's own share.
type inMemory struct {
	streams     int
	heap, stack int64 // bytes, of all streams
	goroutines  int
	whole       int // streams that ended with each of their bytes
}

// quiet are engines without a network: P answers at once, D's streams wait after their first event until go is closed.
type quiet struct{ on chan struct{} }

const handoffResponse = `{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":` +
	`"length"}],"usage":{"prompt_tokens":64,"total_tokens":65,"completion_tokens":1},"kv_transfer_params":{` +
	`"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[13,14]],"remote_engine_id":` +
	`"e3e63b5c-0c22-4617-8345-a0ce1bca7526","remote_request_id":"cmpl-1-0-aebcdc41","remote_host":"127.0.0.1",` +
	`"remote_port":5600,"tp_size":1,"remote_num_tokens":64,"transfer_mode":"pull"}}`

const (
	firstEvent = `data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"a"}]}` + "\n\n"
	lastEvent  = `data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"b",` +
		`"finish_reason":"length"}]}` + "\n\ndata: [DONE]\n\n"
)

func (q quiet) RoundTrip(r *http.Request) (*http.Response, error) {
	_, err := io.Copy(io.Discard, r.Body)
	_ = r.Body.Close()
	resp := &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}},
		Request: r, ContentLength: int64(len(handoffResponse)), Body: io.NopCloser(strings.NewReader(handoffResponse))}
	if r.URL.Host == "d:1" {
		resp.Header = http.Header{"Content-Type": {"text/event-stream"}}
		resp.ContentLength, resp.Body = -1, &quietStream{on: q.on}
	}
	return resp, err
}

type quietStream struct {
	on    chan struct{}
	given int
}

func (s *quietStream) Read(p []byte) (int, error) {
	s.given++
	switch s.given {
	case 1:
		return copy(p, firstEvent), nil
	case 2:
		<-s.on
		return copy(p, lastEvent), nil
	}
	return 0, io.EOF
}

func (*quietStream) Close() error { return nil }

// counter is a client that reads everything at once.
type counter struct {
	h     http.Header
	bytes int
	first func()
}

func (c *counter) Header() http.Header { return c.h }
func (c *counter) WriteHeader(int)     {}
func (c *counter) Flush()              {}
func (c *counter) Write(p []byte) (int, error) {
	if c.bytes == 0 {
		c.first()
	}
	c.bytes += len(p)
	return len(p), nil
}

// measureInMemory opens streams through a flow in this process.
func measureInMemory(ctx context.Context, n int) (*inMemory, error) {
	m := &inMemory{streams: n}
	if n == 0 {
		return m, nil
	}
	q := quiet{on: make(chan struct{})}
	flow, err := flowOver(q)
	if err != nil {
		return nil, err
	}
	var opened, whole atomic.Int64
	var all sync.WaitGroup
	body := []byte(`{"model":"tiny","prompt":"` + strings.Repeat("word ", 60) + `","max_tokens":2,"stream":true}`)
	before, goroutines := memory(), runtime.NumGoroutine()
	for range n {
		all.Go(func() {
			c := &counter{h: http.Header{}, first: func() { opened.Add(1) }}
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://gateway"+apis.Completions.Path,
				bytes.NewReader(body))
			if err != nil {
				return
			}
			r.Header.Set("Content-Type", "application/json")
			flow.ServeHTTP(c, r)
			if c.bytes == len(firstEvent+lastEvent) {
				whole.Add(1)
			}
		})
	}
	err = eventually(ctx, time.Minute, "not all streams are open", func() error {
		if opened.Load() < int64(n) {
			return fmt.Errorf("%d of %d", opened.Load(), n)
		}
		return nil
	})
	after := memory()
	m.heap = int64(after.HeapAlloc) - int64(before.HeapAlloc)
	m.stack = int64(after.StackInuse) - int64(before.StackInuse)
	m.goroutines = runtime.NumGoroutine() - goroutines
	close(q.on)
	all.Wait()
	m.whole = int(whole.Load())
	if err == nil && m.whole != n {
		err = fmt.Errorf("in memory %d of %d streams are whole", m.whole, n)
	}
	return m, err
}

// flowOver is a flow over a pair of engines behind a round tripper.
func flowOver(rt http.RoundTripper) (*pdflow.Flow, error) {
	c, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	p, err := discovery.New("http://p:1", discovery.RolePrefill)
	if err != nil {
		return nil, err
	}
	d, err := discovery.New("http://d:1", discovery.RoleDecode)
	if err != nil {
		return nil, err
	}
	set, err := static.NewSet(p, d)
	if err != nil {
		return nil, err
	}
	return pdflow.New(c, pick.New(set, pick.RoundRobin()), pdflow.WithTransport(rt))
}

func memory() (m runtime.MemStats) {
	runtime.GC()
	runtime.GC() // the first one only moves pools to their victims
	runtime.ReadMemStats(&m)
	return m
}

func (m *inMemory) report(p func(string, ...any)) {
	if m == nil || m.streams == 0 {
		return
	}
	each := func(n int64) string { return fmt.Sprintf("%.1f KiB", float64(n)/1024/float64(m.streams)) }
	p("\n%d streams at a time through a handler (`pdflow.Flow.ServeHTTP`) over engines and clients in memory, so the "+
		"library's own share, the client's goroutine and a body of 370 bytes included: heap %s and stacks %s each, "+
		"%.1f goroutines each; %d of %d streams whole.", m.streams, each(m.heap), each(m.stack),
		float64(m.goroutines)/float64(m.streams), m.whole, m.streams)
}
