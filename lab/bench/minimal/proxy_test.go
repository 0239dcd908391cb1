// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/lab/bench/internal/load"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bench has the benchmark's clients and engines, and a minimal proxy between them that reaches the engines through a
// transport that tampers with what passes.
type bench struct {
	board   *load.Board
	engines *load.Engines
	address string
}

func newBench(t *testing.T, tamper func(http.RoundTripper) http.RoundTripper) *bench {
	t.Helper()
	b := &bench{board: load.NewBoard()}
	var err error
	b.engines, err = load.StartEngines(t.Context(), b.board, 1)
	require.NoError(t, err)
	t.Cleanup(b.engines.Close)
	transport := newTransport()
	t.Cleanup(transport.CloseIdleConnections)
	server := httptest.NewServer(newProxy("http://"+b.engines.Prefill[0], "http://"+
		b.engines.Decode[0], tamper(transport)))
	t.Cleanup(server.Close)
	b.address = strings.TrimPrefix(server.URL, "http://")
	return b
}

func (b *bench) client(t *testing.T, slot int, plan *load.Plan) *load.Client {
	t.Helper()
	c := load.NewClient(b.board, slot, load.Target{Proxy: b.address}, plan, &load.Meter{})
	t.Cleanup(c.Close)
	return c
}

func honest(next http.RoundTripper) http.RoundTripper { return next }

func TestEveryShapeOfLoadIsServedRight(t *testing.T) {
	for name, plan := range map[string]*load.Plan{
		"2 KB":             {Prompt: load.NewPrompt(2<<10, false)},
		"1 MB":             {Prompt: load.NewPrompt(1<<20, false)},
		"stream, one each": {Prompt: load.NewPrompt(2<<10, true), Chunks: 50, PerWrite: 1},
		"stream, 20 each":  {Prompt: load.NewPrompt(2<<10, true), Chunks: 2000, PerWrite: 20},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, honest)
			proxied := b.client(t, 0, plan)
			direct := load.NewClient(b.board, 1, load.Target{
				Prefill: b.engines.Prefill[0], Decode: b.engines.Decode[0],
			}, plan, &load.Meter{})
			defer direct.Close()
			for range 3 {
				require.NoError(t, proxied.Ask(t.Context()))
				require.NoError(t, direct.Ask(t.Context()))
			}
			b.board.Settle()
			faults, n := b.board.Faults()
			assert.Zero(t, n, faults)
			prefills, decodes := b.board.Served()
			assert.EqualValues(t, 6, prefills)
			assert.EqualValues(t, 6, decodes)
		})
	}
}

// tampering changes what passes between the proxy and its engines.
type tampering struct {
	next     http.RoundTripper
	ask      func(path string, decode bool, body []byte) []byte
	response func(decode bool, body []byte) []byte
}

func (m tampering) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	if err := r.Body.Close(); err != nil {
		return nil, err
	}
	decode := bytes.Contains(body, []byte(`"do_remote_prefill":true`))
	if m.ask != nil {
		body = m.ask(r.URL.Path, decode, body)
	}
	r = r.Clone(r.Context())
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	res, err := m.next.RoundTrip(r)
	if err != nil || m.response == nil {
		return res, err
	}
	defer res.Body.Close()
	response, err := io.ReadAll(res.Body)
	if err != nil {
		return nil, err
	}
	response = m.response(decode, response)
	res.Body = io.NopCloser(bytes.NewReader(response))
	if res.ContentLength >= 0 {
		res.ContentLength = int64(len(response))
	}
	return res, nil
}

// replace changes one leg's request.
func replace(inDecode bool, old, with string) func(string, bool, []byte) []byte {
	return func(_ string, decode bool, body []byte) []byte {
		if decode != inDecode {
			return body
		}
		return bytes.Replace(body, []byte(old), []byte(with), 1)
	}
}

func TestTheCheckersCatchWhatAProxyDoesWrong(t *testing.T) {
	whole := &load.Plan{Prompt: load.NewPrompt(2<<10, false)}
	stream := &load.Plan{Prompt: load.NewPrompt(2<<10, true), Chunks: 10, PerWrite: 2}
	inResponse := func(old, with string) func(bool, []byte) []byte {
		return func(decode bool, body []byte) []byte {
			if !decode {
				return body
			}
			return bytes.Replace(body, []byte(old), []byte(with), 1)
		}
	}
	// The prompt's first letters behind its serial number, and its last ones before the closing one.
	const early, late = ` The decode engine reads`, `as it was sent.`
	for name, c := range map[string]struct {
		plan   *load.Plan
		tamper tampering
		client string // what Ask says
		board  string // what the engines have noted; empty: nothing
	}{
		"prefill makes more than one token": {
			whole, tampering{ask: replace(false, `"max_tokens":1,`, `"max_tokens":64,`)},
			"status 400", "max_tokens is 64"},
		"prefill is streamed": {
			whole, tampering{ask: replace(false, `"stream":false`, `"stream":true`)},
			"status 400", "stream is true"},
		"prefill keeps stream_options": {
			stream, tampering{
				ask: replace(false, `"stream":false`, `"stream":false,"stream_options":{"include_usage":true}`),
			},
			"status 400", "member stream_options"},
		"prefill is not asked for a handoff": {
			whole, tampering{ask: replace(false, `"do_remote_decode":true`, `"do_remote_decode":false`)},
			"status 400", "does not ask for a remote decode"},
		"prefill gets another prompt": {
			whole, tampering{ask: replace(false, early, strings.ToUpper(early))},
			"status 400", "the prompt is not"},
		"decode gets another prompt": {
			whole, tampering{ask: replace(true, late, strings.ToUpper(late))},
			"status 400", "the prompt is not"},
		"an escape is written in another way": {
			whole, tampering{ask: replace(true, `caf\u00e9`, `café`)},
			"status 400", "the prompt is not"},
		"a member of the client is dropped": {
			whole, tampering{ask: replace(true, `"temperature":0.5,`, ``)},
			"status 400", "a member of the client is missing"},
		"a number of the client is rewritten": {
			whole, tampering{ask: replace(true, `"temperature":0.5,`, `"temperature":0.50,`)},
			"status 400", "member temperature"},
		"a member comes twice": {
			whole, tampering{ask: replace(true, `"temperature":0.5,`, `"temperature":0.5,"temperature":0.5,`)},
			"status 400", "temperature comes twice"},
		"decode makes fewer tokens": {
			whole, tampering{ask: replace(true, `"max_tokens":64`, `"max_tokens":1`)},
			"status 400", "max_tokens is 1"},
		"decode gets no handoff": {
			whole, tampering{ask: replace(true, `"kv_transfer_params"`, `"x"`)},
			"status 400", "member x"},
		"the handoff loses a key": {
			whole, tampering{ask: replace(true, `"tp_size":1,`, ``)},
			"status 400", "not byte for byte"},
		"the handoff is written in another way": {
			whole, tampering{ask: replace(true, `"kept": [1.50`, `"kept":[1.5`)},
			"status 400", "not byte for byte"},
		"the handoff's block ids are flattened": {
			whole, tampering{ask: replace(true, `],[`, `,`)},
			"status 400", "not byte for byte"},
		"the handoff's big integer goes through a float": {
			whole, tampering{ask: func(_ string, decode bool, body []byte) []byte {
				if at := bytes.Index(body, []byte(`"x_number":`)); decode && at > 0 {
					body[at+len(`"x_number":`)+15]++
				}
				return body
			}},
			"status 400", "never given"},
		"a response is another request's": {
			whole, tampering{response: func(decode bool, body []byte) []byte {
				if at := bytes.Index(body, []byte(`"id":"chatcmpl-`)); decode && at > 0 {
					body[at+len(`"id":"chatcmpl-`)+14]++
				}
				return body
			}},
			"another request's", ""},
		"a response's text is changed": {
			whole, tampering{response: inResponse(`"completion_tokens":16`, `"completion_tokens":17`)},
			"not what the engine said", ""},
		"a stream loses [DONE]": {
			stream, tampering{response: inResponse("data: [DONE]\n\n", "")},
			"without [DONE]", ""},
		"a stream loses a chunk": {
			stream, tampering{response: func(decode bool, body []byte) []byte {
				if !decode {
					return body
				}
				_, rest, _ := bytes.Cut(body, []byte("\n\n"))
				return rest
			}},
			"chunk 0 is not", ""},
		"a stream gets a chunk twice": {
			stream, tampering{response: func(decode bool, body []byte) []byte {
				if !decode {
					return body
				}
				first, _, _ := bytes.Cut(body, []byte("\n\n"))
				return append(append(bytes.Clone(first), "\n\n"...), body...)
			}},
			"chunk 1 is not", ""},
		"a stream is cut and made to look whole": {
			stream, tampering{response: func(decode bool, body []byte) []byte {
				if !decode {
					return body
				}
				return body[:bytes.Index(body, []byte("00000005"))]
			}},
			"ended after 5 chunks", ""},
		"a stream has something after [DONE]": {
			stream, tampering{response: inResponse("data: [DONE]\n\n", "data: [DONE]\n\ndata: [DONE]\n\n")},
			"after [DONE]", ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, func(next http.RoundTripper) http.RoundTripper {
				c.tamper.next = next
				return c.tamper
			})
			require.ErrorContains(t, b.client(t, 0, c.plan).Ask(t.Context()), c.client)
			faults, n := b.board.Faults()
			if c.board == "" {
				assert.Zero(t, n, faults)
				return
			}
			require.Equal(t, 1, n, faults)
			assert.Contains(t, faults[0], c.board)
		})
	}
}

func TestAHandoffUsedTwiceIsCaught(t *testing.T) {
	var first atomic.Pointer[[]byte]
	b := newBench(t, func(next http.RoundTripper) http.RoundTripper {
		return tampering{next: next, ask: func(_ string, decode bool, body []byte) []byte {
			at := bytes.Index(body, []byte(`"kv_transfer_params":`))
			if !decode || at < 0 {
				return body
			}
			handoff := bytes.Clone(body[at:])
			if !first.CompareAndSwap(nil, &handoff) {
				body = append(body[:at:at], *first.Load()...)
			}
			return body
		}}
	})
	c := b.client(t, 0, &load.Plan{Prompt: load.NewPrompt(2<<10, false)})
	require.NoError(t, c.Ask(t.Context()))
	require.ErrorContains(t, c.Ask(t.Context()), "status 400")
	b.board.Settle()
	faults, n := b.board.Faults()
	require.Equal(t, 2, n, faults)
	assert.Contains(t, faults[0], "has been used before")
	assert.Contains(t, faults[1], "1 handoffs were given and never reached a decode engine")
}

func TestResponsesSwappedBetweenTwoClientsAreCaught(t *testing.T) {
	var waiting atomic.Int32
	bodies := [2]chan []byte{make(chan []byte, 1), make(chan []byte, 1)}
	b := newBench(t, func(next http.RoundTripper) http.RoundTripper {
		return tampering{next: next, response: func(decode bool, body []byte) []byte {
			if !decode {
				return body
			}
			i := waiting.Add(1) - 1
			bodies[i] <- body
			return <-bodies[1-i]
		}}
	})
	plan := &load.Plan{Prompt: load.NewPrompt(2<<10, false)}
	one, two := b.client(t, 0, plan), b.client(t, 1, plan)
	result := make(chan error, 1)
	go func() { result <- two.Ask(t.Context()) }()
	require.ErrorContains(t, one.Ask(t.Context()), "another request's")
	require.ErrorContains(t, <-result, "another request's")
}
