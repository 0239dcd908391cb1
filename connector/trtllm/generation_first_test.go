// SPDX-License-Identifier: Apache-2.0

package trtllm_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
)

func requireJSON(t *testing.T, b []byte) {
	t.Helper()
	require.True(t, json.Valid(b), "%s", b)
}

// server is a server that responds to GET /server_info.
type server struct {
	asked  atomic.Int64
	status int
	body   string
	err    error
	wait   time.Duration
}

func (v *server) call(r *http.Request) (*http.Response, error) {
	v.asked.Add(1)
	select {
	case <-time.After(v.wait):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if v.err != nil {
		return nil, v.err
	}
	if r.Method != http.MethodGet || r.URL.String() != "http://10.0.0.5:8100/server_info" {
		return nil, errors.New("asked " + r.URL.String())
	}
	return &http.Response{StatusCode: v.status, Body: io.NopCloser(strings.NewReader(v.body))}, nil
}

const info = `{"disaggregated_params":{"ctx_info_endpoint":["tcp://10.0.0.1:5000","tcp://10.0.0.2:5000"],` +
	`"encoded_opaque_state":"b64","big":18446744073709551615}}`

func prepare(ctx context.Context, t *testing.T, c connector.KVConnector, v *server) (*connector.Session, error) {
	t.Helper()
	p, ok := connector.As[connector.Preparer](c)
	require.True(t, ok)
	s := session(t, connector.APICompletions, `{"prompt":"x","stream":true}`)
	got, err := p.Prepare(ctx, s, v.call)
	s.Prepared = got
	return s, err
}

func TestGenerationFirstSendsTheServersParametersToDecode(t *testing.T) {
	c := open(t, `{"dispatch":"generation-first"}`)
	s, err := prepare(t.Context(), t, c, &server{status: 200, body: info})
	require.NoError(t, err)
	assert.Equal(t, `{"prompt":"x","stream":false,"disaggregated_params":{"request_type":"context_only",`+
		`"disagg_request_id":`+id+`,"schedule_style":1}}`, play.Prefill(t, c, s).Body)
	assert.Equal(t, `{"prompt":"x","stream":true,"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.1:5000",`+
		`"encoded_opaque_state":"b64","big":18446744073709551615,`+
		`"request_type":"generation_only","ctx_request_id":`+id+`,"disagg_request_id":`+id+`,"schedule_style":1}}`,
		play.Decode(t, c, s, nil).Body)

	s.Prepared = nil
	_, err = play.TryDecode(c, s, nil)
	require.ErrorIs(t, err, connector.ErrNoTransfer)
}

func TestContextFirstAsksNobody(t *testing.T) {
	_, prepares := connector.As[connector.Preparer](open(t, ``))
	assert.False(t, prepares, "so that its requests do not wait for it")
}

func TestAServerIsAskedOnceInThirtySeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := open(t, `{"dispatch":"generation-first"}`)
		v := &server{status: 200, body: info, wait: time.Second}
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				_, err := prepare(t.Context(), t, c, v)
				assert.NoError(t, err)
			})
		}
		all.Wait()
		assert.EqualValues(t, 1, v.asked.Load(), "all who ask at once share one question")
		time.Sleep(28 * time.Second)
		_, err := prepare(t.Context(), t, c, v)
		require.NoError(t, err)
		assert.EqualValues(t, 1, v.asked.Load())
		time.Sleep(2 * time.Second)
		_, err = prepare(t.Context(), t, c, v)
		require.NoError(t, err)
		assert.EqualValues(t, 2, v.asked.Load(), "after 30 s again")
	})
}

func TestAFailureForgetsWhatAServerSaid(t *testing.T) {
	c := open(t, `{"dispatch":"generation-first"}`)
	v := &server{status: 200, body: info}
	s, err := prepare(t.Context(), t, c, v)
	require.NoError(t, err)
	cleaner, ok := connector.As[connector.Cleaner](c)
	require.True(t, ok)
	for i, cause := range []fault{false, true} {
		require.NoError(t, cleaner.Clean(t.Context(), s, cause, nil))
		_, err = prepare(t.Context(), t, c, v)
		require.NoError(t, err)
		assert.EqualValues(t, i+1, v.asked.Load(), "a client's own fault says nothing about P")
	}
}

// fault is a failed attempt's error. It is true if the engines caused it, false if the client did.
type fault bool

func (fault) Error() string       { return "failed" }
func (f fault) EngineFault() bool { return bool(f) }

func TestFaultsOfAServerAreNotKept(t *testing.T) {
	c := open(t, `{"dispatch":"generation-first"}`)
	for rule, v := range map[string]*server{
		"refused":          {status: 404, body: `{}`},
		"no JSON":          {status: 200, body: `oops`},
		"a list":           {status: 200, body: `[]`},
		"no parameters":    {status: 200, body: `{"a":1}`},
		"null":             {status: 200, body: `{"disaggregated_params":null}`},
		"parameters text":  {status: 200, body: `{"disaggregated_params":"x"}`},
		"parameters twice": {status: 200, body: `{"disaggregated_params":{"a":1,"a":2}}`},
		"state no text":    {status: 200, body: `{"disaggregated_params":{"encoded_opaque_state":[1]}}`},
		"endpoint no text": {status: 200, body: `{"disaggregated_params":{"ctx_info_endpoint":5}}`},
		"endpoints":        {status: 200, body: `{"disaggregated_params":{"ctx_info_endpoint":[{}]}}`},
		"not UTF-8":        {status: 200, body: "{\"disaggregated_params\":{\"a\":\"\xff\"}}"},
		"deep": {status: 200, body: `{"disaggregated_params":{"a":` + strings.Repeat("[", 100) +
			strings.Repeat("]", 100) + `}}`},
		"too large": {status: 200, body: `{"disaggregated_params":{"a":"` + strings.Repeat("x", 1<<20) + `"}}`},
	} {
		for range 2 {
			_, err := prepare(t.Context(), t, c, v)
			require.ErrorIs(t, err, connector.ErrNoTransfer, rule)
		}
		assert.EqualValues(t, 2, v.asked.Load(), rule)
	}
	broken := errors.New("broken")
	_, err := prepare(t.Context(), t, c, &server{err: broken})
	require.ErrorIs(t, err, broken)
	_, err = prepare(t.Context(), t, c, &server{status: 200, body: `{"disaggregated_params":{"ctx_info_endpoint":[]}}`})
	require.NoError(t, err)
}
