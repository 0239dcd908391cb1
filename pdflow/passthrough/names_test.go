// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

// named is a handler of an engine that serves big to those who ask for gpt-4o.
func named(t *testing.T, answer func(*http.Request) (*http.Response, error)) (*engine, *passthrough.Handler) {
	t.Helper()
	e := newEngine(t, answer)
	e.ModelNames = map[string]string{"gpt-4o": "big", "b": "some-lora"}
	return e, handler(t, e.find, nil)
}

// What is no inference names the model as a flow's legs do, and is answered as a flow answers.
func TestPassthroughNamesTheEnginesModel(t *testing.T) {
	for path, k := range map[string]struct{ sends, says, want string }{
		"/tokenize":                 {`"prompt":"big"`, `{"count":1,"tokens":[1]}`, `{"count":1,"tokens":[1]}`},
		"/v1/messages/count_tokens": {`"messages":[]`, `{"input_tokens":3}`, `{"input_tokens":3}`},
		"/v1/embeddings": {`"input":"gpt-4o"`,
			`{"data":[{"model":"big","x":"a\\\"\"model\":\"big\""}], "model" : "b\"\\ig", "object":"model","usage":{}}`,
			`{"data":[{"model":"big","x":"a\\\"\"model\":\"big\""}], "model" : "gpt-4o", "object":"model","usage":{}}`},
		"/v1/score":    {`"input":"x"`, `{"model":null,"data":[]}`, `{"model":null,"data":[]}`},
		"/v1/rerank":   {`"input":"x"`, `["model","big"]`, `["model","big"]`},
		"/v1/classify": {`"input":"x"`, `{"a":"model","model":"big`, `{"a":"model","model":`},
		"/v1/detokenize": {`"input":"x"`, `{"model":{"model":"big"},"b":"model"}`,
			`{"model":{"model":"big"},"b":"model"}`},
	} {
		e, h := named(t, func(*http.Request) (*http.Response, error) {
			return response(http.StatusOK, "application/json", iotest.OneByteReader(strings.NewReader(k.says))), nil
		})
		w := do(h, post(path, `{"model":"gpt-4o",`+k.sends+`}`))
		require.Equal(t, http.StatusOK, w.Code, path)
		assert.Equal(t, k.want, w.Body.String(), path)
		assert.Equal(t, []string{`{"model":"big",` + k.sends + `}`}, e.bodies, path)
		assert.Equal(t, "big", e.picks[0].Request.Model)
		w = do(h, post(path, `{"model":"big",`+k.sends+`}`))
		assert.Equal(t, k.says, w.Body.String(), "%s: who names the engines' model gets what they say", path)
	}
}

func TestAStreamThatPassesHasTheClientsName(t *testing.T) {
	_, h := named(t, func(*http.Request) (*http.Response, error) {
		return response(http.StatusOK, "text/event-stream", strings.NewReader(
			`data: {"model":"big","choices":[]}`+"\n\n"+`data: {"error":{"message":"model big failed"}}`+"\n\n")), nil
	})
	w := do(h, post("/v1/audio/transcriptions", form("model=gpt-4o", "stream=true"), "Content-Type", formType))
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	assert.Contains(t, w.Body.String(), `data: {"model":"gpt-4o","choices":[]}`)
	assert.Contains(t, w.Body.String(), "model gpt-4o failed")
	assert.NotContains(t, w.Body.String(), "big")
}

func TestAFormNamesTheEnginesModel(t *testing.T) {
	e, h := named(t, answers(http.StatusOK, `{"text":"gpt-4o"}`))
	for _, fields := range [][]string{{"prompt=model", "model=gpt-4o", "language=de"}, {"model=gpt-4o"}} {
		sent := form(fields...)
		w := do(h, post("/v1/audio/transcriptions", sent, "Content-Type", formType))
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		last := len(e.requests) - 1
		assert.Equal(t, strings.Replace(sent, "gpt-4o", "big", 1), e.bodies[last])
		assert.EqualValues(t, len(e.bodies[last]), e.requests[last].ContentLength)
		assert.Equal(t, "big", e.picks[last].Request.Model)
	}
	odd := strings.ReplaceAll(form("model=gpt-4o"), "\r\n", "\n")
	assert.Equal(t, http.StatusBadRequest,
		do(h, post("/v1/audio/transcriptions", odd, "Content-Type", formType)).Code, "never sent by a name of its own")
}

// A response that a client asks for once more names its model; the request does not.
func TestAResponseThatIsAskedForByItsID(t *testing.T) {
	_, h := named(t, answers(http.StatusOK, `{"id":"resp_1","metadata":{"model":"big"},"model":"big"}`))
	w := do(h, httptest.NewRequest(http.MethodGet, "/v1/responses/resp_1", nil))
	require.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, `{"id":"resp_1","metadata":{"model":"big"},"model":"gpt-4o"}`, w.Body.String())
	_, h = named(t, answers(http.StatusNotFound, `{"error":{"message":"big has no such response"}}`))
	w = do(h, httptest.NewRequest(http.MethodGet, "/v1/responses/resp_1", nil))
	assert.Contains(t, w.Body.String(), "gpt-4o has no such response")
}

func TestErrorsThatPassHaveTheClientsName(t *testing.T) {
	_, h := named(t, answers(http.StatusNotFound,
		`{"error":{"message":"The model big does not exist, some-lora does"}}`))
	w := do(h, post("/tokenize", `{"model":"gpt-4o","prompt":"x"}`))
	assert.Equal(t, http.StatusNotFound, w.Code)
	assert.Contains(t, w.Body.String(), "The model gpt-4o does not exist, b does")
}

// A client finds the names that it may ask for, and no others of the same models (maximhq/bifrost issue 3342).
func TestModelsAreListedByTheClientsNames(t *testing.T) {
	list := `{"data":[{"id":"big","root":"/models/big","parent":null,"max_model_len":10},` +
		`{"id":"some-lora","root":"big","parent":"big"},{"id":"c-lora","parent":"big"}]}`
	for name, k := range map[string]struct {
		names map[string]string
		want  string
	}{
		"by one each": {map[string]string{"gpt-4o": "big", "b": "some-lora"}, "gpt-4o(null) b(gpt-4o) c-lora(gpt-4o)"},
		"by two":      {map[string]string{"x": "big", "a": "big"}, "a(null) x(null) some-lora(a) c-lora(a)"},
		"by its own, too": {map[string]string{"a": "big", "big": "big"},
			"a(null) big(null) some-lora(big) c-lora(big)"},
		"for any":                {map[string]string{"*": "big"}, "big(null) some-lora(big) c-lora(big)"},
		"for what nobody serves": {map[string]string{"a": "none"}, "big(null) some-lora(big) c-lora(big)"},
	} {
		t.Run(name, func(t *testing.T) {
			engines := (&fleet{t: t, lists: map[string]string{"d": list}, asked: map[string]int{}}).engines("decode@d")
			engines.ModelNames = k.names
			h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return engines, nil }, nil)
			var got struct {
				Data []struct {
					ID, Root string
					Parent   *string
					Length   int `json:"max_model_len"`
				}
			}
			w := do(h, httptest.NewRequest(http.MethodGet, "/v1/models", nil))
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got))
			var ids []string
			for _, m := range got.Data {
				parent := "null"
				if m.Parent != nil {
					parent = *m.Parent
				}
				ids = append(ids, m.ID+"("+parent+")")
			}
			assert.Equal(t, k.want, strings.Join(ids, " "))
			if name == "by one each" {
				assert.Equal(t, "gpt-4o", got.Data[0].Root)
				assert.Equal(t, 10, got.Data[0].Length)
				assert.NotContains(t, w.Body.String(), "big")
				w = do(h, httptest.NewRequest(http.MethodGet, "/v1/models/gpt-4o", nil))
				assert.Contains(t, w.Body.String(), `{"id":"gpt-4o"`)
				w = do(h, httptest.NewRequest(http.MethodGet, "/v1/models/big", nil))
				assert.Equal(t, http.StatusNotFound, w.Code, "no client has this name")
			}
			if name == "for what nobody serves" {
				w = do(h, httptest.NewRequest(http.MethodGet, "/v1/models/a", nil))
				assert.Equal(t, http.StatusNotFound, w.Code)
			}
		})
	}
}

// vLLM lists its models and has no path for one of them; OpenAI's clients write a slash in its name as %2F.
func TestOneModelIsItsEntryOfTheList(t *testing.T) {
	engines := (&fleet{t: t, lists: map[string]string{"d": `{"data":[{"id":"org/m","object":"model"}]}`},
		asked: map[string]int{}}).engines("decode@d")
	h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return engines, nil }, nil)
	for target, status := range map[string]int{"/v1/models/org/m": 200, "/v1/models/org%2Fm": 200,
		"/v1/models/org%2fm": 200, "/v1/models/m": 404, "/v1/models/org%2Fx": 404} {
		w := do(h, httptest.NewRequest(http.MethodGet, target, nil))
		assert.Equal(t, status, w.Code, target)
		if status == http.StatusOK {
			assert.JSONEq(t, `{"id":"org/m","object":"model"}`, w.Body.String())
		} else {
			assert.Contains(t, w.Body.String(), `"param":"model"`)
		}
	}
}

func TestNamesOfEnginesThatAreWrong(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, `{}`))
	e.ModelNames = map[string]string{"a": ""}
	w := do(handler(t, e.find, nil), post("/tokenize", `{"model":"a","prompt":"x"}`))
	assert.Equal(t, http.StatusInternalServerError, w.Code)
	assert.Empty(t, e.requests)
}

// Of any names those of adapters stay.
func TestAnAdaptersOwnNamePasses(t *testing.T) {
	e := newEngine(t, answers(http.StatusOK, `{}`))
	e.ModelNames = map[string]string{"*": "big"}
	e.Adapters = func(model string) bool { return model == "a-lora" }
	h := handler(t, e.find, nil)
	for _, model := range []string{"a-lora", "x"} {
		do(h, post("/tokenize", `{"model":"`+model+`"}`))
	}
	assert.Equal(t, []string{`{"model":"a-lora"}`, `{"model":"big"}`}, e.bodies)
}
