// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

const responses = "/v1/responses"

func keeping(t *testing.T, cfg enginesim.Config) (*enginesim.Engine, *simtest.Client) {
	t.Helper()
	cfg.KeepResponses = true
	e, err := enginesim.Start(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return e, simtest.NewClient(t)
}

// A follow-up is rendered behind the messages and the output of the response that it names.
func TestAnEngineKeepsResponses(t *testing.T) {
	e, c := keeping(t, enginesim.Config{})
	first := c.Post(t.Context(), e, responses, `{"input":"hello","max_output_tokens":4}`)
	require.Equal(t, 200, first.Status, first.Body)
	id := first.Get("id").String()
	second := c.Post(t.Context(), e, responses,
		`{"input":"more","max_output_tokens":4,"previous_response_id":"`+id+`"}`)
	require.Equal(t, 200, second.Status, second.Body)
	assert.Equal(t, id, second.Get("previous_response_id").String())
	alone := c.Post(t.Context(), e, responses, simtest.Obj{"max_output_tokens": 4, "input": []simtest.Obj{
		{"role": "user", "content": "hello"}, {"role": "assistant", "content": first.Text()},
		{"role": "user", "content": "more"}}})
	assert.Equal(t, alone.Text(), second.Text())
	assert.Equal(t, alone.Get("usage.input_tokens").Int(), second.Get("usage.input_tokens").Int())

	assert.Equal(t, first.Body, c.Get(e, responses+"/"+id).Body)
	streamed := c.Post(t.Context(), e, responses, `{"input":"hello","max_output_tokens":4,"stream":true}`)
	assert.Equal(t, first.Text(), c.Get(e, responses+"/"+created(streamed)).Text())
	cancelled := c.Post(t.Context(), e, responses+"/"+id+"/cancel", "")
	assert.Equal(t, 400, cancelled.Status)
	assert.Equal(t, "Cannot cancel a synchronous response.", cancelled.Get("error.message").String())
	assert.Equal(t, 405, c.Post(t.Context(), e, responses+"/"+id, "").Status)
	assert.Equal(t, 400, c.Get(e, responses+"/"+id+"?stream=true").Status, "it has no stream to be read again")
	assert.Equal(t, 404, c.Get(e, responses+"/"+id+"/input_items").Status, "vLLM has no such path")

	require.NoError(t, e.Restart())
	assert.Equal(t, 404, c.Get(e, responses+"/"+id).Status, "lost")
}

func created(r simtest.Response) string {
	return simtest.Response{Body: r.Events()[0]}.Get("response.id").String()
}

func TestResponsesThatAnEngineDoesNotKnow(t *testing.T) {
	e, c := keeping(t, enginesim.Config{})
	forgetful, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer forgetful.Close()
	unkept := c.Post(t.Context(), e, responses, `{"input":"hello","max_output_tokens":4,"store":false}`)
	for _, r := range []simtest.Response{
		c.Get(e, responses+"/resp_x"),
		c.Get(e, responses+"/"+unkept.Get("id").String()),
		c.Post(t.Context(), e, responses+"/resp_x/cancel", ""),
		c.Post(t.Context(), e, responses, `{"input":"more","previous_response_id":"resp_x"}`),
		c.Post(t.Context(), forgetful, responses, `{"input":"more","previous_response_id":"resp_x"}`),
		c.Get(forgetful, responses+"/resp_x"),
	} {
		assert.Equal(t, 404, r.Status)
		assert.Regexp(t, `^\{"error":\{"message":"Response with id 'resp_\w+' not found\.",`+
			`"type":"invalid_request_error","param":"response_id","code":404\}\}$`, r.Body)
	}
	assert.Equal(t, 400, c.Post(t.Context(), forgetful, responses, `{"input":"x","background":true}`).Status)
	assert.Equal(t, 400, c.Post(t.Context(), e, responses, `{"input":"x","background":true,"store":false}`).Status)
}

func TestResponsesInTheBackground(t *testing.T) {
	e, c := keeping(t, enginesim.Config{ITL: time.Millisecond})
	body := `{"input":"hello","max_output_tokens":8,"background":true`
	queued := c.Post(t.Context(), e, responses, body+`}`)
	require.Equal(t, 200, queued.Status, queued.Body)
	assert.Equal(t, "queued", queued.Get("status").String())
	at := responses + "/" + queued.Get("id").String()
	require.NoError(t, e.WaitIdle(t.Context()))
	whole := c.Get(e, at)
	assert.Equal(t, "incomplete", whole.Get("status").String(), "it ends by its length")
	assert.Len(t, whole.Text(), 8)

	streamed := c.Post(t.Context(), e, responses, body+`,"stream":true}`)
	at = responses + "/" + created(streamed)
	assert.Equal(t, streamed.Body, c.Get(e, at+"?stream=true").Body)
	assert.Equal(t, streamed.Events()[3:], c.Get(e, at+"?stream=true&starting_after=2").Events())

	long := c.Post(t.Context(), e, responses, `{"input":"hello","max_output_tokens":20000,"background":true}`)
	at = responses + "/" + long.Get("id").String()
	assert.Equal(t, "cancelled", c.Post(t.Context(), e, at+"/cancel", "").Get("status").String())
	require.NoError(t, e.WaitIdle(t.Context()))
	assert.Equal(t, "cancelled", c.Get(e, at).Get("status").String())
	assert.Equal(t, 400, c.Post(t.Context(), e, at+"/cancel", "").Status)
}
