// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"bytes"
	"math"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/internal/estimate"
)

// attrMaxModelLen is the attribute of an endpoint with the length of its context, in tokens. discovery/inspect adds it.
const attrMaxModelLen = "maxModelLen"

// contextOf returns the length of an engine's context; 0 if it is not known.
func contextOf(e *discovery.Endpoint) int {
	n, _ := attr.Int(*e, attrMaxModelLen, 0, 1, math.MaxInt) // nonsense says nothing
	return n
}

// contexts are the lengths of the contexts of all engines of one leg. In nearly all fleets they are the same, and then
// no request is looked at.
type contexts struct {
	shortest, longest int
	unknown           bool // those of some engines are not known, and may be any
}

func (c *contexts) add(n int) {
	switch {
	case n == 0:
		c.unknown = true
	case c.longest == 0:
		c.shortest, c.longest = n, n
	default:
		c.shortest, c.longest = min(c.shortest, n), max(c.longest, n)
	}
}

func (c *contexts) differ() bool { return c.longest > 0 && (c.shortest < c.longest || c.unknown) }

// wants returns n if some engines have room for so many tokens and others have not, else 0.
func (c *contexts) wants(n int64) int64 {
	if !c.differ() || n <= int64(c.shortest) || n > int64(c.longest) && !c.unknown {
		return 0
	}
	return n
}

// room returns how many tokens an engine's context must hold for each leg, for all that is known without a tokenizer: 0
// if any does. An engine refuses a limit of tokens that is longer than its context, whatever the prompt's length. P's
// leg has a limit of its own.
func (p *part) room(in *pdflow.PickInput) (room [2]int64) {
	c := &p.contexts
	if in.TooShort == 0 && (in.Request == nil || !c[prefillLeg].differ() && !c[decodeLeg].differ()) {
		return room
	}
	prompt, limit := int64(0), int64(0)
	if in.TooShort > 0 {
		prompt = int64(in.TooShort) + 1
	}
	if in.Request != nil {
		prompt, limit = max(prompt, tokensIn(in.Request)), estimate.Limit(in.Request)
	}
	return [2]int64{c[prefillLeg].wants(prompt), c[decodeLeg].wants(max(prompt, limit))}
}

// tokensIn counts the tokens of a prompt that the request has as token ids; 0 if it has text.
func tokensIn(r *connector.ClientRequest) int64 {
	for _, name := range [...]string{"prompt", "token_ids", "input_ids"} {
		raw, ok := r.Field(name)
		if !ok || raw[0] != '[' {
			continue
		}
		if first := bytes.TrimLeft(raw[1:], " \t\r\n"); first[0] >= '0' && first[0] <= '9' {
			return int64(bytes.Count(raw, []byte(","))) + 1
		}
	}
	return 0
}
