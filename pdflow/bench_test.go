// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	sdkless "go.opentelemetry.io/otel/metric/noop"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// stubs answers both legs without a network. BenchmarkStubs measures its own allocations, which are subtracted.
type stubs struct{}

var (
	prefillResponse = []byte(`{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"a",` +
		`"finish_reason":"length"}],"usage":{"prompt_tokens":240,"total_tokens":241,"completion_tokens":1},` +
		`"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[13,14,15,16,17,` +
		`18,19,20]],"remote_engine_id":"e3e63b5c-0c22-4617-8345-a0ce1bca7526",` +
		`"remote_request_id":"cmpl-1-0-aebcdc41","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,` +
		`"dcp_size":1,"pp_size":1,"remote_num_tokens":240,"remote_blocks_expiry_time":null,"transfer_mode":"pull",` +
		`"remote_prefill_cached_tokens":0}}`)
	decodeResponse = []byte(`{"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"` +
		strings.Repeat("abc ", 20) + `","finish_reason":"length"}]}`)
	jsonHeader = http.Header{"Content-Type": {"application/json"}}
)

func (stubs) RoundTrip(r *http.Request) (*http.Response, error) {
	n, _ := io.Copy(io.Discard, r.Body)
	_ = r.Body.Close()
	if n != r.ContentLength {
		return nil, io.ErrUnexpectedEOF
	}
	body := decodeResponse
	if r.URL.Host == "p:1" {
		body = prefillResponse
	}
	return &http.Response{StatusCode: 200, Header: jsonHeader, Body: io.NopCloser(bytes.NewReader(body)),
		ContentLength: int64(len(body)), Request: r}, nil
}

type discard struct{ h http.Header }

func (d *discard) Header() http.Header         { return d.h }
func (d *discard) Write(b []byte) (int, error) { return len(b), nil }
func (d *discard) WriteHeader(int)             {}

// As net/http's own writers have them. Without them each call would make an error.
func (d *discard) SetWriteDeadline(time.Time) error { return nil }
func (d *discard) SetReadDeadline(time.Time) error  { return nil }
func (d *discard) FlushError() error                { return nil }

// benchFlow is a flow over stubs, with all options that the gateway sets.
func benchFlow(b testing.TB) *pdflow.Flow {
	return benchFlowOver(b, "http://p:1", "http://d:1", pdflow.WithTransport(stubs{}))
}

func benchFlowOver(b testing.TB, prefill, decode string, opts ...pdflow.Option) *pdflow.Flow {
	c, err := nixl.New(nil)
	require.NoError(b, err)
	p, err := discovery.New(prefill, discovery.RolePrefill)
	require.NoError(b, err)
	d, err := discovery.New(decode, discovery.RoleDecode)
	require.NoError(b, err)
	set, err := static.NewSet(p, d)
	require.NoError(b, err)
	flow, err := pdflow.New(c, pick.New(set, pick.RoundRobin()),
		append(opts, metered(sdkless.NewMeterProvider()))...)
	require.NoError(b, err)
	return flow
}

func body2KB() []byte {
	return []byte(`{"model":"tiny","messages":[{"role":"system","content":"You are terse."},{"role":"user",` +
		`"content":"` + strings.Repeat("word ", 380) + `"}],"max_tokens":32,"temperature":0}`)
}

func request2KB(body []byte) *http.Request {
	r, _ := http.NewRequest(http.MethodPost, "http://gateway/v1/chat/completions", bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer x")
	return r
}

// BenchmarkRequest2KB is one 2 KB request: handler and both legs over in-memory transports. BenchmarkStubs is the
// stubs' share.
func BenchmarkRequest2KB(b *testing.B) {
	flow := benchFlow(b)
	body := body2KB()
	b.ReportAllocs()
	for b.Loop() {
		flow.ServeHTTP(&discard{http.Header{}}, request2KB(body))
	}
}

// BenchmarkStubs measures what the benchmark itself costs: the client's request, its writer, and both responses.
func BenchmarkStubs(b *testing.B) {
	body := body2KB()
	b.ReportAllocs()
	for b.Loop() {
		benchStubs(body)
	}
}

func benchStubs(body []byte) {
	w := &discard{http.Header{}}
	r := request2KB(body)
	_, _ = w.Write(nil)
	for _, host := range []string{"p:1", "d:1"} {
		r.URL.Host = host
		r.Body, _ = r.GetBody()
		resp, _ := stubs{}.RoundTrip(r)
		_, _ = io.Copy(io.Discard, resp.Body)
	}
}

// wireStub is an engine that gives one response over real connections, and allocates nothing for it.
func wireStub(tb testing.TB, body []byte) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	response := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		len(body), body)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { _ = serveStub(c, response) })
		}
	})
	tb.Cleanup(func() { _ = l.Close(); serving.Wait() })
	return "http://" + l.Addr().String()
}

func serveStub(c net.Conn, response []byte) error {
	defer c.Close()
	r := bufio.NewReader(c)
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if v, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			length = 0
			for _, digit := range bytes.TrimSpace(v) {
				length = 10*length + int(digit-'0')
			}
		}
		if len(line) > len("\r\n") {
			continue
		}
		if _, err := r.Discard(length); err != nil {
			return err
		}
		if _, err := c.Write(response); err != nil {
			return err
		}
	}
}

// BenchmarkOwnTransport2KB is BenchmarkRequest2KB over pdkit's transport and loopback.
func BenchmarkOwnTransport2KB(b *testing.B) {
	flow := ownFlow(b)
	body := body2KB()
	b.ReportAllocs()
	for b.Loop() {
		flow.ServeHTTP(&discard{http.Header{}}, request2KB(body))
	}
}

// BenchmarkManyClients is BenchmarkOwnTransport2KB with 32 clients at once for each processor, for profiles of what they
// wait for: go test -run=^$ -bench ManyClients -mutexprofile mutex.out ./pdflow.
func BenchmarkManyClients(b *testing.B) {
	flow := ownFlow(b)
	body := body2KB()
	b.SetParallelism(32)
	b.RunParallel(func(next *testing.PB) {
		for next.Next() {
			flow.ServeHTTP(&discard{http.Header{}}, request2KB(body))
		}
	})
}

// ownFlow sends its legs through pdkit's transport. Its connections end before the engines wait for them.
func ownFlow(b testing.TB) *pdflow.Flow {
	flow := benchFlowOver(b, wireStub(b, prefillResponse), wireStub(b, decodeResponse))
	b.Cleanup(func() { require.NoError(b, flow.Shutdown(context.Background())) })
	return flow
}
