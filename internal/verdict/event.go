// SPDX-License-Identifier: Apache-2.0

// Package verdict says by the bytes of an engine's response what it means: that the engine gave up, that it failed,
// that it has no token yet, or what it counted. All words of engines that a flow looks for stand here.
package verdict

import (
	"bytes"
	"unsafe"

	"github.com/tidwall/gjson"
)

// IsError knows {"error":{…}}, the {"object":"error",…} of older engines, the Messages API's {"type":"error",…} and the
// Responses API's response.failed.
func IsError(data []byte) bool {
	if !bytes.Contains(data, []byte(`"error"`)) {
		return false
	}
	s := view(data)
	switch gjson.Get(s, "type").String() {
	case "error", "response.failed":
		return true
	}
	if gjson.Get(s, "object").Str == "error" {
		return true
	}
	e := gjson.Get(s, "error")
	return e.Exists() && e.Type != gjson.Null
}

// errorStatus are the statuses of Anthropic's errors that say more than that the engine failed.
var errorStatus = map[string]int{"invalid_request_error": 400, "authentication_error": 401, "permission_error": 403,
	"not_found_error": 404, "request_too_large": 413, "rate_limit_error": 429, "overloaded_error": 503}

// StatusOf returns the status that an engine would have given an error if it had not begun a stream before: the error's
// code, which vLLM and SGLang write as a number, or what Anthropic's type means. It is 500 for all else.
func StatusOf(data []byte) int {
	e := gjson.Get(view(data), "error")
	if code := e.Get("code"); code.Type == gjson.Number && code.Num >= 400 && code.Num < 600 {
		return int(code.Num)
	}
	if status := errorStatus[e.Get("type").Str]; status != 0 && gjson.Get(view(data), "type").Str == "error" {
		return status
	}
	return 500
}

// Abort returns the error for which SGLang's /generate has aborted a request in a stream, nil without one. ending
// begins with the finish reason: {"type":"abort","message":"…","status_code":400}. Without a stream it is the status.
func Abort(ending []byte) []byte {
	status, message := gjson.Get(view(ending), "status_code"), gjson.Get(view(ending), "message")
	if ending[0] != '{' || status.Type != gjson.Number || message.Type != gjson.String || !gjson.Valid(message.Raw) {
		return nil
	}
	return []byte(`{"error":{"message":` + message.Raw + `,"code":` + status.Raw + `}}`)
}

// IsPreamble knows the events that engines send before they have a token: chat's chunk with nothing but a role, and
// those of the Responses and Messages APIs that open a response or its parts, or close parts that got no token. A
// failed load shows only after them.
func IsPreamble(data []byte) bool {
	s := view(data)
	switch gjson.Get(s, "type").String() {
	case "response.created", "response.in_progress", "response.queued", "message_start", "ping", "content_block_start",
		"content_block_stop", "response.output_item.added", "response.content_part.added", "response.output_text.done",
		"response.content_part.done", "response.output_item.done":
		return true
	}
	if !bytes.Contains(data, []byte(`"role"`)) {
		return false
	}
	choice := gjson.Get(s, "choices.0")
	if !choice.Exists() || choice.Get("finish_reason").Type == gjson.String {
		return false
	}
	only := true
	choice.Get("delta").ForEach(func(key, value gjson.Result) bool {
		empty := value.Type == gjson.Null || value.Type == gjson.String && value.Str == ""
		only = key.Str == "role" || empty
		return only
	})
	return only
}

// usageReach is how much of a response's end is searched for its usage. Engines write it after the text.
const usageReach = 2 << 10

// keys are the members that hold the counts, as they stand in a response.
var keys = map[string][]byte{"usage": []byte(`"usage":`), "meta_info": []byte(`"meta_info":`)}

// Usage returns a response's end from the object on that holds the counts, "" without one. member is
// its name: usage or meta_info.
func Usage(end []byte, member string) string {
	end = end[max(0, len(end)-usageReach):]
	key, known := keys[member]
	if !known {
		return ""
	}
	at := -1
	for i := 0; ; i = at {
		j := bytes.Index(end[i:], key)
		if j < 0 {
			break
		}
		at = i + j + len(key)
	}
	if at < 0 {
		return ""
	}
	if object := gjson.Parse(view(end[at:])); object.IsObject() {
		return object.Raw
	}
	return ""
}

// view reads bytes as a string for gjson without a copy; the bytes must not change meanwhile.
func view(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
