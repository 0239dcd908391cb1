// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/experts"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/pdflow/internal/stream"
)

// This file has the members of D's response of which only P knows the value, because P has computed the prompt, and
// which engines write without being asked by the request (docs/protocols/prompt-members.md). P's are put into D's
// response. Where that cannot be done, the request counts as one that two engines cannot carry.

const expertsMember = "routed_experts"

// expertsAt finds that member in a response.
var expertsAt = sse.MemberAt(expertsMember)

// mayHaveExperts reports whether a response of D's may have routed_experts: whole responses of vLLM's, and the streams
// of one API.
func (a *attempt) mayHaveExperts(sse bool) bool {
	if !a.twoLegs() || a.f.traits.RawPrefill || a.x.rest != nil {
		return false
	}
	switch a.s.API {
	case connector.APIChat, connector.APICompletions:
		return !sse
	}
	return a.s.API == connector.APIGenerate
}

// foreign is what a response of D's must not have, because P's has none, or D was asked without P. It is nil if the
// response is searched anyway.
func (a *attempt) foreign(c *stream.Config, status int) *sse.Member {
	if c.Events || a.mergesMembers(false) || status != http.StatusOK || !a.mayHaveExperts(false) {
		return nil
	}
	return expertsAt
}

// mergesMembers reports whether D's response, or its events, must be searched for members that P's has. A whole
// response is held back until it has been read. So it is searched in this way only if P has told such a member, or may
// tell it yet, or if D has told one that P had not.
func (a *attempt) mergesMembers(sse bool) bool {
	if !a.twoLegs() || a.f.traits.RawPrefill || a.deciding() {
		return false
	}
	p := a.p.Load()
	if a.mayHaveExperts(sse) && (p == nil || sse || hasExperts(p) || a.f.foreignSeen.Load()) {
		return true
	}
	return a.addsTimes(p)
}

func hasExperts(p *connector.PrefillResult) bool {
	raw, _ := p.Field("choices")
	return expertsAt.In(raw)
}

// withPrefillsMembers puts P's members into what next returns.
func (a *attempt) withPrefillsMembers(next func([]byte) ([]byte, error)) func([]byte) ([]byte, error) {
	return func(data []byte) (_ []byte, err error) {
		if next != nil {
			if data, err = next(data); err != nil || data == nil {
				return data, err
			}
		}
		if data, err = a.withExperts(data); err != nil {
			return nil, err
		}
		return a.withTimes(data), nil
	}
}

// withExperts puts P's rows of the prompt into the routed_experts of each choice.
func (a *attempt) withExperts(data []byte) ([]byte, error) {
	if !bytes.Contains(data, []byte(`"`+expertsMember+`"`)) {
		return data, nil
	}
	choices := gjson.GetBytes(data, "choices.#."+expertsMember).Array()
	if !slices.ContainsFunc(choices, func(v gjson.Result) bool { return v.Type == gjson.String }) {
		return data, nil
	}
	raw, _ := a.awaitPrefill().Field("choices")
	ps := gjson.GetBytes(raw, "0."+expertsMember).Str
	output := 0
	if counts := gjson.GetBytes(data, "usage.completion_tokens"); counts.Type == gjson.Number && len(choices) == 1 {
		output = int(counts.Int()) - 1
	}
	for i := range gjson.GetBytes(data, "choices").Array() {
		v := gjson.GetBytes(data, "choices."+strconv.Itoa(i)+"."+expertsMember)
		if v.Type != gjson.String {
			continue
		}
		merged, err := experts.Merge(ps, v.Str, output)
		if err != nil {
			return nil, a.cannotCarry(err)
		}
		data = slices.Concat(data[:v.Index+1], []byte(merged), data[v.Index+len(v.Raw)-1:])
	}
	return data, nil
}

var errForeign = errors.New("pdflow: decode has not computed the prompt, and prefill tells nothing of it")

// cannotCarry is the error of a request that, as D's response shows, two engines cannot carry.
func (a *attempt) cannotCarry(err error) *Error {
	a.f.foreignSeen.Store(true)
	return &Error{Code: CodeUnsupported, Connector: a.f.name, Endpoint: a.s.Decode.ID, Param: expertsMember,
		Message: unsupportedMessage, Err: err}
}

// timeMembers are those of vLLM's metrics of a request (--enable-per-request-metrics) whose time passes on both engines
// if D's leg follows P's. The others are of decode.
var timeMembers = [...]string{"metrics.time_to_first_token_ms", "metrics.queue_time_ms"}

// addsTimes reports whether P's times are to be added to D's.
func (a *attempt) addsTimes(p *connector.PrefillResult) bool {
	if p == nil || a.parallel.Load() {
		return false
	}
	_, ok := p.Field("metrics")
	return ok
}

// withTimes adds P's times to D's.
func (a *attempt) withTimes(data []byte) []byte {
	p := a.p.Load()
	if !a.addsTimes(p) || !bytes.Contains(data, []byte(`"metrics"`)) {
		return data
	}
	for _, path := range timeMembers {
		ps := gjson.GetBytes(p.Body, path)
		for _, holder := range usageHolders {
			ds := gjson.GetBytes(data, holder+path)
			if ps.Type == gjson.Number && ds.Type == gjson.Number && ds.Index > 0 {
				sum := strconv.AppendFloat(nil, ps.Num+ds.Num, 'f', -1, 64)
				data = slices.Concat(data[:ds.Index], sum, data[ds.Index+len(ds.Raw):])
			}
		}
	}
	return data
}
