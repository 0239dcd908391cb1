// SPDX-License-Identifier: Apache-2.0

package mooncakeascend_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/mooncakeascend"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// nobody is a picker that is never called: each request names its pair.
func nobody(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	return pdflow.Pick{}, errors.New("not asked")
}

// streams is an engine that streams the first event, waits for next, and streams the others.
func streams(next <-chan struct{}, first, rest string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		if first != "" {
			_, _ = io.WriteString(w, first)
			w.(http.Flusher).Flush()
			<-next
		}
		_, _ = io.WriteString(w, rest)
	}
}

func run(t *testing.T, decode http.HandlerFunc) (*pdflow.Response, error) {
	t.Helper()
	engine := func(h http.HandlerFunc, role discovery.Role) discovery.Endpoint {
		s := httptest.NewServer(h)
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		return play.Engine(t, s.URL, role, nil)
	}
	prefill := func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"kv_transfer_params":`+good+`}`)
	}
	pair := pdflow.Pick{Prefill: engine(prefill, discovery.RolePrefill), Decode: engine(decode, discovery.RoleDecode)}
	tr := transport.New(nil)
	flow, err := pdflow.New(play.Open(t, mooncakeascend.Name, ``), pick.Func(nobody), pdflow.WithTransport(tr))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, flow.Shutdown(ctx))
		tr.Close()
	})
	return flow.Do(
		t.Context(), &pdflow.Request{API: connector.APIChat, Body: []byte(`{"messages":[],"stream":true}`),
			Pick: &pair},
	)
}

// With recompute_scheduler_enable D may give a request up in favour of another one. It says so only by a stop reason,
// in a response that looks complete. If the client has not got anything yet, another attempt serves the request;
// otherwise the flow cuts the stream.
func TestARecomputedResponseIsAFailedOne(t *testing.T) {
	const text = "data: {\"choices\":[{\"delta\":{\"content\":\"word\"},\"finish_reason\":null}]}\n\n"
	const recomputed = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"," +
		"\"stop_reason\":\"recomputed\"}]}\n\ndata: [DONE]\n\n"
	_, err := run(t, streams(nil, "", recomputed))
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodeDecodeFailed, e.Code)

	next := make(chan struct{})
	resp, err := run(t, streams(next, text, recomputed))
	require.NoError(t, err)
	first := make([]byte, 1)
	_, err = resp.Body.Read(first)
	require.NoError(t, err)
	close(next)
	b, err := io.ReadAll(resp.Body)
	require.Error(t, err, "the client must not take it for whole")
	require.NoError(t, resp.Body.Close())
	assert.Contains(t, string(first)+string(b), "word")
	assert.NotContains(t, string(b), "[DONE]")
}
