// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// chosen is what vLLM writes as routed_experts, of rows of four bytes.
func chosen(rows string) string {
	head := fmt.Sprintf("{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 2, 2), }", len(rows)/4)
	head += strings.Repeat(" ", 117-len(head)) + "\n"
	file := append([]byte("\x93NUMPY\x01\x00"), binary.LittleEndian.AppendUint16(nil, uint16(len(head)))...)
	return `"` + base64.StdEncoding.EncodeToString(append(append(file, head...), rows...)) + `"`
}

// Whole responses with E as the experts of one choice, as vLLM 0.32.0 orders the members, and a stream of the API that
// has them in streams.
var expertForms = map[string]struct {
	api  connector.API
	form string
}{
	"chat": {connector.APIChat, `{"choices":[{"index":0,"message":{"content":"\"routed_experts\":\"x\""},` +
		`"finish_reason":"length","token_ids":null,"routed_experts":E}],"usage":{"prompt_tokens":2,` +
		`"completion_tokens":3}}`},
	"completions": {connector.APICompletions, `{"choices":[{"index":0,"text":"` + strings.Repeat("a", 6000) + `",` +
		`"routed_experts":E}],"usage":{"prompt_tokens":2,"completion_tokens":3}}`},
	"generate": {connector.APIGenerate, `{"choices":[{"index":0,"token_ids":[7,8,9],"routed_experts":E}]}`},
	"generate, streamed": {connector.APIGenerate, `data: {"choices":[{"index":0,"token_ids":[7],` +
		`"routed_experts":null}]}` + "\n\n" + `data: {"choices":[{"index":0,"token_ids":[8,9],"routed_experts":E}]}` +
		"\n\ndata: [DONE]\n\n"},
}

const (
	expertsOfP = "pppppppp"              // the prompt's two rows
	garbage    = "????????dddddddd"      // what D returns, and has not computed in the prompt's rows
	together   = expertsOfP + "dddddddd" // what the client must get
)

// D has not computed the prompt, so its rows of the prompt are what its memory held before. P's are put there.
func TestTheExpertsOfThePromptArePrefills(t *testing.T) {
	for name, k := range expertForms {
		for _, order := range []connector.Order{connector.PrefillThenDecode, connector.Together} {
			for _, piece := range []int{0, 1000} {
				t.Run(fmt.Sprintf("%s, %s, %d", name, order, piece), func(t *testing.T) {
					with := func(rows string) string { return strings.Replace(k.form, ":E", ":"+chosen(rows), 1) }
					x := script(t, &fake{order: order}, answer(`{"choices":[{"index":0,"routed_experts":`+
						chosen(expertsOfP)+`}]}`), sending(with(garbage), piece))
					r := post(t, x.url, k.api.Path(), requestOf(k.api, streamedIf(k.form)))
					require.Equal(t, http.StatusOK, r.status, r.body)
					require.NoError(t, r.err)
					assert.Equal(t, with(together), r.body)
					assert.Equal(t, "disaggregated", r.header.Get("X-PD-Mode"))
				})
			}
		}
	}
}

func streamedIf(form string) string {
	return fmt.Sprintf(`"stream":%t`, strings.HasPrefix(form, "data:"))
}

// Where P's response has none, or such that do not fit, one engine serves the request, and computes the prompt itself.
func TestExpertsThatCannotBeMergedAreOneEngines(t *testing.T) {
	for name, k := range expertForms {
		if strings.Contains(name, "streamed") || name == "completions" { // known only after the head has gone out
			continue
		}
		for what, p := range map[string]string{"none": `{"choices":[{"index":0,"routed_experts":null}]}`,
			"of more rows": `{"choices":[{"index":0,"routed_experts":` + chosen(strings.Repeat("p", 20)) + `}]}`,
			"not an array": `{"choices":[{"index":0,"routed_experts":"eA=="}]}`} {
			for _, order := range []connector.Order{connector.PrefillThenDecode, connector.Together} {
				t.Run(fmt.Sprintf("%s, %s, %s", name, what, order), func(t *testing.T) {
					with := func(rows string) string { return strings.Replace(k.form, ":E", ":"+chosen(rows), 1) }
					d := func(s *scripted, w http.ResponseWriter, r *http.Request, body string) {
						rows := strings.Repeat("x", 16) // computed by this engine alone
						if strings.Contains(body, `"x_transfer"`) {
							rows = garbage
						}
						sending(with(rows), 0)(s, w, r, body)
					}
					c := &fake{order: order, decode: func(_ *connector.Session, _ *connector.PrefillResult,
						leg *connector.Leg) error {
						leg.Set("x_transfer", []byte("1"))
						return nil
					}}
					x := script(t, c, answer(p), d)
					r := post(t, x.url, k.api.Path(), requestOf(k.api, ""))
					assert.Equal(t, with(strings.Repeat("x", 16)), r.body)
					assert.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))

					x = script(t, c, answer(p), d, pdflow.WithUnsupported(config.UnsupportedRefuse))
					r = post(t, x.url, k.api.Path(), requestOf(k.api, ""))
					assert.Equal(t, http.StatusBadRequest, r.status)
					assert.Contains(t, r.body, `"param":"routed_experts"`)
				})
			}
		}
	}
}

// The head of a long response has gone out before the experts come, and so has that of a stream: the client gets a
// broken response, and no garbage.
func TestExpertsThatComeLateAndCannotBeMergedAreCut(t *testing.T) {
	for _, name := range []string{"completions", "generate, streamed"} {
		k := expertForms[name]
		first, rest, _ := strings.Cut(strings.Replace(k.form, ":E", ":"+chosen(garbage), 1), "\n\n")
		x := script(t, &fake{}, answer(ok), func(_ *scripted, w http.ResponseWriter, _ *http.Request, _ string) {
			if rest == "" {
				_, _ = io.WriteString(w, first)
				return
			}
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, first+"\n\n")
			_ = http.NewResponseController(w).Flush()
			_, _ = io.WriteString(w, rest)
		})
		r := post(t, x.url, k.api.Path(), requestOf(k.api, streamedIf(k.form)))
		require.Error(t, r.err, name)
		assert.NotContains(t, r.body, "k05VTVBZ", "the beginning of a NumPy file")
		if rest == "" {
			r = post(t, x.url, k.api.Path(), requestOf(k.api, "")) // the flow knows by now what D tells
			require.NoError(t, r.err)
			assert.Equal(t, "aggregated", r.header.Get("X-PD-Mode"))
		}
	}
}

// vLLM's times of a request pass on P and then on D. Of two legs at once the client waits for D's alone.
func TestTheTimeOfBothEngines(t *testing.T) {
	const form = `{"choices":[{"text":"a"}],"metrics":{"time_to_first_token_ms":T,"generation_time_ms":9.5,` +
		`"queue_time_ms":Q,"mean_itl_ms":null}}`
	times := func(ttft, queue string) string {
		return strings.NewReplacer(":T", ":"+ttft, ":Q", ":"+queue).Replace(form)
	}
	for order, want := range map[connector.Order]string{
		connector.PrefillThenDecode: times("120.25", "7"), connector.Together: times("20.25", "3")} {
		for _, stream := range []bool{false, true} {
			d := times("20.25", "3")
			if stream {
				d, want = "data: "+d+"\n\ndata: [DONE]\n\n", "data: "+want+"\n\ndata: [DONE]\n\n"
			}
			x := script(t, &fake{order: order}, answer(times("100", "4")), sending(d, 0))
			r := post(t, x.url, "/v1/completions", completion("hi", fmt.Sprintf(`"stream":%t`, stream)))
			assert.Equal(t, want, r.body, order)
		}
	}
}

// D renders, tokenizes and samples by itself. P's response, which has another token and no log probabilities, changes
// none of it.
func TestWhatDKnowsOfThePromptStays(t *testing.T) {
	const form = `{"prompt_token_ids":[1,2],"prompt_text":"<u>hi","mm_placeholders":{"image":[{"offset":1}]},` +
		`"choices":[{"text":"ab","logprobs":{"token_logprobs":[-0.1,-0.2]},"token_ids":[7,8],` +
		`"sampling_mask":[[7],[8]],"weight_versions":[{"version":"1"}],"routed_experts":null}],"metrics":null,` +
		`"usage":{"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1,"multimodal_tokens":{"image":1}}}}`
	p := strings.NewReplacer("[1,2]", "[1]", "hi", "ho", "-0.1,-0.2", "-0.3", "[7,8]", "[9]", `:1}`, `:2}`).
		Replace(form)
	for _, order := range []connector.Order{connector.PrefillThenDecode, connector.Together} {
		x := script(t, &fake{order: order}, answer(p), answer(form))
		assert.Equal(t, form, post(t, x.url, "/v1/completions", completion("hi", "")).body)
	}
}
