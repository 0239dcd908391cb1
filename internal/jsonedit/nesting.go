// SPDX-License-Identifier: Apache-2.0

package jsonedit

// MaxDepth is how deep objects and arrays may stand in each other, the outermost counted: the limit of encoding/json,
// past which other readers recurse until the process dies.
const MaxDepth = 10_000

const (
	msgUnterminated = "string does not end"
	msgTooDeep      = "nested deeper than 10000"
	msgBracket      = "closing bracket does not match"
	msgUnclosed     = "object or array does not end"
)

// nesting remembers which sort each open bracket is of, one bit each. The innermost 64 are in a register; the rest
// spills, which real bodies never need.
type nesting struct {
	depth int
	top   uint64
	below []uint64
}

func (n *nesting) push(object uint64) {
	if n.depth&63 == 0 && n.depth > 0 {
		n.below = append(n.below, n.top)
	}
	n.top = n.top<<1 | object
	n.depth++
}

func (n *nesting) pop() (object uint64) {
	object = n.top & 1
	n.top >>= 1
	n.depth--
	if n.depth&63 == 0 && n.depth > 0 {
		n.top = n.below[len(n.below)-1]
		n.below = n.below[:len(n.below)-1]
	}
	return object
}

// skipContainer returns the place after the object or array that opens at b[i], itself inside of outer containers.
// Brackets must match in number and sort; what stands between them is not judged.
func skipContainer(b []byte, i, outer int) (int, error) {
	var open nesting
	for {
		i = nextStructure(b, i)
		if i == len(b) {
			return i, syntax(i, msgUnclosed)
		}
		switch c := b[i]; c {
		case '"':
			end := closingQuote(b, i)
			if end < 0 {
				return i, syntax(len(b), msgUnterminated)
			}
			i = end
		case '{', '[':
			if open.depth+outer == MaxDepth {
				return i, syntax(i, msgTooDeep)
			}
			open.push(isObject(c))
			i++
		case '}', ']':
			if open.pop() != isObject(c) {
				return i, syntax(i, msgBracket)
			}
			i++
			if open.depth == 0 {
				return i, nil
			}
		default:
			i++
		}
	}
}

// isObject is 1 for { and }, 0 for [ and ]: bit 5 is what the two sorts differ in.
func isObject(bracket byte) uint64 { return uint64(bracket>>5) & 1 }
