// SPDX-License-Identifier: Apache-2.0

package handoff

import "math"

// maxDepth is the deepest nesting of lists that is read. One array per KV cache group has depth 2, and no real handoff
// is deeper.
const maxDepth = 4

// count reads nested lists of exactly the given depth (1 is a flat list) and counts the numbers in them. The numbers
// must be whole, 0 or more, and fit 64 bits. ok is false for any other depth or value. White space is allowed around
// each value.
func count(raw []byte, depth int) (n int, ok bool) {
	if depth < 1 || depth > maxDepth {
		return 0, false
	}
	r := reader{b: raw}
	ok = r.list(depth) && r.peek() == 0 && r.at == len(raw)
	return r.n, ok
}

// TokenIDs reports whether raw is a JSON list of token ids, with at least one: whole numbers of 0 or more, in digits. A
// long prompt has very many ids, so they are read once and not copied.
func TokenIDs(raw []byte) bool {
	n, ok := count(raw, 1)
	return ok && n > 0
}

type reader struct {
	b  []byte
	at int
	n  int
}

// peek skips white space and returns the next byte, or 0 at the end.
func (r *reader) peek() byte {
	for r.at < len(r.b) {
		switch c := r.b[r.at]; c {
		case ' ', '\n', '\t', '\r':
			r.at++
		default:
			return c
		}
	}
	return 0
}

func (r *reader) take(c byte) bool {
	if r.peek() != c {
		return false
	}
	r.at++
	return true
}

func (r *reader) list(depth int) bool {
	if !r.take('[') {
		return false
	}
	if r.take(']') {
		return true
	}
	if depth == 1 {
		r.plain()
	}
	for {
		if depth > 1 && !r.list(depth-1) || depth == 1 && !r.number() {
			return false
		}
		if r.take(']') {
			return true
		}
		if !r.take(',') {
			return false
		}
	}
}

// plain reads numbers of up to 18 digits that have a comma right behind them. As engines write lists, that is all but
// the last one. A prompt of 1 MB has some 16,000 of them. plain stops before whatever else comes.
func (r *reader) plain() {
	b, at, n := r.b, r.at, r.n
	for i := at; i < len(b); i++ {
		if b[i]-'0' <= 9 {
			continue
		}
		if digits := i - at; b[i] != ',' || digits == 0 || digits > 18 || digits > 1 && b[at] == '0' {
			break
		}
		at, n = i+1, n+1
	}
	r.at, r.n = at, n
}

func (r *reader) number() bool {
	r.peek()
	start, v := r.at, uint64(0)
	for r.at < len(r.b) && r.b[r.at] >= '0' && r.b[r.at] <= '9' {
		d := uint64(r.b[r.at] - '0')
		if v > (math.MaxInt64-d)/10 {
			return false
		}
		v, r.at = v*10+d, r.at+1
	}
	digits := r.at - start
	if digits == 0 || digits > 1 && r.b[start] == '0' {
		return false
	}
	r.n++
	return true
}
