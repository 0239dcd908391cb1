// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"encoding/binary"
	"strconv"

	"github.com/pdkit/pdkit/connector"
)

// hashOf and mix are hashes of our own: they are the same in each run, and engines and pickers share none of them.
func hashOf(text string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * 1099511628211
	}
	return h
}

func mix(a, b uint64) uint64 {
	x := (a ^ b*0x9e3779b97f4a7c15) + 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// prompt is a request of the trace as engines see it: a key for each full block of the prompt and of the response, and
// the number of tokens.
func prompt(e *entry, round, blockSize int) (keys []uint64, tokens int) {
	block := blockSize * tokenBytes
	size := e.size()
	all := size
	if e.Answer != "" {
		all += e.Output * tokenBytes
	}
	keys = make([]uint64, 0, all/block)
	chain, content, filled := uint64(1), uint64(0), 0
	add := func(id uint64, size int) {
		id = mix(id, uint64(round))
		whole := false // the last block was one of this segment, which says where the next one is
		for at := 0; at < size; {
			n := min(block-filled, size-at)
			if whole && n == block {
				chain++ // in a row: see the table of enginesim/model
				keys = append(keys, chain)
				at += n
				continue
			}
			content = mix(content^id, uint64(at)<<32|uint64(n))
			at, filled = at+n, filled+n
			if filled == block {
				chain = mix(chain, content)>>2 | 1<<62
				keys = append(keys, chain)
				content, filled, whole = 0, 0, n == block
			}
		}
	}
	e.pieces(add)
	if e.Answer != "" {
		add(hashOf(e.Answer), e.Output*tokenBytes)
	}
	return keys, (size + tokenBytes - 1) / tokenBytes
}

// writer writes requests as clients send them.
type writer struct{ body []byte }

// request is a request of the trace as the picker sees it. It is valid until the next one: pickers keep none.
func (w *writer) request(e *entry, round int) (*connector.ClientRequest, error) {
	w.body = append(w.body[:0], `{"model":"m","prompt":"`...)
	e.pieces(func(id uint64, size int) {
		x := mix(id, uint64(round))
		for ; size > 0; size -= 8 {
			x += 0x9e3779b97f4a7c15
			letters := mix(x, 0)&0x0f0f0f0f0f0f0f0f + 0x6161616161616161 // eight of a to p
			var b [8]byte
			binary.LittleEndian.PutUint64(b[:], letters)
			w.body = append(w.body, b[:min(size, 8)]...)
		}
	})
	w.body = append(w.body, `","max_tokens":`...)
	w.body = strconv.AppendInt(w.body, int64(max(256, 2*e.Output)), 10)
	w.body = append(w.body, `,"stream":true}`...)
	return connector.ParseRequest(connector.APICompletions, w.body)
}
