// SPDX-License-Identifier: Apache-2.0

package verdict

import (
	"bytes"

	"github.com/tidwall/gjson"
)

// Meaning is what an ending says of a response.
type Meaning string

// The meanings of endings.
const (
	Complete Meaning = "complete"       // the model has ended it, or waits for a tool
	Cut      Meaning = "cut by a limit" // that of the client or of the context
	Filtered Meaning = "filtered"       // a filter has ended it, or the model refuses
	GoesOn   Meaning = "goes on"        // another engine goes on, or the engine does in the background
	Failure  Meaning = "failure"        // the engine has given the request up
)

// Ending is a value by which an engine says how a response ended.
type Ending struct {
	Member string // where it stands: one of the members below
	Value  string // null: the member is null or, in a whole response, absent
	Means  Meaning
	Engine string // whose it is, with the source
}

// The members that say how a response ended.
const (
	FinishReason     = "finish_reason"             // of a choice; in SGLang's /generate it is an object with a type
	StopReason       = "stop_reason"               // of the Messages API
	Status           = "status"                    // of the Responses API
	IncompleteReason = "incomplete_details.reason" // of the Responses API
)

// Endings are the endings that engines write. One that is not here is no failure.
var Endings = []Ending{
	{FinishReason, "stop", Complete, "all"},
	{FinishReason, "tool_calls", Complete, "all"},
	{FinishReason, "function_call", Complete, "SGLang 0.5.23 (openai/protocol.py), an older name of `tool_calls`"},
	{FinishReason, "length", Cut, "all"},
	{FinishReason, "repetition", Cut, "vLLM 0.32.0 (vllm/v1/engine/__init__.py), if the client asked for " +
		"`repetition_detection`"},
	{FinishReason, "content_filter", Filtered, "SGLang 0.5.23 (openai/protocol.py)"},
	{FinishReason, "not_finished", GoesOn, "TensorRT-LLM (executor/result.py), a prefill engine"},
	{FinishReason, "cache_threshold", GoesOn, "vLLM with llm-d, a decode engine that asks for a prefill"},
	{FinishReason, "abort", Failure, "vLLM 0.32.0 (vllm/v1/request.py): terminated, paused, asleep or scaled down " +
		"(#57082); SGLang 0.5.23 (managers/schedule_batch.py): no memory, a transfer that failed, `/abort_request`"},
	{FinishReason, "error", Failure, "vLLM 0.32.0 (vllm/v1/engine/__init__.py): KV that could not be loaded, of " +
		"which most of its APIs make 500; engines that pass it on (tt-inference-server#3273)"},
	{FinishReason, "cancelled", Failure, "TensorRT-LLM (executor/result.py)"},
	{FinishReason, "timeout", Failure, "TensorRT-LLM (executor/result.py): the engine's own limit"},
	{StopReason, "end_turn", Complete, "all; also an `abort` of SGLang 0.5.23 (anthropic/serving.py) and of " +
		"TensorRT-LLM (serve/anthropic_adapter.py), which nobody can tell from it"},
	{StopReason, "tool_use", Complete, "all"},
	{StopReason, "stop_sequence", Complete, "all"},
	{StopReason, "pause_turn", Complete, "Anthropic's API"},
	{StopReason, "max_tokens", Cut, "all"},
	{StopReason, "model_context_window_exceeded", Cut, "Anthropic's API"},
	{StopReason, "refusal", Filtered, "Anthropic's API"},
	{StopReason, "null", Failure, "vLLM 0.32.0 (vllm/entrypoints/anthropic/serving.py): an `abort`"},
	{StopReason, "abort", Failure, "engines that pass their finish reason on"},
	{StopReason, "error", Failure, "engines that pass their finish reason on"},
	{Status, "completed", Complete, "all; also an `abort` of vLLM 0.32.0 (openai/responses/serving.py) unless the " +
		"model is gpt-oss, which nobody can tell from it"},
	{Status, "incomplete", Cut, "all, with `incomplete_details.reason`"},
	{Status, "queued", GoesOn, "vLLM, SGLang: `background`"},
	{Status, "in_progress", GoesOn, "vLLM, SGLang: `background`"},
	{Status, "failed", Failure, "SGLang 0.5.23 (openai/serving_responses.py): `abort` and `error`; TensorRT-LLM " +
		"(serve/responses_utils.py): `timeout`"},
	{Status, "cancelled", Failure, "vLLM 0.32.0 (openai/responses/serving.py): an `abort` of gpt-oss; TensorRT-LLM " +
		"(serve/responses_utils.py)"},
	{IncompleteReason, "max_output_tokens", Cut, "all"},
	{IncompleteReason, "content_filter", Filtered, "OpenAI's API"},
	{IncompleteReason, "abort", Failure, "engines that pass their finish reason on"},
	{IncompleteReason, "error", Failure, "engines that pass their finish reason on"},
}

// Fails reports whether a member's value is the ending of a response that its engine gave up.
func Fails(member, value string) bool {
	for i := range Endings {
		if e := &Endings[i]; e.Value == value && e.Member == member {
			return e.Means == Failure
		}
	}
	return false
}

// EndsFailed reports whether an event of the Messages or the Responses API ends a response that its engine gave up.
func EndsFailed(data []byte) bool {
	s := view(data)
	switch gjson.Get(s, "type").Str {
	case "message_delta":
		stop := gjson.Get(s, "delta."+StopReason)
		return stop.Exists() && Fails(StopReason, word(stop))
	case "response.completed", "response.incomplete":
		return Fails(Status, word(gjson.Get(s, "response."+Status))) ||
			Fails(IncompleteReason, word(gjson.Get(s, "response."+IncompleteReason)))
	case "response.failed":
		return true
	}
	return false
}

func word(r gjson.Result) string {
	if r.Type == gjson.Null {
		return "null"
	}
	return r.Str
}

// WholeFailed reports whether a whole response is one that its engine gave up. guarded is the API's; stop is the
// stop_reason with which the engine gives up, "" for none. Of a prefill's response only the handoff is wanted: it may
// lack an ending.
func WholeFailed(body []byte, guarded bool, stop string, prefill bool) bool {
	if guarded {
		return failedReason(body, stop) >= 0
	}
	o := Outer{stopped: prefill}
	return o.GaveUp(body) >= 0
}

var (
	reasonKey  = []byte(`_reason"`) // ends the names finish_reason and stop_reason; text has few underscores
	isNull     = []byte(":null")
	finishName = []byte(`"finish`)
	stopName   = []byte(`"stop`)
)

// failedReason returns the offset of the first finish_reason that is a failure, or stop_reason that is stop, -1 without
// one. A client's text cannot look like one, since quotes within JSON strings are escaped.
func failedReason(b []byte, stop string) int {
	for at := 0; ; {
		j := bytes.Index(b[at:], reasonKey)
		if j < 0 {
			return -1
		}
		name := b[:at+j]
		at += j + len(reasonKey)
		if bytes.HasPrefix(b[at:], isNull) {
			continue // as in most events
		}
		value := bytes.TrimLeft(b[at:], " \t\r\n")
		if len(value) == 0 || value[0] != ':' {
			continue
		}
		if value = bytes.TrimLeft(value[1:], " \t\r\n"); len(value) == 0 {
			return -1
		}
		switch is := firstString(value); {
		case bytes.HasSuffix(name, finishName) && Fails(FinishReason, is),
			stop != "" && is == stop && bytes.HasSuffix(name, stopName):
			return len(b) - len(value)
		}
	}
}

// firstString is a value that is a string, or the type of one that is an object; "" if it is neither, or cut.
func firstString(value []byte) string {
	if value[0] == '{' {
		return gjson.Get(string(value[:min(len(value), markReach)]), "type").Str // a copy, since gjson may keep it
	}
	if end := bytes.IndexByte(value[1:], '"'); value[0] == '"' && end >= 0 {
		return view(value[1 : 1+end])
	}
	return ""
}

// Outer looks for the ending of a response that is one object and may repeat JSON of a client or a model: only the
// members of the outermost object count. It reads the response in pieces. The zero value is ready.
type Outer struct {
	level   int  // objects and arrays that are open
	text    bool // within a string
	escaped bool // behind a backslash of it
	value   bool // a colon was read: what follows is a member's value
	details bool // within incomplete_details
	message bool // the response is one of the Messages API
	stopped bool // it has a stop_reason
	key, is shortText
}

// shortText is a string of JSON. One that is longer, or has escapes, is none that counts.
type shortText struct {
	b [24]byte
	n int // len(b)+1: it is longer
}

func (t *shortText) string() string { return view(t.b[:t.n%(len(t.b)+1)]) }

// GaveUp reads the next piece. It returns the offset at which that says that the engine gave the response up, or -1.
func (o *Outer) GaveUp(p []byte) int {
	for i := 0; i < len(p); i++ {
		if o.text {
			if i += o.inText(p[i:]); i == len(p) {
				break
			}
			if o.value && o.member(o.is.string()) {
				return i
			}
			if !o.value {
				o.key = o.is
			}
			o.value = false
			continue
		}
		switch c := p[i]; c {
		case '"':
			o.text, o.is.n = true, 0
		case ':':
			o.value = true
			o.stopped = o.stopped || o.level == 1 && o.key.string() == StopReason
		case '{', '[':
			o.details = o.details || o.level == 1 && o.value && o.key.string() == "incomplete_details"
			o.level++
			o.value = false
		case '}', ']':
			o.level--
			o.details = o.details && o.level > 1
			if o.level == 0 && o.message && !o.stopped && Fails(StopReason, "null") {
				return i
			}
		case 'n':
			if o.value && o.member("null") {
				return i
			}
			o.value = false
		case ',':
			o.value = false
		}
	}
	return -1
}

// inText reads a string's bytes, and returns how many come before its end in p.
func (o *Outer) inText(p []byte) int {
	for i := 0; i < len(p); i++ {
		switch c := p[i]; {
		case o.escaped:
			o.escaped = false
		case c == '\\':
			o.escaped, o.is.n = true, len(o.is.b)+1
		case c == '"':
			o.text = false
			return i
		case o.is.n < len(o.is.b):
			o.is.b[o.is.n] = c
			o.is.n++
		default:
			o.is.n = len(o.is.b) + 1
			i += plain(p[i+1:])
		}
	}
	return len(p)
}

// plain returns how many bytes of a string, of the next few, are neither its end nor a backslash.
func plain(p []byte) int {
	p = p[:min(len(p), 128)]
	for _, c := range [...]byte{'"', '\\'} {
		if n := bytes.IndexByte(p, c); n >= 0 {
			p = p[:n]
		}
	}
	return len(p)
}

// member reports whether the member at hand has a value that is a failure.
func (o *Outer) member(value string) bool {
	key := o.key.string()
	switch {
	case o.details && o.level == 2 && key == "reason":
		return Fails(IncompleteReason, value)
	case o.level != 1:
		return false
	case key == "type":
		o.message = value == "message"
	}
	return (key == Status || key == StopReason) && Fails(key, value)
}
