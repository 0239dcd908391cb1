// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"encoding/binary"
	"math"
)

// The types of events.
const (
	blockStored      = "BlockStored"
	blockRemoved     = "BlockRemoved"
	allBlocksCleared = "AllBlocksCleared"
)

// event is one event of a batch.
type event struct {
	kind    string
	hashes  []uint64
	parent  uint64 // of the first hash, if it has one
	first   bool   // the first hash is that of a prompt's first block
	tokens  []int32
	size    int
	salt    string
	adapter string
}

// batch encodes a batch: [timestamp, events, data-parallel rank].
func batch(seconds float64, events []event, rank int, arrays bool) []byte {
	b := binary.BigEndian.AppendUint64([]byte{0x93, 0xcb}, math.Float64bits(seconds))
	b = appendArray(b, len(events))
	for i := range events {
		if arrays {
			b = events[i].appendArray(b)
		} else {
			b = events[i].appendMap(b)
		}
	}
	return appendUint(b, uint64(rank))
}

// appendMap writes an event as vLLM 0.32.0 does, in the order of its fields.
func (e *event) appendMap(b []byte) []byte {
	switch e.kind {
	case allBlocksCleared:
		return appendText(appendText(append(b, 0x81), "type"), e.kind)
	case blockRemoved:
		b = appendText(appendText(append(b, 0x84), "type"), e.kind)
		b = e.appendHashes(appendText(b, "block_hashes"))
		return appendUint(appendText(e.appendMedium(appendText(b, "medium")), "group_idx"), 0)
	}
	b = appendText(appendText(append(b, 0x8b), "type"), e.kind)
	b = e.appendHashes(appendText(b, "block_hashes"))
	b = e.appendParent(appendText(b, "parent_block_hash"))
	b = e.appendTokens(appendText(b, "token_ids"))
	b = appendUint(appendText(b, "block_size"), uint64(e.size))
	b = append(appendText(b, "lora_id"), 0xc0)
	b = e.appendMedium(appendText(b, "medium"))
	b = e.appendAdapter(appendText(b, "lora_name"))
	b = e.appendExtra(appendText(b, "extra_keys"))
	b = appendUint(appendText(b, "group_idx"), 0)
	return appendText(appendText(b, "kv_cache_spec_kind"), "full_attention")
}

// appendArray writes an event as vLLM did before vllm-project/vllm#42892: the type, then the fields in their order.
func (e *event) appendArray(b []byte) []byte {
	switch e.kind {
	case allBlocksCleared:
		return appendText(append(b, 0x91), e.kind)
	case blockRemoved:
		return e.appendMedium(e.appendHashes(appendText(append(b, 0x93), e.kind)))
	}
	b = e.appendParent(e.appendHashes(appendText(append(b, 0x99), e.kind)))
	b = append(appendUint(e.appendTokens(b), uint64(e.size)), 0xc0)
	return e.appendExtra(e.appendAdapter(e.appendMedium(b)))
}

func (e *event) appendHashes(b []byte) []byte {
	b = appendArray(b, len(e.hashes))
	for _, h := range e.hashes {
		b = appendUint(b, h)
	}
	return b
}

func (e *event) appendParent(b []byte) []byte {
	if e.first {
		return append(b, 0xc0)
	}
	return appendUint(b, e.parent)
}

func (e *event) appendTokens(b []byte) []byte {
	b = appendArray(b, len(e.tokens))
	for _, t := range e.tokens {
		b = appendUint(b, uint64(t))
	}
	return b
}

func (e *event) appendMedium(b []byte) []byte { return appendText(b, "GPU") }

func (e *event) appendAdapter(b []byte) []byte {
	if e.adapter == "" {
		return append(b, 0xc0)
	}
	return appendText(b, e.adapter)
}

// appendExtra writes what besides tokens is in each block's hash: the adapter, and in a prompt's first block the salt.
func (e *event) appendExtra(b []byte) []byte {
	b = appendArray(b, len(e.hashes))
	for i := range e.hashes {
		var keys []string
		if e.adapter != "" {
			keys = append(keys, e.adapter)
		}
		if e.salt != "" && i == 0 && e.first {
			keys = append(keys, e.salt)
		}
		if keys == nil {
			b = append(b, 0xc0)
			continue
		}
		b = appendArray(b, len(keys))
		for _, key := range keys {
			b = appendText(b, key)
		}
	}
	return b
}

// appendUint writes an integer in the shortest form of msgpack.
func appendUint(b []byte, n uint64) []byte {
	switch {
	case n < 1<<7:
		return append(b, byte(n))
	case n < 1<<8:
		return append(b, 0xcc, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), n)
}

func appendArray(b []byte, n int) []byte {
	switch {
	case n < 16:
		return append(b, 0x90|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}

func appendText(b []byte, s string) []byte {
	switch {
	case len(s) < 32:
		b = append(b, 0xa0|byte(len(s)))
	case len(s) < 1<<8:
		b = append(b, 0xd9, byte(len(s)))
	default:
		b = binary.BigEndian.AppendUint32(append(b, 0xdb), uint32(len(s)))
	}
	return append(b, s...)
}
