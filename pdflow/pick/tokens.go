// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

const (
	bytesPerToken = 4
	limitUsual    = 256     // tokens of an answer without a limit
	limitMost     = 32_768  // a limit of a million is seldom reached, and must not make an engine look full
	promptMost    = 1 << 20 // tokens
)

// costOf estimates the tokens that a request puts on each leg: the prompt on prefill, prompt and answer on decode.
func costOf(r *connector.Request) [2]int64 {
	if r == nil {
		return [2]int64{1, limitUsual}
	}
	prompt := int64(min(len(r.Body())/bytesPerToken+1, promptMost))
	return [2]int64{prompt, prompt + limitOf(r)}
}

// limitOf returns the request's limit of tokens, wherever its API keeps it.
func limitOf(r *connector.Request) int64 {
	for _, name := range [...]string{"max_completion_tokens", "max_tokens", "max_output_tokens"} {
		if raw, ok := r.Field(name); ok {
			n, ok := jsonedit.Int(raw)
			if !ok {
				n = gjson.ParseBytes(raw).Int() // 16.0 is a limit too
			}
			if n > 0 {
				return min(n, limitMost)
			}
		}
	}
	if raw, ok := r.Field("sampling_params"); ok {
		for _, name := range [...]string{"max_tokens", "max_new_tokens"} {
			if n := gjson.GetBytes(raw, name).Int(); n > 0 {
				return min(n, limitMost)
			}
		}
	}
	return limitUsual
}

// promptMembers are the members of a body that chat templates and tokenizers read, in the order in which their text
// begins the prompt. Other members may stand before or between them and differ from request to request.
var promptMembers = [...]string{"tools", "system", "instructions"}

// prompt is the beginning of a request's prompt as hashes: one for each block, and of all blocks before it.
type prompt struct {
	chain  []uint64
	owners [][ownersMost]uint32 // of the blocks that are known
}

// blocksMost bounds the work for one prompt: with blocks of 256 bytes, what is more than 32 KB into a prompt decides
// nothing.
const blocksMost = 128

// readPrompt makes the chain of the request's prompt.
func (p *prompt) readPrompt(seed uint64, block int, r *connector.Request) {
	p.chain = p.chain[:0]
	if r == nil {
		return
	}
	h := hashBytes(seed, []byte(r.Model))
	for _, name := range promptMembers {
		if raw, ok := r.Field(name); ok {
			h = p.blocks(h, block, raw)
		}
	}
	if name := r.API.PromptMember(); name != "" {
		if raw, ok := r.Field(name); ok {
			p.blocks(h, block, raw)
		}
		return
	}
	p.blocks(h, block, r.Body())
}

// blocks continues the chain with the whole blocks of raw: the last part may go on otherwise in another request.
func (p *prompt) blocks(h uint64, block int, raw []byte) uint64 {
	for len(raw) >= block && len(p.chain) < blocksMost {
		h = hashBytes(h, raw[:block])
		p.chain = append(p.chain, h)
		raw = raw[block:]
	}
	return h
}
