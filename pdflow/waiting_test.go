// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// waiting counts how often a response's reader asks for a wait without a buffer.
type waiting struct {
	io.ReadCloser
	waits *atomic.Int64
}

func (w *waiting) WaitReadable() {
	w.waits.Add(1)
	if inner, ok := w.ReadCloser.(interface{ WaitReadable() }); ok {
		inner.WaitReadable()
	}
}

// A stream waits for each of its tokens without a buffer, if its transport can do so. A response that is no stream, and
// one that comes faster than it is passed on, are read at once.
func TestAStreamThatWaitsForATokenHoldsNoBuffer(t *testing.T) {
	own := transport.New(nil)
	defer func() { _ = own.Close() }()
	var waits atomic.Int64
	rt := roundTripper(func(r *http.Request) (*http.Response, error) {
		resp, err := own.RoundTrip(r)
		if err == nil {
			resp.Body = &waiting{resp.Body, &waits}
		}
		return resp, err
	})
	const tokens, event = 30, `data: {"choices":[{"index":0,"text":"t"}]}` + "\n\n"
	turn := make(chan struct{}, tokens)
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, body string) {
		if !strings.Contains(body, `"stream":true`) {
			_, _ = io.WriteString(w, ok)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range tokens {
			<-turn
			_, _ = io.WriteString(w, event)
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}, pdflow.WithTransport(rt))

	require.Equal(t, "hi", post(t, x.url, "/v1/completions", completion("a", "")).text(t))
	assert.Zero(t, waits.Load())

	turn <- struct{}{} // the head comes with it
	resp, err := client.Post(x.url+"/v1/completions", "application/json",
		strings.NewReader(completion("a", `"stream":true`)))
	require.NoError(t, err)
	defer resp.Body.Close()
	for i := range tokens {
		got := make([]byte, len(event))
		_, err := io.ReadFull(resp.Body, got)
		require.NoError(t, err, "token %d", i)
		require.Equal(t, event, string(got))
		turn <- struct{}{}
	}
	rest, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	assert.Equal(t, "data: [DONE]\n\n", string(rest))
	assert.GreaterOrEqual(t, waits.Load(), int64(tokens-1), "the first token comes with the head")
}

// An error that comes with a token, in one piece, goes to the client at once, though the engine then says nothing more.
func TestAnErrorBehindATokenIsNotWaitedFor(t *testing.T) {
	silent := make(chan struct{})
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		token := `data: {"choices":[{"index":0,"text":"t"}]}` + "\n\n"
		_, _ = io.WriteString(w, token)
		_ = http.NewResponseController(w).Flush()
		time.Sleep(50 * time.Millisecond) // the head goes to the client
		_, _ = io.WriteString(w, token+`data: {"error":{"message":"boom","code":500}}`+"\n\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-silent:
		case <-r.Context().Done():
		}
	})
	defer close(silent)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.url+"/v1/completions",
		strings.NewReader(completion("a", `"stream":true`)))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	var got strings.Builder
	for p := make([]byte, 1000); err == nil && !strings.Contains(got.String(), "boom"); {
		var n int
		n, err = resp.Body.Read(p)
		got.Write(p[:n])
	}
	require.NoError(t, err, got.String())
}

// A stream that only its connection's end frames, and that ends within its first event, is not whole.
func TestAnUnframedStreamThatEndsInItsFirstEventIsNoStream(t *testing.T) {
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		c, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		_, _ = buf.WriteString("HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" +
			`data: {"choices":[{"index":0,"te`)
		_ = buf.Flush()
		_ = c.Close()
	})
	r := post(t, x.url, "/v1/completions", completion("a", `"stream":true`))
	require.NoError(t, r.err)
	require.Equal(t, 502, r.status, r.body)
	_, code := r.fault(t)
	require.Equal(t, pdflow.CodeDecodeFailed.Error(), code)
}
