// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// usageOf is the usage of the only outcome.
func usageOf(t *testing.T, o *outcomes) pdflow.Usage {
	t.Helper()
	require.Eventually(t, func() bool { return len(o.list()) == 1 }, 20*time.Second, time.Millisecond)
	return o.list()[0].Usage
}

// The flow reads the tokens of whole responses of every API: decode took over the prompt that prefill computed.
func TestUsageOfWholeResponses(t *testing.T) {
	for _, api := range []connector.API{connector.APIChat, connector.APICompletions, connector.APIResponses,
		connector.APIMessages} {
		t.Run(api.String(), func(t *testing.T) {
			x := start(t, setup{})
			r := post(t, x.url, api.Path(), bodyOf(api, ""))
			require.Equal(t, http.StatusOK, r.status, r.body)
			x.idle()
			u := usageOf(t, x.seen)
			assert.Positive(t, u.Input)
			assert.Positive(t, u.Output)
			assert.Zero(t, u.Cached)
		})
	}
}

func bodyOf(api connector.API, more string) string {
	if more != "" {
		more = "," + more
	}
	switch api {
	case connector.APIChat:
		return `{"model":"tiny","messages":[{"role":"user","content":"` + longPrompt + `"}],"max_tokens":4` + more + `}`
	case connector.APIResponses:
		return `{"model":"tiny","input":"` + longPrompt + `","max_output_tokens":4` + more + `}`
	case connector.APIMessages:
		return `{"model":"tiny","messages":[{"role":"user","content":"` + longPrompt + `"}],"max_tokens":4` + more + `}`
	}
	return completion(longPrompt, strings.TrimPrefix(more, ","))
}

// A stream has its token counts if the client or the flow asked for them. If only the flow asked, it removes them
// before the client gets the stream.
func TestUsageOfStreams(t *testing.T) {
	for name, c := range map[string]struct {
		opts  []pdflow.Option
		more  string
		known bool // the outcome has the counts
		shown bool // the client sees them
	}{
		"nobody asks":     {nil, `"stream":true`, false, false},
		"the client asks": {nil, `"stream":true,"stream_options":{"include_usage":true}`, true, true},
		"the flow asks":   {[]pdflow.Option{usage}, `"stream":true`, true, false},
		"the flow asks beside another option": {[]pdflow.Option{usage},
			`"stream":true,"stream_options":{"continuous_usage_stats":false}`, true, false},
		"both ask": {[]pdflow.Option{usage}, `"stream":true,"stream_options":{"include_usage":true}`, true,
			true},
	} {
		for _, api := range []connector.API{connector.APIChat, connector.APICompletions} {
			t.Run(name+", "+api.String(), func(t *testing.T) {
				x := start(t, setup{opts: c.opts})
				r := post(t, x.url, api.Path(), bodyOf(api, c.more))
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.NoError(t, r.err)
				x.idle()
				u := usageOf(t, x.seen)
				assert.Equal(t, c.known, u.Output > 0, "%+v", u)
				assert.Positive(t, u.Input, "prefill tells it in any case")
				assert.Equal(t, c.shown, strings.Contains(r.body, `"usage":{`), r.body)
				assert.True(t, strings.HasSuffix(r.body, "data: [DONE]\n\n"))
				assert.NotEmpty(t, r.text(t))
			})
		}
	}
}

// The reused tokens are those that decode did not compute. Without a prefill they are from the engine's own cache.
func TestUsageTellsWhatDecodeReused(t *testing.T) {
	x := script(
		t, &fake{more: tellsReused},
		answer(`{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":2}}}`),
		answer(`{"choices":[{"text":"hi"}],"usage":{"prompt_tokens":9,"completion_tokens":3,`+
			`"prompt_tokens_details":{"cached_tokens":8}}}`))
	require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", completion("hi", "")).status)
	require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 20*time.Second, time.Millisecond)
	assert.Equal(t, pdflow.Usage{Input: 9, Output: 3, Cached: 2, Reused: 8}, usageOf(t, x.seen))

	alone := x.pair
	alone.Prefill.URL = nil
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`), Pick: &alone})
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, pdflow.Usage{Input: 9, Output: 3, Cached: 8}, x.seen.list()[1].Usage)
}

func tellsReused(t *connector.Traits) { t.Serving.ReusedInUsage = true }

// Generated text that looks like the usage is not taken for it.
func TestAClientsTextIsNoUsage(t *testing.T) {
	x := script(t, &fake{}, answer(ok), answer(`{"choices":[{"text":"\"usage\":{\"completion_tokens\":7}"}]}`))
	require.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", completion("hi", "")).status)
	require.Eventually(t, func() bool { return len(x.seen.list()) == 1 }, 20*time.Second, time.Millisecond)
	assert.Zero(t, usageOf(t, x.seen))
}

// Prefill's counts may come before or after decode's. Decode's count of the prompt's tokens is used in both cases.
func TestUsageOfAPrefillThatEndsAfterDecode(t *testing.T) {
	decoded := make(chan struct{})
	late := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		<-decoded
		_, _ = io.WriteString(w, `{"choices":[],"usage":{"prompt_tokens":8}}`)
	}
	x := script(t, &fake{order: connector.Together}, late, answer(`{"choices":[{"text":"hi"}],`+
		`"usage":{"prompt_tokens":9,"completion_tokens":3}}`))
	resp, err := x.flow.Do(context.Background(),
		&pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":"hi"}`), Pick: &x.pair})
	require.NoError(t, err)
	_, err = io.ReadAll(resp.Body)
	require.NoError(t, err)
	close(decoded)
	require.NoError(t, resp.Body.Close()) // waits a moment for prefill
	assert.Equal(t, pdflow.Usage{Input: 9, Output: 3}, usageOf(t, x.seen))
}

// The flow removes only the chunk with the counts. Another chunk without choices may have other content.
func TestOnlyTheChunkWithCountsIsDropped(t *testing.T) {
	const filter = `data: {"choices":[],"prompt_filter_results":[1],"usage":null}` + "\n\n"
	x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, filter+`data: {"choices":[{"text":"hi"}]}`+"\n\n"+
			`data: {"choices":[],"usage":{"completion_tokens":3}}`+"\n\ndata: [DONE]\n\n")
	}, usage)
	r := post(t, x.url, "/v1/completions", completion("hi", `"stream":true`))
	assert.Contains(t, r.body, filter)
	assert.NotContains(t, r.body, "completion_tokens")
}
