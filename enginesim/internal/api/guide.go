// SPDX-License-Identifier: Apache-2.0

package api

import (
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// A guide holds a generation to JSON of a schema, as the grammars of vLLM's structured outputs do. What the schema
// leaves open follows from the token that the model would have made, and so from the KV.
type guide struct {
	todo  []slot
	seeds uint64 // spreads the model's tokens, of which there are only 95
}

// slot is what comes next: one token of some, or one of several texts.
type slot struct {
	tokens []int32
	texts  []string
}

const (
	letters   = "abcdefghijklmnopqrstuvwxyz"
	digits    = "0123456789"
	textSize  = 8  // letters of a string
	itemsMost = 16 // of an array
)

// next gives the token in place of the one that the model would make, and [core.TokenEOS] at the end.
func (g *guide) next(free int32) int32 {
	g.seeds = core.Mix(g.seeds, uint64(uint32(free)))
	for len(g.todo) > 0 {
		s := g.todo[0]
		g.todo = g.todo[1:]
		if s.texts == nil {
			return s.tokens[g.seeds%uint64(len(s.tokens))]
		}
		g.todo = append(said(s.texts[g.seeds%uint64(len(s.texts))]), g.todo...)
	}
	return core.TokenEOS
}

// said is a text without any choice.
func said(text string) []slot {
	slots := make([]slot, 0, len(text))
	for _, t := range core.Tokenise(text) {
		slots = append(slots, slot{tokens: []int32{t}})
	}
	return slots
}

func oneOf(class string) slot { return slot{tokens: core.Tokenise(class)} }

// schema turns a JSON schema into slots. It knows $ref into the schema itself, const, enum, anyOf and oneOf (the
// first), type (the first), properties (all of them), items (minItems, at least one). Other keywords are ignored, and
// what has no type is a string.
type schema struct {
	root gjson.Result
	left int // how many parts it may still have; what is beyond is null
}

// guideOf gives the slots of a document of a JSON schema; without one, of an object.
func guideOf(text string) []slot {
	s := &schema{root: gjson.Parse(text), left: 200}
	if !s.root.IsObject() {
		s.root = gjson.Parse(`{"type":"object"}`)
	}
	return s.slots(s.root)
}

func (s *schema) slots(part gjson.Result) []slot {
	if s.left--; s.left < 0 {
		return said("null")
	}
	if ref := part.Get(`$ref`).String(); strings.HasPrefix(ref, "#/") {
		return s.slots(s.root.Get(strings.ReplaceAll(ref[2:], "/", ".")))
	}
	for _, name := range []string{"anyOf", "oneOf"} {
		if first := part.Get(name + ".0"); first.Exists() {
			return s.slots(first)
		}
	}
	if c := part.Get("const"); c.Exists() {
		return said(c.Raw)
	}
	var choices []string
	for _, c := range part.Get("enum").Array() {
		choices = append(choices, c.Raw)
	}
	if choices != nil {
		return []slot{{texts: choices}}
	}
	kind := part.Get("type")
	if kind.IsArray() {
		kind = kind.Get("0")
	}
	switch kind.String() {
	case "object":
		return s.object(part)
	case "array":
		slots := append(said("["), s.slots(part.Get("items"))...)
		for range min(part.Get("minItems").Int()-1, itemsMost) {
			slots = append(append(slots, said(", ")...), s.slots(part.Get("items"))...)
		}
		return append(slots, said("]")...)
	case "integer":
		return []slot{oneOf(digits[1:]), oneOf(digits)}
	case "number":
		return append(append([]slot{oneOf(digits)}, said(".")...), oneOf(digits[1:]))
	case "boolean":
		return []slot{{texts: []string{"true", "false"}}}
	case "null":
		return said("null")
	}
	return append(append(said(`"`), slices.Repeat([]slot{oneOf(letters)}, textSize)...), said(`"`)...)
}

func (s *schema) object(part gjson.Result) []slot {
	slots, between := said("{"), ""
	part.Get("properties").ForEach(func(name, property gjson.Result) bool {
		slots = append(slots, said(between+name.Raw+": ")...)
		slots = append(slots, s.slots(property)...)
		between = ", "
		return true
	})
	return append(slots, said("}")...)
}
