// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdkit/pdkit/connector"
)

// An Envoy that streams bodies, and is too old to say so, must not add a client's further bytes to decode's leg: behind
// its Content-Length the engine would read them as a request of their own.
func TestNoBytesFollowTheBody(t *testing.T) {
	for name, before := range map[string]bool{"before the decode leg": true, "after it": false} {
		t.Run(name, func(t *testing.T) {
			release := make(chan struct{})
			if !before {
				close(release)
			}
			w := fakeWorld(t, &fake{}, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // a server sees that its client has left only after that
				select {
				case <-release:
				case <-r.Context().Done():
				}
				answers(`{"id":"x"}`)(w, r)
			}, nil)
			p := w.play()
			head := requestHead(clientHead())
			head.ProtocolConfig = nil
			p.send(head)
			require.NotNil(t, p.recv().GetRequestHeaders())
			first := requestBody(`{"prompt":"hi"}`)
			first.GetRequestBody().EndOfStream = false
			p.send(first)
			if !before {
				require.NotNil(t, p.recv().GetRequestBody())
			}
			p.send(requestBody("POST /sleep HTTP/1.1\r\n\r\n"))
			_, err := p.stream.Recv()
			assert.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
			assert.ErrorContains(t, err, "request_body_mode")
		})
	}
}

// Messages in any order, twice, without what they should have: nothing panics, and nothing is left.
func TestMessagesInAnyOrder(t *testing.T) {
	w := fakeWorld(t, &fake{order: connector.Together}, answers(`{"id":"x"}`), answers(`{"choices":[{"text":"a"}]}`))
	odd := headers(":path", "http://[::1", ":method", "", "", "x", "Content-Type", "application/json", "x", "\x00\xff")
	odd.Headers.Headers = append(odd.Headers.Headers, &core.HeaderValue{Key: ":status", Value: "-1"})
	trailers := &extprocv3.HttpTrailers{Trailers: odd.Headers}
	of := []*extprocv3.ProcessingRequest{
		{}, requestHead(clientHead()), requestHead(clientHead()), requestHead(odd), requestHead(nil),
		requestBody(`{"prompt":"hi"}`), requestBody(`{"prompt":"hi"}`), requestBody(""), requestBody(`{"prompt":`),
		requestBody(strings.Repeat(" ", 7<<20)), responseHead("200"), responseHead("99999999999999999999"),
		responseHead("x"), {Request: &extprocv3.ProcessingRequest_ResponseHeaders{}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{}},
		{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: trailers}},
		{Request: &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: trailers}},
		{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{EndOfStream: true}}},
	}
	random := rand.New(rand.NewPCG(1, 2))
	var wg sync.WaitGroup
	for range 60 {
		p := w.play()
		messages := []*extprocv3.ProcessingRequest{of[1]}
		for range random.IntN(8) {
			messages = append(messages, of[random.IntN(len(of))])
		}
		if random.IntN(2) == 0 {
			messages = messages[1:]
		}
		leaves := random.IntN(3) == 0
		wg.Go(func() {
			defer p.cancel()
			for _, m := range messages {
				if p.stream.Send(m) != nil {
					break
				}
			}
			if leaves {
				return
			}
			_ = p.stream.CloseSend()
			for {
				if _, err := p.stream.Recv(); err != nil {
					assert.NotEqual(t, codes.DeadlineExceeded, status.Code(err), "%v", messages)
					return
				}
			}
		})
	}
	wg.Wait()
	require.Eventually(t, func() bool { return len(w.flow.Sessions()) == 0 }, 20*time.Second, time.Millisecond)
}
