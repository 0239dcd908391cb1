// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"encoding/binary"
	"math"
	"time"
)

// wire writes msgpack, in all the forms that engines use.
type wire []byte

type (
	pairs []any // a map: key, value, key, value …
	u64   uint64
	bin   []byte
	raw   []byte
)

func (w wire) put(v any) wire {
	switch v := v.(type) {
	case nil:
		return append(w, 0xc0)
	case int:
		switch {
		case v < 0:
			return binary.BigEndian.AppendUint64(append(w, 0xd3), uint64(v))
		case v < 128:
			return append(w, byte(v))
		case v < 1<<16:
			return binary.BigEndian.AppendUint16(append(w, 0xcd), uint16(v))
		}
		return binary.BigEndian.AppendUint32(append(w, 0xce), uint32(v))
	case u64:
		return binary.BigEndian.AppendUint64(append(w, 0xcf), uint64(v))
	case float64:
		return binary.BigEndian.AppendUint64(append(w, 0xcb), math.Float64bits(v))
	case string:
		return append(append(w, 0xd9, byte(len(v))), v...)
	case bin:
		return append(append(w, 0xc4, byte(len(v))), v...)
	case raw:
		return append(w, v...)
	case []any:
		w = binary.BigEndian.AppendUint16(append(w, 0xdc), uint16(len(v)))
		for _, x := range v {
			w = w.put(x)
		}
	case []uint32:
		w = binary.BigEndian.AppendUint16(append(w, 0xdc), uint16(len(v)))
		for _, x := range v {
			w = w.put(int(x))
		}
	case []u64:
		w = binary.BigEndian.AppendUint16(append(w, 0xdc), uint16(len(v)))
		for _, x := range v {
			w = w.put(x)
		}
	case pairs:
		w = append(w, 0x80|byte(len(v)/2))
		for _, x := range v {
			w = w.put(x)
		}
	}
	return w
}

// began is the time at which tests begin.
var began = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)

// message returns a payload as vLLM sends it now: an array with maps.
func message(events ...any) []byte { return messageAt(began, events...) }

func messageAt(at time.Time, events ...any) []byte {
	return wire(nil).put([]any{float64(at.UnixNano()) / 1e9, events, 0})
}

// storedEvent returns a BlockStored with the fields that each has, and more.
func storedEvent(hashes []u64, parent any, tokens []uint32, block int, more ...any) pairs {
	return append(pairs{"type", "BlockStored", "block_hashes", hashes, "parent_block_hash", parent, "token_ids", tokens,
		"block_size", block, "lora_id", nil}, more...)
}

func removedEvent(hashes []u64, more ...any) pairs {
	return append(pairs{"type", "BlockRemoved", "block_hashes", hashes}, more...)
}

var clearedEvent = pairs{"type", "AllBlocksCleared"}

// tokens returns n tokens that depend on a number.
func tokensOf(n, number int) []uint32 {
	t := make([]uint32, n)
	for i := range t {
		t[i] = uint32((number*1_000_003 + i*7919) % 150_000)
	}
	return t
}
