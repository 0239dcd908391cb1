// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/json"
	"strconv"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// inputLists are the members of meta_info that have an element for each token of the prompt. P has computed them; D's
// own are empty. SGLang's router puts P's elements before D's in the first list. The other lists have the same form,
// and exist only with top_logprobs_num and token_ids_logprob.
var inputLists = [...]string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}

// Rewrite puts P's log probabilities of the prompt before D's, in the whole response or in each event. It does so if
// the client asks for them with return_logprob and a logprob_start_len of 0 or more. Without logprob_start_len SGLang
// returns none for the prompt, and nothing is parsed.
func (*Connector) Rewrite(s *connector.Session, p func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	if !wantsInput(s.Request) {
		return nil
	}
	m := &merger{p: p}
	return m.merge
}

// wantsInput reports whether the client asks for log probabilities of the prompt. Both members may be lists with one
// item for each prompt.
func wantsInput(r *connector.ClientRequest) bool {
	return r.API == connector.APISGLang && on(r, "return_logprob") && fromPrompt(r)
}

// fromPrompt reports whether log probabilities shall begin in the prompt.
func fromPrompt(r *connector.ClientRequest) bool {
	raw, ok := r.Field("logprob_start_len")
	if !ok {
		return false
	}
	if jsonedit.Kind(raw) != jsonedit.Array {
		return raw[0] != '-'
	}
	from := false
	gjson.ParseBytes(raw).ForEach(func(_, v gjson.Result) bool {
		from = v.Type == gjson.Number && v.Num >= 0
		return !from
	})
	return from
}

// merger merges P's lists into D's response. Its calls come one after another.
type merger struct {
	p    func() *connector.PrefillResult
	read bool
	meta []gjson.Result // P's meta_info, one for each sequence
}

func (m *merger) merge(data []byte) ([]byte, error) {
	if !m.read {
		m.read = true
		m.meta = metaOf(m.p())
	}
	if len(m.meta) == 0 || !gjson.ValidBytes(data) {
		return data, nil
	}
	whole := gjson.ParseBytes(data)
	if !whole.IsArray() {
		return m.one(data, int(whole.Get("index").Int())), nil
	}
	out, i := []byte{'['}, 0
	whole.ForEach(func(_, response gjson.Result) bool {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, m.one([]byte(response.Raw), i)...)
		i++
		return true
	})
	return append(out, ']'), nil
}

// metaOf reads P's response: one object, or a list of objects for several sequences. It may be missing.
func metaOf(p *connector.PrefillResult) []gjson.Result {
	if p == nil || !json.Valid(p.Body) {
		return nil
	}
	whole := gjson.ParseBytes(p.Body)
	if !whole.IsArray() {
		return []gjson.Result{whole.Get("meta_info")}
	}
	var list []gjson.Result
	for _, response := range whole.Array() {
		list = append(list, response.Get("meta_info"))
	}
	return list
}

// one merges the lists of one sequence. All other bytes stay as they are, numbers included.
func (m *merger) one(response []byte, i int) []byte {
	if i < 0 || i >= len(m.meta) {
		return response
	}
	for _, name := range inputLists {
		theirs := m.meta[i].Get(name)
		if !theirs.IsArray() || len(theirs.Raw) <= len("[]") || theirs.Get("#").Int() == 0 {
			continue
		}
		ours := gjson.GetBytes(response, "meta_info."+name)
		if ours.Index == 0 || !ours.IsArray() && ours.Type != gjson.Null {
			continue
		}
		response = splice(response, ours, theirs.Raw)
	}
	return response
}

// splice inserts the items of list before those of value, which is a list or null in response.
func splice(response []byte, value gjson.Result, list string) []byte {
	end := value.Index + len(value.Raw)
	out := make([]byte, 0, len(response)+len(list)+1)
	out = append(out, response[:value.Index]...)
	out = append(out, list...)
	if value.IsArray() && value.Get("#").Int() > 0 {
		out[len(out)-1] = ','
		out = append(out, value.Raw[1:]...)
	}
	return append(out, response[end:]...)
}

// CheckPrefill refuses a response in which P says that it gave up. P then transfers nothing, and D would wait for 300
// s. A response of /v1/messages does not say it: its stop reason is then end_turn.
func (*Connector) CheckPrefill(s *connector.Session, p *connector.PrefillResult) error {
	if !json.Valid(p.Body) {
		return handoff.NoTransfer("the response is not well-formed JSON")
	}
	whole := gjson.ParseBytes(p.Body)
	if s.API == connector.APISGLang {
		responses := []gjson.Result{whole}
		if whole.IsArray() {
			responses = whole.Array()
		}
		for i, response := range responses {
			if response.Get("meta_info.finish_reason.type").Str == "abort" {
				return handoff.NoTransfer("the prefill engine aborted sequence %s", strconv.Itoa(i))
			}
		}
		return nil
	}
	if whole.Get("object").Str == "error" || whole.Get("status").Str == "failed" {
		return handoff.NoTransfer("the prefill engine answered with an error")
	}
	for i, choice := range whole.Get("choices").Array() {
		if choice.Get("finish_reason").Str == "abort" {
			return handoff.NoTransfer("the prefill engine aborted choice %s", strconv.Itoa(i))
		}
	}
	return nil
}
