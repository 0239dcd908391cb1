// SPDX-License-Identifier: Apache-2.0

package verdict

import (
	"net/http"
	"strings"
)

// Scope says of what an engine's refusal speaks.
type Scope string

// The scopes of refusals.
const (
	ScopeRequest  Scope = ""         // of the request: each engine would say the same
	ScopeModel    Scope = "model"    // of this engine and this model or adapter: others may have it
	ScopeEngine   Scope = "engine"   // of this engine: its keys, its APIs
	ScopeContext  Scope = "context"  // of this engine's context length, which another engine's may exceed
	ScopeResponse Scope = "response" // of a response of the Responses API: the engine that made it has it no more
	ScopeBusy     Scope = "busy"     // of this moment: the engine has too much to do
	ScopeNone     Scope = "none"     // no refusal: the engine serves what others refuse
)

// OfEngine reports whether a refusal speaks of the engine alone, so that another engine may serve the request.
func (s Scope) OfEngine() bool { return s == ScopeModel || s == ScopeEngine || s == ScopeContext }

// Refusal is a kind of refusal that does not speak of the request alone: an engine's answer by which it is known, and
// what that means. Of the parts of an answer, those that are not zero must be as they are here.
type Refusal struct {
	Engine  string // whose answer it is
	Version string // which releases are known to write it
	Source  string // where it is written; it may say more
	Status  int
	Type    string // the error's members
	Param   string
	Code    string
	Message string // how the text begins
	Holds   string // what it holds besides
	Scope   Scope
}

// Where the engines write their refusals.
const (
	vllmModels   = "vllm/entrypoints/serve/engine/serving.py"
	vllmParams   = "vllm/renderers/params.py"
	sglangChecks = "python/sglang/srt/managers/tokenizer_manager.py"
	sglangAnswer = "python/sglang/srt/entrypoints/openai/serving_responses.py"
	trtServer    = "tensorrt_llm/serve/openai_server.py"
	trtVersions  = "1.2, 1.3.0rc"
	allRead      = "vLLM 0.32.0, SGLang 0.5.23"
	before       = "what stands before one engine"
)

// Refusals are the kinds of refusals that do not speak of the request alone. The first that fits counts.
var Refusals = []Refusal{
	{Engine: "vLLM", Version: "0.9 to 0.32.0", Source: vllmModels, Status: http.StatusNotFound,
		Type: "NotFoundError", Param: "model", Scope: ScopeModel},
	{Engine: "vLLM", Version: "to 0.8; Messages API to 0.32.0", Source: vllmModels,
		Status: http.StatusNotFound, Message: "The model `", Scope: ScopeModel},
	{Engine: "SGLang", Version: "0.5.23", Source: sglangAnswer, Status: http.StatusNotFound,
		Type: "invalid_request_error", Param: "model", Scope: ScopeModel},
	{Engine: "SGLang, and whoever writes errors as OpenAI does", Version: "0.5",
		Source: "python/sglang/srt/entrypoints/http_server.py",
		Status: http.StatusNotFound, Code: "model_not_found", Scope: ScopeModel},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: "python/sglang/srt/lora/lora_registry.py",
		Status: http.StatusBadRequest, Message: "The following requested LoRA adapters are not loaded",
		Scope: ScopeModel},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: sglangChecks, Status: http.StatusBadRequest,
		Message: "Got LoRA adapter that has never been loaded", Scope: ScopeModel},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: sglangChecks + ", launched without --enable-lora",
		Status: http.StatusBadRequest, Message: "LoRA adapter '", Holds: "was requested, but LoRA is not enabled",
		Scope: ScopeModel},
	{Engine: "SGLang", Version: "0.5.23", Source: "python/sglang/srt/entrypoints/openai/serving_base.py: chat and " +
		"completions take any `model` for the base model; an adapter is asked for as `BASE:ADAPTER` or by " +
		"`lora_path`, which the connector adds",
		Status: http.StatusOK, Scope: ScopeNone},
	{Engine: "TensorRT-LLM", Version: trtVersions, Source: trtServer + ": no API reads `model`; the response names " +
		"the engine's own, which is all that `/v1/models` lists; an adapter is asked for by `lora_request`",
		Status: http.StatusOK, Scope: ScopeNone},

	{Engine: "vLLM", Version: "to 0.32.0", Source: "vllm/renderers, parameter input_tokens",
		Status: http.StatusBadRequest, Message: "This model's maximum context length is", Scope: ScopeContext},
	{Engine: "vLLM", Version: "0.32.0", Source: vllmParams + ", `max_tokens` alone", Status: http.StatusBadRequest,
		Holds: "Please request fewer output tokens", Scope: ScopeContext},
	{Engine: "vLLM", Version: "0.32.0", Source: "vllm/entrypoints/serve/utils/api_utils.py",
		Status: http.StatusBadRequest, Message: "Input length (", Holds: "exceeds model's maximum context length",
		Scope: ScopeContext},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: sglangChecks, Status: http.StatusBadRequest,
		Message: "The input (", Holds: "is longer than the model's context length", Scope: ScopeContext},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: sglangChecks + ", prompt and `max_tokens` together",
		Status: http.StatusBadRequest, Message: "Requested token count exceeds the model's maximum context length",
		Scope: ScopeContext},
	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: "python/sglang/srt/managers/utils.py: the context or all " +
		"memory for KV, whichever is less", Status: http.StatusBadRequest,
		Message: "Input length (", Holds: "exceeds the maximum allowed length", Scope: ScopeContext},
	{Engine: "TensorRT-LLM", Version: trtVersions, Source: "tensorrt_llm/llmapi/llm.py: max_num_tokens or max_seq_len",
		Status: http.StatusBadRequest, Message: "The sum of prompt length (", Holds: "should not exceed",
		Scope: ScopeContext},

	{Engine: "vLLM, SGLang", Version: allRead, Source: "vllm/entrypoints/serve/middleware/authenticate.py, " +
		"python/sglang/srt/utils/auth.py: `--api-key`, which is changed at one engine after the other",
		Status: http.StatusUnauthorized, Scope: ScopeEngine},
	{Engine: "vLLM, SGLang", Version: allRead, Source: "vllm/entrypoints/serve/exception_handling/error_response.py, " +
		"python/sglang/srt/entrypoints/openai/serving_base.py: an API that is switched off, or that the engine's " +
		"model has not", Status: http.StatusNotImplemented, Scope: ScopeEngine},
	{Engine: before, Version: "-", Source: "RFC 9110, section 15.5.14; none of the engines writes it, but nginx, for " +
		"one, by `client_max_body_size`", Status: http.StatusRequestEntityTooLarge, Scope: ScopeEngine},
	{Engine: "vLLM, SGLang, TensorRT-LLM", Version: "all", Source: "starlette/routing.py: a path that this engine " +
		"does not have", Status: http.StatusNotFound, Message: "Not Found", Scope: ScopeEngine},

	{Engine: "vLLM, SGLang", Version: allRead, Source: "vllm/entrypoints/openai/responses/serving.py, " + sglangAnswer,
		Status: http.StatusNotFound, Param: "response_id", Scope: ScopeResponse},
	{Engine: "TensorRT-LLM", Version: trtVersions, Source: trtServer, Status: http.StatusNotFound,
		Type: "InvalidRequestError", Message: "Response with id '", Scope: ScopeResponse},

	{Engine: "SGLang", Version: "0.5 to 0.5.23", Source: "python/sglang/srt/managers/scheduler.py: its queue is " +
		"full, or a request waited in it too long", Status: http.StatusServiceUnavailable, Scope: ScopeBusy},
	{Engine: "vLLM", Version: "0.32.0", Source: "vllm/entrypoints/serve/elastic_ep/middleware.py: its ranks are " +
		"being scaled", Status: http.StatusServiceUnavailable, Message: "The model is currently scaling",
		Scope: ScopeBusy},
	{Engine: before, Version: "-", Source: "RFC 9110, section 15.6.4; while weights load, the engines themselves " +
		"have no listener, and the connection is refused", Status: http.StatusServiceUnavailable, Scope: ScopeBusy},
	{Engine: before, Version: "-", Source: "RFC 6585, section 4; none of the engines writes it",
		Status: http.StatusTooManyRequests, Scope: ScopeBusy},
}

// ScopeOf says of what a refusal speaks. said is what the engine's response says, nil if that cannot be read.
func ScopeOf(status int, said *Fault) Scope {
	if said == nil {
		said = &Fault{}
	}
	is := func(v any, want string) bool { return want == "" || v == want }
	for _, r := range Refusals {
		if status == r.Status && is(said.Type, r.Type) && is(said.Param, r.Param) && is(said.Code, r.Code) &&
			strings.HasPrefix(said.Message, r.Message) && strings.Contains(said.Message, r.Holds) {
			return r.Scope
		}
	}
	return ScopeRequest
}
