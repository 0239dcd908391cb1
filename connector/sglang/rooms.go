// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/json"
	"strconv"

	"github.com/pdkit/pdkit/connector"
)

// rooms are an attempt's rooms: numbers from 0 to 2^63-1, all of the same rest modulo P's number of ranks, all different. They follow
// from the attempt's randomness, so that both legs get the same.
type rooms struct {
	first  uint64 // before it is multiplied
	space  uint64 // how many rooms of this rest there are
	stride uint64
	ranks  uint64
	rest   uint64
}

// newRooms spreads n rooms evenly over the space, from a random one on. They are not neighbours, because some versions of SGLang
// count further rooms up from each of a list.
func newRooms(s *connector.Session, ranks, n int) rooms {
	r := rooms{ranks: uint64(ranks), rest: uint64(s.PrefillRank())}
	r.space = 1 << 63 / r.ranks
	r.first = (s.Uint64() >> 1) / r.ranks % r.space
	r.stride = r.space / uint64(max(n, 1))
	return r
}

func (r rooms) room(i int) uint64 {
	return (r.first+uint64(i)*r.stride)%r.space*r.ranks + r.rest
}

func (r rooms) list(n int) json.RawMessage {
	out := make([]byte, 1, 2+21*n)
	out[0] = '['
	for i := range n {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, r.room(i), 10)
	}
	return append(out, ']')
}

// repeat is a JSON list of n times the same value.
func repeat(value json.RawMessage, n int) json.RawMessage {
	out := make([]byte, 1, 2+(len(value)+1)*n)
	out[0] = '['
	for i := range n {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, value...)
	}
	return append(out, ']')
}
