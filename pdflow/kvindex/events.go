// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"encoding/json"
	"errors"
	"math"
)

// errPayload is the error of a message that is no batch of events.
var errPayload = errors.New("kvindex: the message is no batch of events")

// batch is a message's payload: an array of time, events and rank (vLLM and SGLang), or a map of the same, or one event
// of TensorRT-LLM.
type batch struct {
	json   []byte  // TensorRT-LLM's event; nil is none
	sent   float64 // seconds since 1970 by the engine's clock; 0: not told
	events reader
	n      int // events
}

// The fields of a batch, in the order of an array.
const (
	batchTime = iota
	batchEvents
	batchOther
)

func readBatch(payload []byte) (b batch, err error) {
	if len(payload) > 0 && payload[0] == '{' { // msgpack has a number there
		if !json.Valid(payload) { // which bounds how deep it goes
			return batch{}, errPayload
		}
		return batch{json: payload}, nil
	}
	r := reader{b: payload}
	head, found := r.head(), false
	if head.kind != kindArray && head.kind != kindMap {
		return batch{}, errPayload
	}
	for i := range head.n {
		which := min(i, batchOther)
		if head.kind == kindMap {
			which = batchOther
			switch name, _ := r.text(); string(name) {
			case "ts":
				which = batchTime
			case "events":
				which = batchEvents
			}
		}
		v := r.head()
		switch {
		case which == batchTime && v.kind == kindFloat:
			b.sent = math.Float64frombits(v.num)
		case which == batchTime && v.kind == kindInt:
			b.sent = float64(int64(v.num))
		case which == batchEvents && v.kind == kindArray:
			b.events, b.n, found = reader{b: r.b}, v.n, true
			r.finish(v)
		default:
			r.finish(v)
		}
	}
	if r.bad || !found {
		return batch{}, errPayload
	}
	if !(b.sent > 0 && b.sent < 1e11) { // no number, or no time
		b.sent = 0
	}
	return b, nil
}

// event is one event, as pieces of the message. A field that is missing or nil is nil.
type event struct {
	kind   eventKind
	fields [fieldCount][]byte
}

type eventKind uint8

const (
	eventOther eventKind = iota // of a kind that is not known, to be skipped
	eventStored
	eventRemoved
	eventCleared
)

// field is a field of an event, under the names of vLLM and SGLang.
type field uint8

const (
	fieldHashes field = iota
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRA
	fieldExtra
	fieldGroup
	fieldSpec
	fieldWindow
	fieldLocality
	fieldOwnership
	fieldSession
	fieldLookahead
	fieldSalt      // SGLang
	fieldOrigin    // proposed for vLLM: NEW, or REUSED for a prefix hit that is announced once more
	fieldRemaining // proposed for vLLM: for each removed hash, how many blocks with it remain
	fieldCount
)

// The names of fields, and the order of those that an array has: vLLM before 0.23.
var fieldNames = [fieldCount]string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
	"lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
	"ownership",
	"session_id", "lookahead_token_ids", "cache_salt", "origin", "remaining_copy_counts"}

var (
	storedOrder = [...]field{fieldHashes, fieldParent, fieldTokens, fieldBlockSize, fieldLoRAID, fieldMedium, fieldLoRA,
		fieldExtra, fieldGroup, fieldSpec, fieldWindow, fieldLocality, fieldOwnership, fieldSession, fieldLookahead}
	removedOrder = [...]field{fieldHashes, fieldMedium, fieldGroup, fieldLocality, fieldOwnership}
)

func kindOf(name []byte) eventKind {
	switch string(name) {
	case "BlockStored":
		return eventStored
	case "BlockRemoved":
		return eventRemoved
	case "AllBlocksCleared":
		return eventCleared
	}
	return eventOther
}

// next reads an event: a map with its type and its fields, or an array of its type's name and its fields.
func (e *event) next(r *reader) {
	*e = event{}
	head := r.head()
	switch head.kind {
	case kindMap:
		for range head.n {
			name, _ := r.text()
			if string(name) == "type" {
				kind, _ := r.text()
				e.kind = kindOf(kind)
				continue
			}
			e.set(fieldOf(name), r.raw())
		}
	case kindArray:
		if head.n == 0 {
			return
		}
		name, _ := r.text()
		e.kind = kindOf(name)
		order := storedOrder[:]
		if e.kind == eventRemoved {
			order = removedOrder[:]
		}
		for i := range head.n - 1 {
			raw, f := r.raw(), fieldCount
			if i < len(order) {
				f = order[i]
			}
			e.set(f, raw)
		}
	default:
		r.finish(head)
	}
}

func fieldOf(name []byte) field {
	for f := range fieldNames {
		if fieldNames[f] == string(name) {
			return field(f)
		}
	}
	return fieldCount
}

func (e *event) set(f field, raw []byte) {
	if f < fieldCount && !(len(raw) == 1 && raw[0] == 0xc0) {
		e.fields[f] = raw
	}
}

// text returns a field that is text, nil if it is none.
func (e *event) text(f field) []byte {
	r := reader{b: e.fields[f]}
	b, _ := r.text()
	return b
}

// list returns a reader of a list's members and their number; n is -1 if the field is no list.
func (e *event) list(f field) (r reader, n int) {
	r = reader{b: e.fields[f]}
	if r.b == nil {
		return r, -1
	}
	v := r.head()
	if v.kind != kindArray {
		return r, -1
	}
	return r, v.n
}

// hash reads a hash of an engine: an integer is its 64 bits, signed or not, and bytes are hashed, since their last
// eight alone could be made alike by a client.
func (h *hasher) hash(r *reader) (hash uint64, ok bool) {
	v := r.head()
	switch v.kind {
	case kindInt:
		return v.num, true
	case kindBytes, kindText:
		return h.text(0, textHash, r.content(v)), !r.bad
	}
	r.finish(v)
	return 0, false
}

// full reports whether a block of a group of this kind is needed by each later token, so that the blocks from the
// prompt's begin are a prefix that can be reused.
func full(spec []byte) bool {
	switch string(spec) {
	case "", "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// tierOf tells where blocks of a medium lie.
func tierOf(medium []byte) Tier {
	switch string(medium) {
	case "GPU", "gpu", "cuda":
		return TierDevice
	case "CPU", "cpu", "CPU_PINNED", "cpu_pinned":
		return TierHost
	}
	return TierStorage
}
