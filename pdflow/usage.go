// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/verdict"
)

// count reads one of an API's usage paths from the object that verdict.Usage found, 0 without it.
func count(object, path string) int64 {
	_, inner, _ := strings.Cut(path, ".")
	return max(gjson.Get(object, inner).Int(), 0)
}

// prefillUsage notes what P says of the prompt. P's response is small, and it is known to be one JSON object.
func (a *attempt) prefillUsage(p *connector.PrefillResult) {
	paths := contract.API(a.s.API).Usage
	member, _, _ := strings.Cut(paths.Prompt, ".")
	raw, _ := p.Field(member)
	object := string(raw)
	a.out.KVTokens, a.out.Usage.Cached = count(object, paths.Prompt), count(object, paths.Cached)
}

// decodeUsage notes what D says at the end of its response.
func (a *attempt) decodeUsage(end []byte) {
	paths := contract.API(a.s.API).Usage
	member, _, _ := strings.Cut(paths.Completion, ".")
	object := verdict.Usage(end, member)
	if object == "" {
		return
	}
	u := &a.out.Usage
	u.Input, u.Output = count(object, paths.Prompt), count(object, paths.Completion)
	switch cached := count(object, paths.Cached); {
	case !a.twoLegs(): // one engine: what it reused is its cache's
		u.Cached = cached
	case a.f.traits.Serving.ReusedInUsage:
		u.Reused = cached
	}
}

var jsonTrue = json.RawMessage("true")

// asksUsage reports whether the flow asks D for the counts of a stream whose client did not.
func (a *attempt) asksUsage() bool {
	req := a.s.Request
	if !a.f.opts.telemetry.Usage || !req.Stream || req.API != connector.APIChat && req.API != connector.APICompletions {
		return false
	}
	raw, ok := req.Field("stream_options")
	return !ok || !gjson.GetBytes(raw, "include_usage").Bool()
}

// withoutUsage takes out the chunk that only the flow asked for: the one with counts and without choices.
func withoutUsage(next func([]byte) ([]byte, error), note func(event []byte)) func([]byte) ([]byte, error) {
	return func(data []byte) ([]byte, error) {
		if bytes.Contains(data, []byte(`"usage"`)) {
			if choices := gjson.GetBytes(data, "choices"); choices.IsArray() && len(choices.Array()) == 0 &&
				gjson.GetBytes(data, "usage").IsObject() {
				note(data)
				return nil, nil
			}
		}
		if next != nil {
			return next(data)
		}
		return data, nil
	}
}
