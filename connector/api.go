// SPDX-License-Identifier: Apache-2.0

package connector

import "github.com/pdkit/pdkit/internal/request"

// API is a client API that a PD request can use.
type API uint8

// The client APIs.
const (
	APIUnknown     = API(request.Unknown)
	APIChat        = API(request.Chat)        // /v1/chat/completions
	APICompletions = API(request.Completions) // /v1/completions
	APIResponses   = API(request.Responses)   // /v1/responses
	APIMessages    = API(request.Messages)    // /v1/messages
	APIGenerate    = API(request.Generate)    // /inference/v1/generate: tokens in, tokens out
	APISGLang      = API(request.SGLang)      // /generate: SGLang's own
)

// APIOf returns the API of a request path, or [APIUnknown]. The match is exact.
func APIOf(path string) API { return API(request.APIOf(path)) }

// APIs returns all client APIs.
func APIs() []API {
	var all []API
	for _, a := range request.APIs() {
		all = append(all, API(a))
	}
	return all
}

// String returns chat, completions, responses, messages, generate or sglang.
func (a API) String() string { return request.API(a).Info().Name }

// Path returns the API's request path.
func (a API) Path() string { return request.API(a).Info().Path }

// PromptMember returns the top-level member that holds the prompt.
func (a API) PromptMember() string { return request.API(a).Info().Prompt }
