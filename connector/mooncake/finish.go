// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"encoding/json"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

// endedByLength checks that P's response says that P stopped because of the length. Each API says it in another member
// (recorded with vLLM 0.32.0: docs/protocols/mooncake.md, recordings 01 and 02; docs/protocols/nixl.md, recordings 22
// to 24).
func endedByLength(api connector.API, p *connector.PrefillResult) error {
	if err := p.Err(); err != nil {
		return handoff.NoTransfer("the response is not one JSON object")
	}
	var why, length string
	switch api {
	case connector.APIMessages:
		why, length = text(p, "stop_reason"), "max_tokens"
	case connector.APIResponses:
		var details struct {
			Reason string `json:"reason"`
		}
		if raw, ok := p.Field("incomplete_details"); ok && json.Unmarshal(raw, &details) == nil {
			why = details.Reason
		}
		length = "max_output_tokens"
	default:
		why, length = onlyReason(p), "length"
	}
	switch why {
	case length:
		return nil
	case "":
		return handoff.NoTransfer("the response does not say why it ended")
	}
	return handoff.NoTransfer("the prefill engine did not end by length, and so offers no KV")
}

// onlyReason is the finish_reason of the only choice; "" if there is no choice, or several. Every request runs through
// it, so it decodes nothing.
func onlyReason(p *connector.PrefillResult) (why string) {
	raw, ok := p.Field("choices")
	if !ok || !json.Valid(raw) {
		return ""
	}
	choices, n := gjson.ParseBytes(raw), 0
	choices.ForEach(func(_, choice gjson.Result) bool {
		n, why = n+1, choice.Get("finish_reason").Str
		return n < 2
	})
	if n != 1 || !choices.IsArray() {
		return ""
	}
	return why
}

func text(p *connector.PrefillResult, name string) string {
	var s string
	if raw, ok := p.Field(name); !ok || json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}
