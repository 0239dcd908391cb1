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
	ScopeRequest Scope = ""        // of the request: each engine would say the same
	ScopeModel   Scope = "model"   // of this engine and this model or adapter: others may have it
	ScopeEngine  Scope = "engine"  // of this engine: its keys, its APIs
	ScopeContext Scope = "context" // of this engine's context length, which another engine's may exceed
)

// Refusal is a kind of refusal that does not speak of the request alone: an engine's answer by which it is known, and
// what that means. Of the parts of an answer, those that are not zero must be as they are here.
type Refusal struct {
	Engine  string // whose answer it is, with the source
	Status  int
	Type    string // the error's members
	Param   string
	Code    string
	Message string // how the text begins
	Holds   string // what it holds besides
	Scope   Scope
}

// Refusals are the kinds of refusals that do not speak of the request alone. The first that fits counts.
var Refusals = []Refusal{
	{Engine: "vLLM 0.9 and newer (vllm/entrypoints/openai/serving_engine.py)", Status: http.StatusNotFound,
		Type: "NotFoundError", Param: "model", Scope: ScopeModel},
	{Engine: "vLLM, also in errors of the Messages API and before 0.9", Status: http.StatusNotFound,
		Message: "The model `", Scope: ScopeModel},
	{Engine: "SGLang 0.5 (python/sglang/srt/entrypoints/http_server.py), and whoever writes errors as OpenAI does",
		Status: http.StatusNotFound, Code: "model_not_found", Scope: ScopeModel},
	{Engine: "SGLang 0.5 (python/sglang/srt/lora/lora_registry.py)", Status: http.StatusBadRequest,
		Message: "The following requested LoRA adapters are not loaded", Scope: ScopeModel},
	{Engine: "SGLang 0.5 (python/sglang/srt/managers/tokenizer_manager.py)", Status: http.StatusBadRequest,
		Message: "Got LoRA adapter that has never been loaded", Scope: ScopeModel},
	{Engine: "SGLang 0.5, launched without --enable-lora", Status: http.StatusBadRequest,
		Message: "LoRA adapter '", Holds: "was requested, but LoRA is not enabled", Scope: ScopeModel},
	{Engine: "vLLM (vllm/renderers, parameter input_tokens)", Status: http.StatusBadRequest,
		Message: "This model's maximum context length is", Scope: ScopeContext},
	{Engine: "SGLang", Status: http.StatusBadRequest, Message: "The input (",
		Holds: "is longer than the model's context length", Scope: ScopeContext},
	{Engine: "all: another key, since a key is changed at one engine after the other", Status: http.StatusUnauthorized,
		Scope: ScopeEngine},
	{Engine: "all: an API that is switched off, or that the engine's model has not", Status: http.StatusNotImplemented,
		Scope: ScopeEngine},
	{Engine: "vLLM, SGLang: a path that this engine does not have", Status: http.StatusNotFound, Message: "Not Found",
		Scope: ScopeEngine},
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
