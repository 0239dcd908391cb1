// SPDX-License-Identifier: Apache-2.0

package load

import "strconv"

// The responses have the fields and about the size of vLLM 0.32.0's. serial and word are written with 16 digits each.

// appendPrefill writes the response to a prefill leg around its handoff.
func appendPrefill(dst []byte, b *Board, slot int, serial uint64) []byte {
	dst = append(dst, `{"id":"chatcmpl-`...)
	dst = appendHex(dst, serial)
	dst = append(dst, `","object":"chat.completion","created":1795258775,"model":"bench","choices":[{"index":0,`+
		`"message":{"role":"assistant","content":"[","refusal":null,"annotations":null,"audio":null,`+
		`"function_call":null,"reasoning":null},"logprobs":null,"finish_reason":"length","stop_reason":null,`+
		`"token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-10e30e20",`+
		`"usage":{"prompt_tokens":512,"total_tokens":513,"completion_tokens":1,"prompt_tokens_details":`+
		`{"cached_tokens":0,"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},`+
		`"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":`...)
	dst = b.give(dst, slot, serial)
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// appendWhole writes the whole response to a decode leg that is not streamed.
func appendWhole(dst []byte, serial, word uint64) []byte {
	dst = append(dst, `{"id":"chatcmpl-`...)
	dst = appendHex(dst, serial)
	dst = append(dst, `","object":"chat.completion","created":1795258775,"model":"bench","choices":[{"index":0,`+
		`"message":{"role":"assistant","content":"`...)
	dst = appendHex(dst, word)
	return append(dst, `","refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},`+
		`"logprobs":null,"finish_reason":"stop","stop_reason":null,"token_ids":null,"routed_experts":null}],`+
		`"service_tier":null,"system_fingerprint":"vllm-0.32.0-10e30e20","usage":{"prompt_tokens":512,`+
		`"total_tokens":528,"completion_tokens":16,"prompt_tokens_details":{"cached_tokens":512,`+
		`"created_cache_tokens":null,"multimodal_tokens":null},"completion_tokens_details":null},`+
		`"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,`+
		`"ec_transfer_params":null,"metrics":null}`...)
}

// eventIndexDigits is the width of a chunk's index in its text.
const eventIndexDigits = 8

// events makes the events of one stream, for the engine to write and for the client to compare. The next chunk is made
// by writing its index over the last one's.
type events struct {
	chunk   []byte
	indexAt int
}

// reset prepares the chunks of one response.
func (e *events) reset(serial, word uint64) {
	e.chunk = append(e.chunk[:0], `data: {"id":"chatcmpl-`...)
	e.chunk = appendHex(e.chunk, serial)
	e.chunk = append(e.chunk, `","object":"chat.completion.chunk","created":1795258775,"model":"bench",`+
		`"choices":[{"index":0,"delta":{"content":" `...)
	e.chunk = appendHex(e.chunk, word)
	e.chunk = append(e.chunk, '-')
	e.indexAt = len(e.chunk)
	e.chunk = append(e.chunk, `00000000"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`+"\n\n"...)
}

// at returns the event with the given index. It is valid until the next call.
func (e *events) at(index int) []byte {
	putDigits(e.chunk[e.indexAt:][:eventIndexDigits], uint64(index))
	return e.chunk
}

// appendEnd writes what follows the last chunk: the finish, the usage that the client asked for, [DONE].
func appendEnd(dst []byte, serial, word uint64, chunks int) []byte {
	dst = append(dst, `data: {"id":"chatcmpl-`...)
	dst = appendHex(dst, serial)
	dst = append(dst, `","object":"chat.completion.chunk","created":1795258775,"model":"bench",`+
		`"choices":[{"index":0,"delta":{"content":""},"logprobs":null,"finish_reason":"stop","stop_reason":"`...)
	dst = appendHex(dst, word)
	dst = append(dst, `"}]}`+"\n\n"+`data: {"object":"chat.completion.chunk","choices":[],`+
		`"usage":{"prompt_tokens":512,`+
		`"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(chunks), 10)
	return append(dst, "}}\n\n"+doneEvent...)
}

const doneEvent = "data: [DONE]\n\n"
