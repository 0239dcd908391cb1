// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// The flow recognises D's refusal in one piece, and in two with a pause between them. Any other response reaches the
// client whole.
func TestAResponseThatDecidesIsReadToItsEnd(t *testing.T) {
	const refusal = `{"id":"a","object":"text_completion","choices":[{"index":0,"text":"",` +
		`"finish_reason":"cache_threshold"}]}`
	long := `{"id":"a","choices":[{"index":0,"text":"` + strings.Repeat("x", 100<<10) + `","finish_reason":"length"}]}`
	inPieces := func(text string) handler {
		return func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
			w.Header().Set("Content-Type", "application/json")
			for _, piece := range []string{text[:20], text[20:]} {
				_, _ = io.WriteString(w, piece)
				_ = http.NewResponseController(w).Flush()
				time.Sleep(20 * time.Millisecond)
			}
		}
	}
	for name, text := range map[string]string{"a refusal": refusal, "a response": long} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			d := func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
				if asked++; asked > 1 {
					answer(ok)(x, w, r, body)
					return
				}
				inPieces(text)(x, w, r, body)
			}
			x := script(t, &cold{fake{order: connector.DecodeFirst}}, answer(ok), d)
			resp, err := x.flow.Do(
				t.Context(), &pdflow.Request{API: connector.APICompletions, Body: []byte(completion("a", ""))},
			)
			require.NoError(t, err)
			got, err := io.ReadAll(resp.Body)
			require.NoError(t, err)
			require.NoError(t, resp.Body.Close())
			if text == long {
				require.Equal(t, long, string(got))
				require.Equal(t, 1, asked)
				return
			}
			require.NotContains(t, string(got), "cache_threshold")
			require.Equal(t, 2, asked, "D was not asked again after P")
		})
	}
}

// A compressed response could be searched neither for an engine's failure nor for what clients must not see. No leg
// asks for one.
func TestACompressedResponseOfDecodeIsAFailure(t *testing.T) {
	for encoding, want := range map[string]int{"gzip": 502, "identity, br": 502, "identity": 200} {
		x := script(t, &handing{}, answer(ok), func(x *scripted, w http.ResponseWriter, r *http.Request, body string) {
			require.Empty(t, r.Header["Accept-Encoding"])
			w.Header().Set("Content-Encoding", encoding)
			answer(ok)(x, w, r, body)
		})
		r := post(t, x.url, "/v1/completions", `{"prompt":"a"}`, "Accept-Encoding", "gzip")
		require.Equal(t, want, r.status, encoding)
		require.Empty(t, r.header["Content-Encoding"])
	}
}
