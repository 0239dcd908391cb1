// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/ascendlayerwise"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// pair is a flow in front of two engines that the test plays.
type pair struct {
	t    *testing.T
	flow *pdflow.Flow
	pick pdflow.Pick
}

func newPair(t *testing.T, prefill, decode http.HandlerFunc, opts ...pdflow.Option) *pair {
	t.Helper()
	engine := func(h http.HandlerFunc, role discovery.Role) discovery.Endpoint {
		s := httptest.NewServer(h)
		t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
		return play.Engine(t, s.URL, role, nil)
	}
	x := &pair{
		t: t, pick: pdflow.Pick{Prefill: engine(prefill, discovery.RolePrefill),
			Decode: engine(decode, discovery.RoleDecode)},
	}
	c := play.Open(t, ascendlayerwise.Name, `{"callbackListen":"127.0.0.1:0"}`)
	tr := transport.New(nil)
	var err error
	x.flow, err = pdflow.New(c, pick.Func(nobody), append([]pdflow.Option{pdflow.WithTransport(tr)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 20*time.Second)
		defer stop()
		require.NoError(t, x.flow.Shutdown(ctx))
		tr.Close()
	})
	return x
}

// nobody is a picker that is never called: each request names its pair.
func nobody(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	return pdflow.Pick{}, errors.New("not asked")
}

func (x *pair) do(ctx context.Context, body string) (*pdflow.Response, error) {
	return x.flow.Do(ctx, &pdflow.Request{API: connector.APIChat, Body: []byte(body), Pick: &x.pick})
}

// decodeEngine calls back and waits for the response, then waits for push, and streams the events.
func decodeEngine(t *testing.T, callbacks chan<- reply, pushed <-chan struct{}, left chan<- struct{},
	events ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		params := gjson.GetBytes(body, "kv_transfer_params")
		if !assert.True(t, params.Get("do_remote_prefill").Bool(), "%s", body) {
			return
		}
		go func() {
			callbacks <- <-call(context.Background(), t, params.Get("metaserver").String(),
				callback("chatcmpl-"+r.Header.Get("X-Request-Id")))
		}()
		select {
		case <-pushed:
		case <-r.Context().Done():
			left <- struct{}{}
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, e := range events {
			_, _ = io.WriteString(w, "data: "+e+"\n\n")
			w.(http.Flusher).Flush()
		}
	}
}

const (
	text = `{"choices":[{"delta":{"content":"word"},"finish_reason":null}]}`
	stop = `{"choices":[{"delta":{},"finish_reason":"stop"}]}`
)

func TestDAsksPIsAskedDAnswers(t *testing.T) {
	callbacks, pushed := make(chan reply, 1), make(chan struct{})
	x := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		assert.Equal(t, callback("chatcmpl-"+r.Header.Get("X-Request-Id")),
			gjson.GetBytes(body, "kv_transfer_params").Raw, "the callback as D sent it")
		assert.EqualValues(t, 1, gjson.GetBytes(body, "max_tokens").Int())
		assert.EqualValues(t, 1, gjson.GetBytes(body, "min_tokens").Int())
		assert.False(t, gjson.GetBytes(body, "stream").Bool())
		_, _ = io.WriteString(w, `{"id":"x","kv_transfer_params":null}`)
	}, decodeEngine(t, callbacks, pushed, nil, text, stop, "[DONE]"))
	go func() {
		defer close(pushed)
		assert.Equal(t, reply{200, ok}, soon(t, callbacks),
			"before D has answered: its client holds a thread as long as that")
	}()
	resp, err := x.do(t.Context(), `{"messages":[{"role":"user","content":"hi"}],"stream":true}`)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, pdflow.ModeDisaggregated, resp.Mode)
	assert.Contains(t, string(b), "word")
}

// D ignores the callback's status, so the flow must cancel D's request when P fails.
func TestDIsCancelledWhenPFails(t *testing.T) {
	callbacks, left := make(chan reply, 1), make(chan struct{}, 1)
	x := newPair(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, `{"error":{"message":"out of memory"}}`, http.StatusInternalServerError)
	}, decodeEngine(t, callbacks, nil, left))
	_, err := x.do(t.Context(), `{"messages":[{"role":"user","content":"hi"}]}`)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodePrefillFailed, e.Code)
	assert.Equal(t, http.StatusBadGateway, soon(t, callbacks).status)
	<-left
}

func TestADThatNeverCallsBackRunsOutOfTime(t *testing.T) {
	left := make(chan struct{}, 1)
	limits := config.Timeouts{}
	limits.Decode = time.Second // D must have got the request by then
	x := newPair(t, func(http.ResponseWriter, *http.Request) { t.Error("P was asked without D's blocks") },
		func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
			left <- struct{}{}
		}, pdflow.WithTimeouts(limits))
	_, err := x.do(t.Context(), `{"messages":[{"role":"user","content":"hi"}]}`)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodeTimeout, e.Code)
	<-left
}

// When a client leaves, D's leg ends, and the callback is answered. P's leg runs on, since D keeps its blocks until P
// has written them.
func TestAClientThatLeavesEndsDsLegAlone(t *testing.T) {
	callbacks, left, asked := make(chan reply, 1), make(chan struct{}, 1), make(chan struct{})
	written, finish := make(chan error, 1), make(chan struct{})
	x := newPair(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(asked)
		<-finish
		written <- r.Context().Err()
	}, decodeEngine(t, callbacks, nil, left))
	ctx, leave := context.WithCancel(t.Context())
	go func() { <-asked; leave() }()
	_, err := x.do(ctx, `{"messages":[{"role":"user","content":"hi"}]}`)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodeClientGone, e.Code)
	<-left
	close(finish)
	require.NoError(t, <-written, "P was cancelled")
	assert.Equal(t, http.StatusBadGateway, soon(t, callbacks).status)
}

// For any body that is posted, nothing panics. P gets the callback byte for byte, and only one with all that P's engine
// needs.
func FuzzCallback(f *testing.F) {
	c := play.Open(f, ascendlayerwise.Name, ``)
	s := play.Session(f, connector.APIChat, `{"messages":[{"role":"user","content":"hi"}]}`)
	good := callback("chatcmpl-" + s.ID)
	for _, seed := range []string{good, strings.ReplaceAll(good, ",", " ,\n"), strings.Replace(good, "[128]", "128", 1),
		strings.Replace(good, `[[11,12]]`, `[]`, 1), `{}`, `[]`, ``, good + `{}`,
		strings.Replace(good, `"token_ids"`, `"request_id":"x","token_ids"`, 1)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		s.Event = connector.Event{Body: body}
		leg := contract.NewPrefillLeg(s.Request, new(c.Traits()))
		if err := c.Prefill(t.Context(), s, leg); err != nil {
			require.ErrorIs(t, err, connector.ErrNoTransfer)
			return
		}
		out, err := contract.Body(leg)
		require.NoError(t, err)
		require.True(t, json.Valid(out), "%s", out)
		raw, _ := leg.Current(connector.ParamsMember)
		require.Equal(t, string(body), string(raw))
		var h struct {
			Decode bool      `json:"do_remote_decode"`
			Host   string    `json:"remote_host"`
			Port   uint16    `json:"remote_port"`
			Engine string    `json:"remote_engine_id"`
			Blocks [][]int64 `json:"remote_block_ids"`
		}
		require.NoError(t, json.Unmarshal(body, &h))
		require.True(t, h.Decode && h.Host != "" && h.Port != 0 && h.Engine != "" && h.Blocks != nil, "%s", body)
	})
}
