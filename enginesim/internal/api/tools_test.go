// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

const (
	weatherSchema = `{"type":"object","properties":{"city":{"type":"string"},"days":{"$ref":"#/$defs/Days"},` +
		`"unit":{"enum":["C","F"]}},"$defs":{"Days":{"type":["integer","null"]}}}`
	timeSchema = `{"type":"object","properties":{"zones":{"type":"array","minItems":2,"items":{"anyOf":[` +
		`{"type":"object","properties":{"exact":{"type":"boolean"},"shift":{"type":"number"}}}]}},` +
		`"kind":{"const":"now"},"none":{"type":"null"}}}`
)

// toolBody is a request of an API that names its tools as that API does. choice is required, one (parallel calls are
// refused), time (the name of a tool) or auto.
func toolBody(path, choice string, limit int) simtest.Obj {
	tools, named, more := []any{}, any(nil), simtest.Obj{}
	for _, t := range [][2]string{{"weather", weatherSchema}, {"time", timeSchema}} {
		schema := json.RawMessage(t[1])
		switch path {
		case simtest.Chat:
			tools = append(tools, simtest.Obj{"type": "function",
				"function": simtest.Obj{"name": t[0], "parameters": schema}})
			named = simtest.Obj{"type": "function", "function": simtest.Obj{"name": choice}}
		case "/v1/responses":
			tools = append(tools, simtest.Obj{"type": "function", "name": t[0], "parameters": schema})
			named = simtest.Obj{"type": "function", "name": choice}
		default:
			tools = append(tools, simtest.Obj{"name": t[0], "input_schema": schema})
			named = simtest.Obj{"type": "tool", "name": choice}
		}
	}
	messages := path == "/v1/messages"
	switch {
	case choice == "auto" && messages:
		named = simtest.Obj{"type": "auto"}
	case choice == "auto":
		named = "auto"
	case choice != "time" && messages:
		named = simtest.Obj{"type": "any", "disable_parallel_tool_use": choice == "one"}
	case choice != "time":
		named, more = "required", simtest.Obj{"parallel_tool_calls": choice != "one"}
	}
	return simtest.With(simtest.Request(path, "x", limit), simtest.Obj{"tools": tools, "tool_choice": named}, more)
}

// tight is JSON without its spaces: an input of a whole message has none.
func tight(arguments gjson.Result) string { return strings.ReplaceAll(arguments.String(), " ", "") }

// called reads the calls of a whole or streamed response of any API, as "name arguments" each, and how it finished.
func called(t *testing.T, path string, r simtest.Response) (calls []string, finish string) {
	t.Helper()
	require.Equal(t, 200, r.Status, r.Body)
	var text strings.Builder
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "text/event-stream") {
		for _, c := range r.Get("choices.0.message.tool_calls").Array() {
			assert.NotEmpty(t, c.Get("id").String())
			calls = append(calls, c.Get("function.name").String()+" "+tight(c.Get("function.arguments")))
		}
		for _, c := range r.Get("output.#(type==function_call)#").Array() {
			calls = append(calls, c.Get("name").String()+" "+tight(c.Get("arguments")))
		}
		for _, c := range r.Get("content.#(type==tool_use)#").Array() {
			calls = append(calls, c.Get("name").String()+" "+c.Get("input").Raw)
		}
		return calls, r.Get("choices.0.finish_reason").String() + r.Get("stop_reason").String()
	}
	for _, e := range r.Events() {
		e := gjson.Parse(e)
		for _, c := range e.Get("choices.0.delta.tool_calls").Array() {
			for int(c.Get("index").Int()) >= len(calls) {
				calls = append(calls, c.Get("function.name").String()+" ")
			}
			calls[len(calls)-1] += tight(c.Get("function.arguments"))
		}
		finish += e.Get("choices.0.finish_reason").String() + e.Get("delta.stop_reason").String()
		switch e.Get("type").String() {
		case "content_block_start":
			require.EqualValues(t, len(calls), e.Get("index").Int())
			calls = append(calls, e.Get("content_block.name").String()+" ")
		case "content_block_delta":
			calls[e.Get("index").Int()] += tight(e.Get("delta.partial_json"))
		case "response.output_item.added":
			calls = append(calls, e.Get("item.name").String()+" ")
		case "response.function_call_arguments.delta":
			calls[e.Get("output_index").Int()] += tight(e.Get("delta"))
		case "response.output_item.done":
			text.WriteString(e.Get("item.name").String() + " " + tight(e.Get("item.arguments")))
		}
	}
	if path == "/v1/responses" {
		assert.Equal(t, strings.Join(calls, ""), text.String())
	}
	return calls, finish
}

func TestToolsAreCalledOnDemand(t *testing.T) {
	const weather, clock = `^weather \{"city":"[a-z]{8}","days":[1-9]\d,"unit":"[CF]"\}$`,
		`^time \{"zones":\[(\{"exact":(true|false),"shift":\d\.[1-9]\},?){2}\],"kind":"now","none":null\}$`
	for path, stop := range map[string][2]string{simtest.Chat: {"tool_calls", "stop"},
		"/v1/messages": {"tool_use", "end_turn"}, "/v1/responses": {"", ""}} {
		for choice, want := range map[string][]string{"required": {weather, clock}, "one": {weather}, "time": {clock},
			"auto": nil} {
			t.Run(path+"/"+choice, func(t *testing.T) {
				s := simtest.New(t)
				body := toolBody(path, choice, 300)
				whole := s.Post(t.Context(), s.O, path, body)
				calls, finish := called(t, path, whole)
				require.Len(t, calls, len(want), whole.Body)
				for i := range want {
					assert.Regexp(t, want[i], calls[i])
				}
				if choice == "auto" {
					assert.Len(t, whole.Text(), 300, "the model writes text")
					return
				}
				assert.Equal(t, stop[map[bool]int{choice == "time": 1}[true]], finish)
				assert.Empty(t, whole.Text())
				streamed, finish := called(t, path, s.Post(t.Context(), s.O, path, simtest.Streamed(body)))
				assert.Equal(t, calls, streamed)
				assert.Equal(t, stop[map[bool]int{choice == "time": 1}[true]], finish)

				other := s.Post(t.Context(), s.O, path, simtest.With(body, simtest.Obj{"cache_salt": "x"}))
				same, _ := called(t, path, other)
				assert.Equal(t, calls, same)
				cut := s.Post(t.Context(), s.O, path, toolBody(path, choice, 20))
				short, _ := called(t, path, cut)
				assert.Len(t, short, 1, cut.Body)
			})
		}
	}
}

func TestATextIsJSONOfASchemaOnDemand(t *testing.T) {
	schema := json.RawMessage(weatherSchema)
	for path, member := range map[string]simtest.Obj{
		simtest.Chat: {"response_format": simtest.Obj{"type": "json_schema",
			"json_schema": simtest.Obj{"name": "w", "schema": schema}}},
		"/v1/responses": {"text": simtest.Obj{"format": simtest.Obj{"type": "json_schema", "name": "w",
			"schema": schema}}},
		"/v1/messages": {"output_config": simtest.Obj{"format": simtest.Obj{"type": "json_schema",
			"schema": schema}}},
	} {
		t.Run(path, func(t *testing.T) {
			s := simtest.New(t)
			body := simtest.With(simtest.Request(path, "x", 300), member)
			whole := s.Post(t.Context(), s.O, path, body).Text()
			assert.Regexp(t, `^\{"city": "[a-z]{8}", "days": [1-9]\d, "unit": "[CF]"\}$`, whole)
			streamed := s.Post(t.Context(), s.O, path, simtest.Streamed(body))
			assert.Equal(t, whole, streamed.StreamText())
			other := simtest.With(simtest.Request(path, "y", 300), member)
			assert.NotEqual(t, whole, s.Post(t.Context(), s.O, path, other).Text(), "the model fills it in")
		})
	}
	s := simtest.New(t)
	body := simtest.With(simtest.Request(simtest.Chat, "x", 300),
		simtest.Obj{"response_format": simtest.Obj{"type": "json_object"}})
	assert.Equal(t, "{}", s.Ask(s.O, body).Text())
}

// A schema that refers to itself, or is too large, still ends.
func TestASchemaWithoutEndEnds(t *testing.T) {
	s := simtest.NewClient(t)
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer e.Close()
	for _, schema := range []string{
		`{"$ref":"#"}`, `{"type":"array","items":{"$ref":"#"}}`,
		`{"type":"object","properties":{"a":{"$ref":"#"},"b":{"$ref":"#"},"c":{"$ref":"#"}}}`,
		`{"type":"array","minItems":1e18,"items":{"type":"array","minItems":1e18,"items":{"type":"array",` +
			`"minItems":1e18}}}`, `{"type":7,"properties":[],"enum":{}}`, `[]`,
	} {
		body := simtest.With(simtest.Request(simtest.Chat, "x", 3000), simtest.Obj{"response_format": simtest.Obj{
			"type": "json_schema", "json_schema": simtest.Obj{"name": "w", "schema": json.RawMessage(schema)}}})
		text := s.Post(t.Context(), e, simtest.Chat, body).Text()
		assert.True(t, json.Valid([]byte(text)), "%s: %.80s", schema, text)
	}
}
