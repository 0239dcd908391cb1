// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"cmp"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow/internal/estimate"
	"github.com/pdkit/pdkit/pdflow/kvindex"
)

const (
	bytesPerToken = 4
	limitUsual    = 256     // tokens of a response, if the request has no limit
	limitMost     = 32_768  // a limit of a million is seldom reached, and must not make an engine look full
	promptMost    = 1 << 20 // tokens
	mayHaveMedia  = 4096    // tokens, by bytes: a smaller body is not looked into for pictures
)

// costOf estimates how many tokens a request costs on each leg: the prompt on prefill, prompt and response on decode.
func costOf(r *connector.ClientRequest) [2]int64 {
	if r == nil {
		return [2]int64{1, limitUsual}
	}
	tokens := len(r.Body())/bytesPerToken + 1
	if tokens > mayHaveMedia {
		tokens = estimate.Body(r)
	}
	prompt := int64(min(tokens, promptMost))
	return [2]int64{prompt, prompt + cmp.Or(min(estimate.Limit(r), limitMost), limitUsual)}
}

// promptMembers are the members of a body that chat templates and tokenizers put before the messages, in this order.
// Other members may stand before or between them in the body, and differ from request to request.
var promptMembers = [...]string{"tools", "system", "instructions"}

// prompt is the beginning of a request's prompt as a chain of hashes. Each hash covers a block and all blocks before
// it.
type prompt struct {
	chain  []uint64
	owners [][ownersMost]uint32 // of the blocks that the policy knows

	query kvindex.Query // of KV
	hits  []kvindex.Hit
}

// blocksMost bounds the work for one prompt. With blocks of 256 bytes, only the first 32 KB of a prompt count.
const blocksMost = 128

// readPrompt computes the hashes of the request's prompt.
func (p *prompt) readPrompt(seed uint64, block int, r *connector.ClientRequest) {
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

// blocks adds the whole blocks of raw to the chain. It leaves out a last part that is no whole block, since another
// request may continue it.
func (p *prompt) blocks(h uint64, block int, raw []byte) uint64 {
	for len(raw) >= block && len(p.chain) < blocksMost {
		h = hashBytes(h, raw[:block])
		p.chain = append(p.chain, h)
		raw = raw[block:]
	}
	return h
}
