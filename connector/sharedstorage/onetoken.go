// SPDX-License-Identifier: Apache-2.0

package sharedstorage

import (
	"strconv"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// CheckRequest refuses requests with a prompt of one token. For such a prompt the engine's lookup calculates with a
// negative length, and the engine's process ends, with all its requests (docs/protocols/sharedstorage.md, recording 11:
// IndexError, then connection refused). CheckRequest finds
//
//   - a prompt, or one of several, of a single token id (/v1/completions, /inference/v1/generate);
//   - truncate_prompt_tokens below 2, and a truncation that depends on the limit of tokens, which can leave one token
//     of any prompt.
//
// It cannot find a text of one token, since that needs the engine's tokenizer. The error is a
// *[connector.RequestError].
func (*Connector) CheckRequest(r *connector.ClientRequest) error {
	switch r.API {
	case connector.APICompletions, connector.APIGenerate:
		member := r.API.PromptMember()
		if raw, ok := r.Field(member); ok && jsonedit.Kind(raw) == jsonedit.Array && hasOneToken(raw, true) {
			return deadly(member, "must have more than one token")
		}
	case connector.APIResponses:
		// Null does not count as absent here: vLLM compares the value with "disabled".
		if raw, ok := contract.NewLeg(r).Current("truncation"); ok && string(raw) != `"disabled"` {
			return deadly("truncation", "must be disabled")
		}
	}
	if raw, ok := r.Field("truncate_prompt_tokens"); ok {
		if n, err := strconv.ParseFloat(string(raw), 64); err != nil || n < 2 {
			return deadly("truncate_prompt_tokens", "must be 2 or more")
		}
	}
	return nil
}

func deadly(member, what string) error {
	return &connector.RequestError{Param: member,
		Message: what + ": the engines behind this model cannot take a prompt of one token"}
}

// hasOneToken reports whether an array is a prompt of one token id or, as a list, holds such a prompt. It stops at a
// prompt's second id, so a long prompt costs nothing, and it looks no deeper than prompts of a list: a body of brackets
// alone would cost a pass for each.
func hasOneToken(raw []byte, list bool) bool {
	n := 0
	for item := range jsonedit.Items(raw) {
		switch jsonedit.Kind(item) {
		case jsonedit.Array:
			if list && hasOneToken(item, false) {
				return true
			}
		case jsonedit.String, jsonedit.Object:
		default:
			if n++; n == 2 {
				return false
			}
		}
	}
	return n == 1
}
