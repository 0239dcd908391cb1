// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

// A stop_reason is a failure only with the connector that declares it, and never if it is the client's own stop string.
func TestAStopReasonIsAFailureOnlyWhereItIsDeclared(t *testing.T) {
	const stopped = `{"choices":[{"index":0,"text":"a","finish_reason":"stop","stop_reason":"recomputed"}]}`
	const completions, generate = "/v1/completions", "/inference/v1/generate"
	for name, c := range map[string]struct {
		declared, path, members string
		want                    int
	}{
		"another connector":    {"", completions, `"stop":["recomputed"]`, 200},
		"another's default":    {"", completions, `"stop":null`, 200},
		"the engine's own end": {"recomputed", completions, `"stop":["other",null]`, 502},
		"no stop strings":      {"recomputed", completions, `"stop":null`, 502},
		"one stop string":      {"recomputed", completions, `"stop":"recomputed"`, 200},
		"an escaped one":       {"recomputed", completions, `"stop":["x","recompute\u0064"]`, 200},
		"in sampling_params":   {"recomputed", generate, `"sampling_params":{"stop":["recomputed"]}`, 200},
		"beside them":          {"recomputed", generate, `"stop":["recomputed"]`, 502},
	} {
		t.Run(name, func(t *testing.T) {
			for kind, text := range map[string]string{"application/json": stopped,
				"text/event-stream": "data: " + stopped + "\n\ndata: [DONE]\n\n"} {
				d := func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
					w.Header().Set("Content-Type", kind)
					_, _ = io.WriteString(w, text)
				}
				x := script(t, &fake{stop: c.declared}, answer(ok), d,
					pdflow.WithRetry(config.Retry{MaxAttempts: 2}))
				r := post(t, x.url, c.path, `{"model":"tiny","prompt":"a","token_ids":[1],`+c.members+`}`)
				require.Equal(t, c.want, r.status, r.body)
				if c.want == 200 {
					require.Equal(t, text, r.body)
					require.Equal(t, "P D", x.all(), "the response counted as an engine's failure")
				}
			}
		})
	}
}
