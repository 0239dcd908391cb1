// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
)

// TensorRT-LLM's events wait until somebody takes them, and are gone then. Those above the bound are lost.
func TestTensorRTLLMKeepsItsEventsUntilTheyAreTaken(t *testing.T) {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // an engine starts again
	post := func(e *enginesim.Engine, path, body string) gjson.Result {
		resp, err := client.Post(e.URL()+path, "application/json", strings.NewReader(body))
		require.NoError(t, err)
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, resp.StatusCode, string(b))
		return gjson.ParseBytes(b)
	}
	start := func(most string) *enginesim.Engine {
		e, err := enginesim.Start(enginesim.Config{Connector: "trtllm", BlockSize: 16,
			Extra: map[string]string{"event_buffer_max_size": most}})
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, e.Close()) })
		return e
	}
	const path = "/kv_cache_events"
	const prompt = `{"model":"tiny","prompt":"a prompt of more than three blocks of sixteen","max_tokens":1}`
	e := start("100")
	assert.Equal(t, `[{"event_id":0,"data":{"type":"created","num_blocks_per_cache_level":[4096,0]},`+
		`"window_size":32768}]`, strings.ReplaceAll(post(e, path, "").Raw, " ", ""))
	post(e, "/v1/completions", prompt)
	list := post(e, path, "")
	assert.Equal(t, `[1]`, list.Get("#.event_id").Raw)
	assert.Equal(t, "stored", list.Get("0.data.type").Str)
	assert.Equal(t, gjson.Null, list.Get("0.data.parent_hash").Type)
	assert.EqualValues(t, 2, list.Get("0.data.blocks.#").Int(), "blocks that follow each other are one event")
	assert.EqualValues(t, 16, list.Get("0.data.blocks.0.tokens.#").Int())
	assert.Equal(t, "[]", post(e, path, "").Raw)
	require.NoError(t, e.Restart())
	assert.Equal(t, `[0]`, post(e, path, "").Get("#.event_id").Raw)

	e = start("1")
	post(e, "/v1/completions", prompt)
	assert.Equal(t, `[1]`, post(e, path, "").Get("#.event_id").Raw)
	assert.Equal(t, "[]", post(start("0"), path, "").Raw)
}
