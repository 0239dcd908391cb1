// SPDX-License-Identifier: Apache-2.0

package check

import (
	"cmp"
	"errors"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

// CheckRequest returns what a flow with the connector finds against a request before it picks engines: the connector's
// own *[connector.RequestError], with which the flow refuses the request whatever its policy, or what [Rules.Declared]
// finds, or the connector's own *[connector.UnsupportedError].
func (r *Rules) CheckRequest(request *connector.ClientRequest) error {
	unsupported := r.Declared(request)
	if _, also := errors.AsType[*connector.UnsupportedError](unsupported); unsupported != nil && !also {
		return unsupported
	}
	if r.requests != nil {
		err := r.requests.CheckRequest(request)
		if _, also := errors.AsType[*connector.UnsupportedError](err); err != nil && !also {
			return err
		}
		return cmp.Or(unsupported, err)
	}
	return unsupported
}

// Carries reports whether the protocol supports a client API.
func (r *Rules) Carries(a connector.API) bool {
	t := &r.Traits
	if t.APIs == nil {
		return a != connector.APIUnknown && a != connector.APISGLang
	}
	return slices.Contains(t.APIs, a)
}

// Declared returns a *[connector.UnsupportedError] if, by what the connector declares, two engines cannot serve a
// request together. The flow's policy then decides: one engine serves the whole request, or the flow refuses it.
// Reasons are that the protocol does not support the API, and these members:
//
//   - prompt, prompt_embeds, text, input_ids: several prompts in one body; P's response has only the handoff of the
//     first;
//   - prompt_logprobs, or echo with logprobs, or echo alone in a chat (which vLLM treats as prompt_logprobs): D
//     computes the prompt itself, and nobody reads the handoff; prompt_logprob_token_ids and skip_reading_prefix_cache
//     of /inference/v1/generate do the same (vllm/sampling_params.py);
//   - truncate_prompt_tokens below 0, or truncation other than disabled of /v1/responses: the engine cuts the prompt to
//     what the limit of tokens leaves, which differs between the legs, and D answers wrongly to P's prompt
//     (vllm/renderers/params.py);
//   - use_beam_search: vLLM loses the transfer members on both legs;
//   - background, previous_response_id, conversation of /v1/responses: only one engine has the response's state;
//   - n, best_of above 1 if the handoff is not for MultiUse: the first reader frees the blocks.
//
// A member in Traits.Carries is no reason. The error is a *[connector.RequestError] if D would refuse the request
// because of a member that P's leg loses or changes, or because its prompt is empty: the flow then refuses it, whatever
// its policy. With RefusalHolds it is one, too, if the request has no prompt.
func (r *Rules) Declared(request *connector.ClientRequest) error {
	t, in := &r.Traits, contract.Request(request)
	if !r.Carries(request.API) {
		if len(t.Members) > 0 {
			return &connector.UnsupportedError{Member: t.Members[0]}
		}
		return &connector.UnsupportedError{Member: request.API.PromptMember()}
	}
	if err := in.CheckMembers(t.SGLang, t.Ending.EndsByLength); err != nil {
		return contract.Refusal(err)
	}
	if member := in.Uncarried(!t.Handoff.MultiUse, t.Carries); member != "" {
		return &connector.UnsupportedError{Member: member}
	}
	if member := in.LacksPrompt(); t.Ending.RefusalHolds && member != "" {
		return &connector.RequestError{Param: member, Message: "must be given, and not be empty"}
	}
	return nil
}
