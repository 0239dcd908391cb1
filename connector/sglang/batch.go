// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"bytes"
	"encoding/json"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// maxPrompts is the largest number of prompts in one request. Each costs a room, a host and a port on both legs.
const maxPrompts = 4096

// CheckRequest names what keeps two engines from serving a request, besides what [Connector.Traits] declares:
//
//   - echo with logprobs of completions: D has no log probabilities of the prompt, and there is no known way to put P's
//     before them;
//   - return_hidden_states, return_routed_experts and return_indexer_topk: those of the prompt stay on P;
//   - logprob_start_len with return_meta_info of another API than /generate, and return_flat_raw_top_logprobs with log
//     probabilities of the prompt: Rewrite does not know where P's would stand, or their form;
//   - session_params: a session's KV is on one engine;
//   - more prompts than 4096.
func (*Connector) CheckRequest(r *connector.ClientRequest) error {
	if member := unsupported(r); member != "" {
		return &connector.UnsupportedError{Member: member}
	}
	return nil
}

func unsupported(r *connector.ClientRequest) string {
	if r.API == connector.APICompletions && on(r, "echo") && asked(r, "logprobs") {
		return "echo"
	}
	for _, name := range [...]string{"return_hidden_states", "return_routed_experts", "return_indexer_topk"} {
		if on(r, name) {
			return name
		}
	}
	if flat := "return_flat_raw_top_logprobs"; wantsInput(r) && on(r, flat) {
		return flat
	}
	if r.API != connector.APISGLang && on(r, "return_meta_info") && fromPrompt(r) {
		return "logprob_start_len"
	}
	if asked(r, "session_params") {
		return "session_params"
	}
	if n, _, member := promptsOf(r); n > maxPrompts {
		return member
	}
	return ""
}

// promptsOf is the number of the request's prompts, and the member that holds them. list is true if the engines treat
// the request as a list, which may have one element.
func promptsOf(r *connector.ClientRequest) (n int, list bool, member string) {
	for _, name := range promptMembers(r.API) {
		if raw, ok := r.Field(name); ok {
			n, list = prompts(name, raw)
			return max(n, 1), list, name
		}
	}
	return 1, false, ""
}

func promptMembers(a connector.API) []string {
	switch a {
	case connector.APICompletions:
		return []string{"prompt"}
	case connector.APISGLang:
		return []string{"text", "input_ids", "input_embeds"}
	}
	return nil
}

// prompts counts the prompts in a member. An array of numbers is one prompt of token ids. An array of strings or arrays
// is a list of prompts. One prompt of embeddings is already an array of arrays.
func prompts(member string, raw json.RawMessage) (n int, many bool) {
	depth := 1
	if member == "input_embeds" {
		depth = 2
	}
	first := []byte(raw)
	for range depth {
		if len(first) == 0 || first[0] != '[' {
			return 1, false
		}
		first = bytes.TrimLeft(first[1:], " \t\r\n")
	}
	if len(first) == 0 || first[0] != '"' && first[0] != '[' && first[0] != '{' {
		return 1, false
	}
	gjson.ParseBytes(raw).ForEach(func(gjson.Result, gjson.Result) bool {
		n++
		return n <= maxPrompts
	})
	return n, true
}

// minimum reports whether the client asks for at least one token.
func minimum(r *connector.ClientRequest) bool {
	raw, ok := r.Field("min_tokens")
	if r.API == connector.APISGLang {
		raw, ok = inSampling(r, "min_new_tokens")
	}
	return ok && raw[0] != '-' && strings.ContainsAny(string(raw), "123456789")
}

func inSampling(r *connector.ClientRequest, name string) (json.RawMessage, bool) {
	holder, ok := r.Field("sampling_params")
	if !ok {
		return nil, false
	}
	d, err := jsonedit.Parse(holder)
	if err != nil {
		return nil, false
	}
	raw, ok := d.Get(name)
	return raw, ok && jsonedit.Kind(raw) != jsonedit.Null
}

// asked reports whether a top-level member is there and not false. on reports whether it is true, or a list with a true
// in it.
func asked(r *connector.ClientRequest, name string) bool {
	raw, ok := r.Field(name)
	return ok && string(raw) != "false"
}

func on(r *connector.ClientRequest, name string) bool {
	raw, ok := r.Field(name)
	if !ok {
		return false
	}
	if jsonedit.Kind(raw) == jsonedit.Array {
		return bytes.Contains(raw, []byte("true"))
	}
	return string(raw) != "false" && string(raw) != "0" && string(raw) != `""`
}
