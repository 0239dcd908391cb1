// SPDX-License-Identifier: Apache-2.0

package sglang

import (
	"encoding/json"
	"strconv"

	"github.com/pdkit/pdkit/connector"
)

// rooms are an attempt's rooms: different numbers from 0 to 2^63-1 with the same remainder modulo P's number of ranks.
// They are computed from the attempt's random number, so both legs get the same rooms.
type rooms struct {
	first     uint64 // index of the first room among those with the remainder
	space     uint64 // how many rooms have the remainder
	stride    uint64
	ranks     uint64
	remainder uint64
}

// newRooms spreads n rooms evenly over all rooms with the remainder, beginning with a random one. They are not
// neighbours, because some versions of SGLang count further rooms up from each room of a list.
func newRooms(s *connector.Session, ranks, n int) rooms {
	r := rooms{ranks: uint64(ranks), remainder: uint64(s.PrefillRank)}
	r.space = 1 << 63 / r.ranks
	r.first = (s.Uint64() >> 1) / r.ranks % r.space
	r.stride = r.space / uint64(max(n, 1))
	return r
}

func (r rooms) room(i int) uint64 {
	return (r.first+uint64(i)*r.stride)%r.space*r.ranks + r.remainder
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

// repeat is a JSON list with n copies of a value.
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
