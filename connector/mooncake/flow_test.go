// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// rig is a flow in front of simulated engines. Among their settings is the flow's own dispatch.
type rig struct {
	t        *testing.T
	p, d     *enginesim.Engine
	alone    *enginesim.Engine
	flow     *pdflow.Flow
	prefill  discovery.Endpoint
	mu       sync.Mutex
	outcomes []pdflow.Outcome
}

func newRig(t *testing.T, extra map[string]string, change ...func(p, d *enginesim.Config)) *rig {
	t.Helper()
	x := &rig{t: t}
	var err error
	p, d := enginesim.Config{Connector: "mooncake", Extra: extra}, enginesim.Config{Connector: "mooncake", Extra: extra}
	for _, c := range change {
		c(&p, &d)
	}
	x.p, x.d, err = enginesim.Pair(p, d)
	require.NoError(t, err)
	x.alone, err = enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	x.prefill = endpoint(t, x.p.URL(), "bootstrapURL", x.p.Bootstrap())
	tr := transport.New(nil)
	x.flow, err = pdflow.New(newConnector(t, &mooncake.Options{Dispatch: extra["dispatch"]}), pick.Func(x.Pick),
		pdflow.WithTransport(tr), pdflow.WithRetry(config.Retry{MaxAttempts: 2}))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), 30*time.Second)
		defer stop()
		require.NoError(t, x.flow.Shutdown(ctx))
		tr.Close()
		http.DefaultClient.CloseIdleConnections()
		for _, e := range []*enginesim.Engine{x.p, x.d, x.alone} {
			require.NoError(t, e.Close())
		}
	})
	return x
}

// Pick returns the only pair, and records the result of the attempt.
func (x *rig) Pick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	d := endpoint(x.t, x.d.URL())
	d.Role = discovery.RoleDecode
	return pdflow.Pick{Prefill: x.prefill, Decode: d, Done: func(o *pdflow.Outcome) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.outcomes = append(x.outcomes, *o)
	}}, nil
}

func (x *rig) ended() []pdflow.Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.outcomes
}

func completion(n int) string {
	return fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":12,"temperature":0}`,
		strings.Repeat(fmt.Sprintf("%d prompts. ", n), 20))
}

func (x *rig) do(api connector.API, body string) (string, error) {
	resp, err := x.flow.Do(x.t.Context(), &pdflow.Request{API: api, Body: []byte(body)})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	return string(raw), err
}

// right checks that the text is that of one engine alone.
func (x *rig) right(n int) {
	response, err := x.do(connector.APICompletions, completion(n))
	if !assert.NoError(x.t, err) {
		return
	}
	r, err := http.Post(x.alone.URL()+"/v1/completions", "application/json", strings.NewReader(completion(n)))
	if !assert.NoError(x.t, err) {
		return
	}
	defer r.Body.Close()
	want, err := io.ReadAll(r.Body)
	assert.NoError(x.t, err)
	assert.Equal(x.t, gjson.GetBytes(want, "choices.0.text").String(), gjson.Get(response, "choices.0.text").String())
}

// A hundred requests at once cost one query, and all of them get P's KV.
func TestFlowSharesOneQuery(t *testing.T) {
	x := newRig(t, nil)
	var asked atomic.Int64
	between := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/query" {
			asked.Add(1)
		}
		resp, err := http.Get(x.p.Bootstrap() + r.URL.Path)
		if err != nil {
			return
		}
		defer resp.Body.Close()
		_, _ = io.Copy(w, resp.Body)
	}))
	defer between.Close()
	x.prefill.Attributes["bootstrapURL"] = between.URL
	var wg sync.WaitGroup
	for n := range 100 {
		wg.Go(func() { x.right(n) })
	}
	wg.Wait()
	assert.EqualValues(t, 2, asked.Load(), "one of the gateway's, one of D's own")
	assert.NoError(t, x.p.CheckKV())
	assert.NoError(t, x.d.CheckKV())
}

// P restarts within engineTTL. D, which never knew the old engine, answers 500 at once, and the next attempt asks for
// P's new id.
func TestFlowFindsTheEngineThatRestarted(t *testing.T) {
	port, err := freeport.Find(5) // nobody else gets one while its engine is down
	require.NoError(t, err)
	at := func(i int) string { return strconv.Itoa(port + i) }
	x := newRig(t, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": at(4)}, func(p, d *enginesim.Config) {
		p.Listen, p.SideChannel = "127.0.0.1:"+at(0), "127.0.0.1:"+at(1)
		d.Listen, d.SideChannel = "127.0.0.1:"+at(2), "127.0.0.1:"+at(3)
	})
	x.right(1)
	for _, e := range []*enginesim.Engine{x.p, x.d} {
		require.NoError(t, e.Restart())
	}
	x.right(2)
	require.Len(t, x.ended(), 3)
	assert.Equal(t, pdflow.CodeDecodeFailed, x.ended()[1].Err.Code)
	assert.Nil(t, x.ended()[2].Err)
}

// P answers 200 but stopped before the length, so it offers nothing. The flow cancels D at once and records that the
// pair keeps an orphan.
func TestFlowCancelsDecodeOfAPrefillThatOffersNothing(t *testing.T) {
	x := newRig(t, nil)
	var prefills atomic.Int64
	stops := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		// else D's leg may not be out yet, and then there is no orphan
		for n := prefills.Add(1); x.d.Stats().Requests < n; {
			time.Sleep(time.Millisecond)
		}
		_, _ = io.WriteString(w, `{"type":"message","content":[],"stop_reason":"end_turn"}`)
	}))
	defer stops.Close()
	x.prefill = endpoint(t, stops.URL, "bootstrapURL", x.p.Bootstrap())
	begun := time.Now()
	_, err := x.do(connector.APIMessages, `{"model":"tiny","messages":[{"role":"user","content":"hello"}],`+
		`"max_tokens":9}`)
	var e *pdflow.Error
	require.ErrorAs(t, err, &e)
	assert.Equal(t, pdflow.CodeTransferMissing, e.Code)
	assert.Less(t, time.Since(begun), 30*time.Second)
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	require.NoError(t, x.d.WaitIdle(ctx))
	require.Len(t, x.ended(), 2)
	for _, o := range x.ended() {
		assert.True(t, o.Orphan)
	}
	assert.Zero(t, x.d.Stats().GenerationTokens)
}

// The attempt's id matches the legs, not the client's: two requests with the same client id are not mixed up.
func TestFlowIDsAreTheAttemptsOwn(t *testing.T) {
	x := newRig(t, nil)
	var wg sync.WaitGroup
	for n := range 20 {
		wg.Go(func() {
			_, err := x.do(connector.APICompletions,
				strings.Replace(completion(n), "{", `{"request_id":"same","kv_transfer_params":{"transfer_id":"same"},`,
					1))
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	assert.NoError(t, x.p.CheckKV())
	assert.NoError(t, x.d.CheckKV())
}

// D counts the whole prompt as cached, which it has from P. The client's usage has P's count, in every API, whole and
// streamed: none at first, and then all blocks of a prompt that P has seen.
func TestTheUsageHasWhatPHadCached(t *testing.T) {
	x := newRig(t, nil)
	for i, api := range []connector.API{connector.APIChat, connector.APICompletions, connector.APIResponses,
		connector.APIMessages} {
		prompt := strings.Repeat(strconv.Itoa(i)+" is the number of this API. ", 10)
		body := map[connector.API]string{
			connector.APIChat:        `"messages":[{"role":"user","content":"` + prompt + `"}],"max_tokens":3`,
			connector.APICompletions: `"prompt":"` + prompt + `","max_tokens":3`,
			connector.APIResponses:   `"input":"` + prompt + `","max_output_tokens":3`,
			connector.APIMessages:    `"messages":[{"role":"user","content":"` + prompt + `"}],"max_tokens":3`,
		}[api]
		stream := `,"stream":true`
		if api == connector.APIChat || api == connector.APICompletions {
			stream += `,"stream_options":{"include_usage":true}`
		}
		for n, more := range []string{``, ``, stream} {
			got, err := x.do(api, `{"model":"tiny",`+body+more+`}`)
			require.NoError(t, err)
			counts := regexp.MustCompile(`"(cached_tokens|cache_read_input_tokens)": ?(\d+)`).
				FindAllStringSubmatch(got, -1)
			require.NotEmpty(t, counts, got)
			last, _ := strconv.Atoi(counts[len(counts)-1][2])
			assert.Equal(t, n > 0, last > 0, "%s %d: %s", api, n, got)
			assert.Zero(t, last%32, "whole blocks of P's: %d", last)
		}
	}
}
