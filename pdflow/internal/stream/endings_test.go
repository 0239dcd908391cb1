// SPDX-License-Identifier: Apache-2.0

package stream

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/request"
	"github.com/pdkit/pdkit/internal/verdict"
)

// shape is how responses of an API end: a whole one, and a stream's events from the first with content on. %s is the
// ending's value as JSON.
type shape struct {
	api    request.API
	member string
	whole  string
	begin  []string
	end    []string
}

func named(name, data string) string { return "event: " + name + "\ndata: " + data + "\n\n" }
func plain(data string) string       { return "data: " + data + "\n\n" }

var shapes = []shape{
	{request.Chat, verdict.FinishReason,
		`{"id":"c","choices":[{"index":0,"message":{"content":"a"},"finish_reason":%s,"stop_reason":null}],"usage":{}}`,
		[]string{role, token}, []string{plain(`{"choices":[{"delta":{},"finish_reason":%s,"stop_reason":null}]}`),
			plain(`{"choices":[],"usage":{}}`), done}},
	{request.Chat, verdict.FinishReason, // the second of two choices
		`{"choices":[{"index":0,"finish_reason":"stop"}, {"index":1, "finish_reason": %s}]}`,
		[]string{role, token}, []string{plain(`{"choices":[{"index":1,"delta":{},"finish_reason":%s}]}`), token, token,
			plain(`{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`), done}},
	{request.Completions, verdict.FinishReason,
		`{"choices":[{"text":"a","logprobs":null,"finish_reason": %s, "stop_reason": null}]}`,
		[]string{plain(`{"choices":[{"text":"a","finish_reason":null,"stop_reason":null}]}`)},
		[]string{plain(`{"choices": [{"text": "", "finish_reason": %s}]}`), done}},
	{request.Generate, verdict.FinishReason, `{"choices":[{"token_ids":[1],"finish_reason":%s}]}`,
		[]string{plain(`{"choices":[{"token_ids":[1],"finish_reason":null}]}`)},
		[]string{plain(`{"choices":[{"token_ids":[],"finish_reason":%s}]}`), done}},
	{request.SGLang, verdict.FinishReason,
		`{"text":"a","meta_info":{"id":"r","finish_reason":{"type":%s,"message":"no","status_code":null}}}`,
		[]string{plain(`{"text":"a","meta_info":{"finish_reason":null}}`)},
		[]string{plain(`{"text":"a","meta_info":{"finish_reason": {"type": %s}}}`), done}},
	{request.Messages, verdict.StopReason,
		`{"id":"m","type":"message","content":[{"type":"text","text":"a"}],"model":"m","stop_reason":%s}`,
		[]string{named("message_start", `{"type":"message_start","message":{"content":[],"stop_reason":null}}`),
			named("content_block_start", `{"type":"content_block_start","index":0,"content_block":{"type":"text"}}`),
			named("content_block_delta", `{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}`)},
		[]string{named("content_block_stop", `{"type":"content_block_stop","index":0}`),
			named("message_delta", `{"type":"message_delta","delta":{"stop_reason":%s,"stop_sequence":null}}`),
			named("message_stop", `{"type":"message_stop"}`), done}},
	{request.Responses, verdict.Status,
		`{"id":"r","incomplete_details":null,"metadata":null,"output":[{"status":"completed"}],"status":%s,"usage":{}}`,
		[]string{created, delta}, []string{named("response.completed",
			`{"response":{"id":"r","incomplete_details":null,"output":[],"status":%s},"type":"response.completed"}`)}},
	{request.Responses, verdict.IncompleteReason,
		`{"id":"r","incomplete_details":{"reason":%s},"output":[],"status":"incomplete"}`,
		[]string{created, delta}, []string{named("response.incomplete",
			`{"type":"response.incomplete","response":{"incomplete_details":{"reason":%s},"status":"incomplete"}}`)}},
}

var (
	created = named("response.created", `{"type":"response.created","response":{"status":"in_progress","error":null}}`)
	delta   = named("response.output_text.delta", `{"type":"response.output_text.delta","delta":"a"}`)
)

// endings are the table's for a shape, and some that nobody knows.
func (s *shape) endings() map[string]bool {
	all := map[string]bool{`"eos"`: false, `"aborted"`: false, `"err"`: false, `""`: false, `7`: false}
	for _, e := range verdict.Endings {
		if e.Member == s.member {
			value := `"` + e.Value + `"`
			if e.Value == "null" {
				value = e.Value
			}
			all[value] = e.Means == verdict.Failure
		}
	}
	return all
}

func (s *shape) config(events bool) Config {
	info := s.api.Info()
	return Config{Events: events, Guarded: info.Guarded, Endings: info.Endings, Length: -1}
}

// ends reads a response that comes in these pieces, and returns what the client got, and whether it failed before that
// or after.
func ends(t *testing.T, c Config, pieces_ []string) (got string, before, after bool) {
	got, head, end := read(c, &pieces{left: slices.DeleteFunc(slices.Clone(pieces_), func(p string) bool {
		return p == ""
	})}, false)
	_, before = errors.AsType[*Failure](head)
	require.Equal(t, head != nil, before, "%v", head)
	_, after = errors.AsType[*Failure](end)
	return got, before, after
}

// cuts are ways in which reads cut a response: one read, one for each event, and two that meet anywhere.
func cuts(parts []string) [][]string {
	whole := strings.Join(parts, "")
	all := [][]string{{whole}, parts}
	for i := 1; i < len(whole); i += 3 {
		all = append(all, []string{whole[:i], whole[i:]})
	}
	return all
}

func fill(parts []string, value string) []string {
	filled := make([]string, len(parts))
	for i, p := range parts {
		if filled[i] = p; strings.Contains(p, "%s") {
			filled[i] = fmt.Sprintf(p, value)
		}
	}
	return filled
}

// isWhole are the ends by which clients take a stream for whole.
var isWhole = []string{"[DONE]", "message_stop", "response.completed", "response.incomplete"}

func TestAnEndThatIsAFailureFailsTheStream(t *testing.T) {
	for i := range shapes {
		s := &shapes[i]
		for value, fails := range s.endings() {
			name := fmt.Sprint(i, " ", s.api.Info().Name, " ", value)
			parts := slices.Concat(s.begin, fill(s.end, value))
			for _, pieces := range cuts(parts) {
				got, before, after := ends(t, s.config(true), pieces)
				require.Equal(t, fails, before || after, "%s: %q", name, pieces)
				if !fails {
					require.Equal(t, strings.Join(parts, ""), got, name)
				}
				for _, end := range isWhole {
					require.False(t, fails && strings.Contains(got, end), "%s: %q of %q", name, got, pieces)
				}
			}
			first := fill(s.end, value) // before a token
			if s.api == request.Chat || s.api == request.Messages || s.api == request.Responses {
				first = append([]string{s.begin[0]}, first...)
			}
			got, before, _ := ends(t, s.config(true), first)
			require.Equal(t, fails, before, "%s, before the first byte", name)
			require.Equal(t, fails, got == "", name)
		}
	}
}

func TestAnEndThatIsAFailureFailsTheWholeResponse(t *testing.T) {
	for i := range shapes {
		s := &shapes[i]
		for value, fails := range s.endings() {
			body := fmt.Sprintf(s.whole, value)
			name := fmt.Sprint(i, " ", s.api.Info().Name, " ", body)
			assert.Equal(t, fails, verdict.WholeFailed([]byte(body), s.api.Info().Guarded, "", false), name)
			for i := range len(body) {
				got, before, after := ends(t, s.config(false), []string{body[:i], body[i:]})
				require.Equal(t, fails, before || after, name)
				require.Equal(t, fails, got != body, name)
			}
			_, before, _ := ends(t, s.config(false), []string{body})
			require.Equal(t, fails, before, "%s: nothing has gone out", name)
		}
	}
	got, before, _ := ends(t, (&shapes[5]).config(false), []string{`{"type":"message","content":[]}`})
	require.True(t, before, "vLLM leaves out what is null: %s", got)
}

// What a client or a model has said comes back in responses: as text, as arguments of a tool's call, as an object of
// the Messages API, and as metadata, tools and formats of the Responses API.
func TestNobodyCanFakeAnEnding(t *testing.T) {
	const words = `"finish_reason":"error","stop_reason":null,"status":"failed","type":"message_delta",` +
		`"delta":{"stop_reason":null},"error":{"message":"x"},"incomplete_details":{"reason":"abort"}`
	const object = `{` + words + `,"deep":[{` + words + `}]}`
	text := strings.ReplaceAll(object+"\n\nevent: response.failed\ndata: "+object+"\n\ndata: [DONE]\n\n", `"`, `\"`)
	text = `"` + strings.ReplaceAll(text, "\n", `\n`) + `"`
	for name, c := range map[string]struct {
		api    request.API
		events bool
		parts  []string
	}{
		"chat": {request.Chat, false, []string{`{"choices":[{"message":{"content":` + text +
			`,"tool_calls":[{"function":{"name":"f","arguments":` + text +
			`}}]},"finish_reason":"tool_calls","stop_reason":` + text + `}]}`}},
		"chat, streamed": {request.Chat, true, []string{role,
			plain(`{"choices":[{"delta":{"content":` + text + `},"finish_reason":null}]}`),
			plain(`{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":` + text + `}}]}}]}`),
			plain(`{"choices":[{"delta":{},"finish_reason":"tool_calls","stop_reason":` + text + `}]}`), done}},
		"SGLang": {request.SGLang, true, []string{plain(`{"text":` + text + `,"meta_info":{"finish_reason":null}}`),
			plain(`{"text":` + text + `,"meta_info":{"finish_reason":{"type":"stop","matched":` + text + `}}}`), done}},
		"messages": {request.Messages, false, []string{`{"type":"message","content":[{"type":"tool_use","input":` +
			object + `},{"type":"text","text":` + text + `}],"stop_reason":"tool_use","stop_sequence":` + text + `}`}},
		"messages, streamed": {request.Messages, true, []string{
			named("content_block_start",
				`{"type":"content_block_start","content_block":{"type":"tool_use","input":`+object+`}}`),
			named("content_block_delta", `{"type":"content_block_delta","delta":{"partial_json":`+text+`}}`),
			named("message_delta",
				`{"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":`+text+`}}`),
			named("message_stop", `{"type":"message_stop"}`)}},
		"responses": {request.Responses, false, []string{`{"metadata":` + object + `,"tools":[{"parameters":` + object +
			`}],"text":{"format":{"schema":` + object + `}},"instructions":` + text + `,"output":[` + object +
			`],"incomplete_details":null,"status":"completed","user":` + text + `}`}},
		"responses, streamed": {request.Responses, true, []string{
			named("response.created",
				`{"response":{"metadata":`+object+`,"status":"in_progress"},"type":"response.created"}`),
			named("response.output_text.delta", `{"delta":`+text+`,"type":"response.output_text.delta"}`),
			named("response.output_item.done",
				`{"item":{"arguments":`+text+`,"status":"failed"},"type":"response.output_item.done"}`),
			named("response.completed", `{"response":{"metadata":`+object+`,"tools":[`+object+`],"output":[`+object+
				`],"instructions":`+text+`,"status":"completed"},"type":"response.completed"}`)}},
	} {
		s := &shape{api: c.api}
		for _, pieces := range cuts(c.parts) {
			got, before, after := ends(t, s.config(c.events), pieces)
			require.False(t, before || after, "%s: %q", name, pieces)
			require.Equal(t, strings.Join(c.parts, ""), got, name)
		}
		if !c.events {
			require.False(t, verdict.WholeFailed([]byte(c.parts[0]), c.api.Info().Guarded, "", false), name)
		}
	}
}

// However the reads cut it, and however long it is, nothing of a stream goes out behind an error event.
func TestAnErrorEndsTheStream(t *testing.T) {
	long := strings.Repeat("x", 5000)
	for name, c := range map[string]struct {
		api  request.API
		text string
		end  []string
	}{
		"chat":     {request.Chat, token, []string{fault, done}},
		"long":     {request.Chat, token, []string{plain(`{"error":{"message":"` + long + `"}}`), done}},
		"no first": {request.Chat, token, []string{plain(`{"id":"x","error":{"message":"no"}}`), token, token, done}},
		"messages": {request.Messages, named("content_block_delta", `{"type":"content_block_delta"}`), []string{
			named("error", `{"type":"error","error":{"message":"no"}}`),
			named("message_stop", `{"type":"message_stop"}`)}},
		"responses": {request.Responses, delta, []string{
			named("response.failed", `{"type":"response.failed","response":{"error":{"message":"no"}}}`), done}},
		"responses, a long end": {request.Responses, delta, []string{named("response.completed",
			`{"response":{"instructions":"`+long+`","status":"cancelled"},"type":"response.completed"}`)}},
	} {
		s := &shape{api: c.api}
		for _, pieces := range append(cuts(append([]string{c.text}, c.end...)), []string{c.text + c.end[0]}) {
			got, before, after := ends(t, s.config(true), pieces)
			require.True(t, before || after, "%s: %q", name, pieces)
			require.True(t, before || strings.HasPrefix(got, c.text), "%s: %q", name, got)
			for _, end := range isWhole {
				require.NotContains(t, got, end, name)
			}
			if after && !strings.Contains(c.end[0], "cancelled") {
				require.Contains(t, got, "clean", "%s: the client gets the error", name)
			}
		}
	}
	null := plain(`{"error":null,"choices":[{"text":"a"}]}`)
	got, before, after := ends(t, (&shapes[0]).config(true), []string{null, null, done})
	require.False(t, before || after)
	require.Equal(t, null+null+done, got)
}
