// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// trtEngine is an engine of TensorRT-LLM that tells of its blocks.
type trtEngine struct {
	t    *testing.T
	x    *Index
	next uint64
}

// tell applies events with the next numbers. Each is the text of data, and members beside it before a "|".
func (e *trtEngine) tell(events ...string) {
	e.t.Helper()
	for _, event := range events {
		beside, data, found := strings.Cut(event, "|")
		if !found {
			beside, data = `"window_size":32768`, event
		}
		payload := fmt.Sprintf(`{"event_id":%d,"data":%s,%s}`, e.next, data, beside)
		replay, err := e.x.Apply(engineA, e.next, []byte(payload), began)
		require.NoError(e.t, err)
		if replay {
			e.x.ReplayEnd(engineA, false, began)
		}
		e.next++
	}
}

func (e *trtEngine) want(state State, reason string, prompt []uint32, tokens int) {
	e.t.Helper()
	status := e.x.State("a")
	assert.Equal(e.t, state, status.State, status.Reason)
	assert.Equal(e.t, reason, status.Reason)
	assert.Equal(e.t, tokens, held(e.x, "a", Query{Tokens: prompt}).Tokens)
}

const trtCreated = `{"type":"created","num_blocks_per_cache_level":[101230,0]}`

// trtStored is a stored event of a chain of blocks; more are members of each block.
func trtStored(hashes []u64, parent any, tokens []uint32, block int, more string) string {
	var blocks []string
	for i, hash := range hashes {
		var list []string
		for _, token := range tokens[i*block : min((i+1)*block, len(tokens))] {
			list = append(list, fmt.Sprintf(`{"type":"unique_token","token_id":%d,"token_extra_id":0}`, token))
		}
		blocks = append(blocks, fmt.Sprintf(`{"type":"stored_block","block_hash":%d,"tokens":[%s],"priority":35%s}`,
			uint64(hash), strings.Join(list, ","), more))
	}
	if parent == nil {
		parent = "null"
	}
	return fmt.Sprintf(`{"type":"stored","parent_hash":%v,"blocks":[%s]}`, parent, strings.Join(blocks, ","))
}

func trtRemoved(hashes ...u64) string {
	return `{"type":"removed","block_hashes":` + strings.ReplaceAll(fmt.Sprint(hashes), " ", ",") + `}`
}

func trtMoved(hash u64, from, to int) string {
	return fmt.Sprintf(`{"type":"updated","block_hash":%d,"cache_level":{"type":"event_diff","new_value":%d,`+
		`"old_value":%d},"priority":null}`, uint64(hash), to, from)
}

func newTRT(t *testing.T) *trtEngine { return &trtEngine{t: t, x: New()} }

// The members are those of KVCacheEventSerializer (tensorrt_llm/_utils.py).
func TestTheEventsOfTensorRTLLMAreRead(t *testing.T) {
	e, p := newTRT(t), tokensOf(64, 1)
	e.tell(trtCreated)
	e.want(Exact, "", p, 0)
	const most = 1<<64 - 1 // of this and the next ones a float64 makes one number
	e.tell(trtStored([]u64{most, most - 1}, nil, p[:32], 16, `,"cache_level":0,"mm_keys":[],"cache_salt":null`),
		trtStored([]u64{most - 2, most - 3}, "18446744073709551614", p[32:], 16, `,"cache_level":0`))
	e.want(Exact, "", p, 64)
	assert.Equal(t, Hit{Engine: "a", Device: 64, Tokens: 64, Exact: true}, held(e.x, "a", Query{Tokens: p}))
	e.tell(trtRemoved(most-3), `{"type":"updated","block_hash":18446744073709551615,"cache_level":null,"priority":`+
		`{"type":"event_diff","new_value":90,"old_value":35}}`, `{"type":"of tomorrow"}`)
	e.want(Exact, "", p, 48)
	e.tell(trtStored([]u64{most - 2}, "18446744073709551614", p[32:48], 16, ""), trtRemoved(most-2))
	e.want(Exact, "", p, 32)
}

// A block that another follows is full. Until there is one, blocks that may be full are counted, and not believed.
func TestTheSizeOfABlockFollowsFromTheEvents(t *testing.T) {
	e, p := newTRT(t), tokensOf(64, 1)
	e.tell(trtCreated, trtStored([]u64{1}, nil, p[:7], 16, ""))
	e.want(Incomplete, reasonBlock, p, 7)
	e.tell(trtStored([]u64{2}, nil, p[:16], 16, ""), trtStored([]u64{3}, nil, p[:9], 16, ""))
	e.want(Incomplete, reasonBlock, p, 16)
	e.want(Incomplete, reasonBlock, p[:9], 0)
	e.tell(trtStored([]u64{4}, "2", p[16:20], 16, "")) // it is not full, but the one before is
	e.want(Exact, "", p, 16)
	e.tell(trtStored([]u64{5, 6, 7}, "2", p[16:55], 16, ""))
	e.want(Exact, "", p, 48)
	e.tell(trtRemoved(7, 4, 3, 1)) // none was full
	e.want(Exact, "", p, 48)
	e.tell(trtStored([]u64{8}, nil, p[:17], 32, ""))
	e.want(Incomplete, unusableLengths, p, 48)

	e = newTRT(t)
	e.tell(trtStored([]u64{1}, nil, p[:20], 32, ""), trtStored([]u64{2, 3}, nil, p[:20], 16, ""))
	e.want(Incomplete, unusableLengths, p, 20)
}

func TestOnlyTheLargestWindowCounts(t *testing.T) {
	e, p := newTRT(t), tokensOf(64, 1)
	e.tell(`"window_size":4096|`+trtCreated, trtCreated)
	e.tell(trtStored([]u64{1, 2}, nil, p[:32], 16, ""),
		`"window_size":4096|`+trtStored([]u64{1, 2, 3, 4}, nil, p, 16, ""), `"window_size":4096|`+trtRemoved(1))
	e.want(Exact, "", p, 32)

	e = newTRT(t) // two layer groups of one window: what both hold
	e.tell(trtCreated, `"window_size":9,"layer_group_id":0|`+trtCreated)
	group := func(n int, data string) string {
		return fmt.Sprintf(`"window_size":32768,"layer_group_id":%d|%s`, n, data)
	}
	e.tell(group(0, trtStored([]u64{1, 2}, nil, p[:32], 16, "")), group(1, trtStored([]u64{1, 2}, nil, p[:32], 16, "")))
	e.want(Exact, "", p, 32)
	e.tell(group(1, trtRemoved(2)))
	e.want(Exact, "", p, 16)
	e.tell(group(64, trtRemoved(2)))
	e.want(Incomplete, unusableTooMany, p, 16)
}

func TestLevelsAreTiers(t *testing.T) {
	e, p := newTRT(t), tokensOf(48, 1)
	e.tell(trtCreated, trtStored([]u64{1, 2, 3}, nil, p, 16, `,"cache_level":0`), trtMoved(3, 0, 1), trtMoved(9, 0, 1))
	assert.Equal(t, 32, held(e.x, "a", Query{Tokens: p}).Device)
	e.tell(trtMoved(3, 1, 0))
	assert.Equal(t, 48, held(e.x, "a", Query{Tokens: p}).Device)
	e.tell(trtMoved(3, 0, 1), trtMoved(2, 0, 1), trtMoved(1, 0, 1))
	assert.Equal(t, Hit{Engine: "a", Tokens: 48, Tier: TierHost, Exact: true}, held(e.x, "a", Query{Tokens: p}))
	e.tell(trtRemoved(3)) // which does not say where it was
	e.want(Exact, "", p, 32)
	e.tell(trtMoved(2, 1, 2), trtStored([]u64{4}, "2", p[32:], 16, `,"cache_level":2`))
	e.want(Exact, "", p, 16)
}

// An event_id is the number of an event: from 0 on all must be there.
func TestAMissingEventIdIsAGap(t *testing.T) {
	p := tokensOf(64, 1)
	e := newTRT(t)
	e.next = 3
	e.tell(trtStored([]u64{1, 2}, nil, p[:32], 16, ""))
	e.want(Incomplete, reasonBegin, p, 32)

	e = newTRT(t)
	e.tell(trtCreated, trtStored([]u64{1, 2}, nil, p[:32], 16, ""))
	e.want(Exact, "", p, 32)
	e.next++
	e.tell(trtStored([]u64{3}, "2", p[32:48], 16, ""))
	e.want(Incomplete, reasonBegin, p, 48)
	e.tell(trtStored([]u64{4}, "3", p[48:], 16, ""))
	e.want(Incomplete, reasonBegin, p, 64)
	e.next = 0
	e.tell(trtCreated)
	e.want(Exact, "", p, 0)
	e.tell(trtStored([]u64{1}, nil, p[:32], 32, "")) // of another size
	e.want(Incomplete, reasonBlock, p, 32)
}

// The engine frees the blocks that follow one with it, and may tell of the first alone.
func TestABlockThatGoesBeforeOthersMakesTheViewIncomplete(t *testing.T) {
	e, p := newTRT(t), tokensOf(48, 1)
	e.tell(trtCreated, trtStored([]u64{1, 2, 3}, nil, p, 16, ""), trtRemoved(2, 3))
	e.want(Exact, "", p, 16)
	e.tell(trtStored([]u64{2, 3}, "1", p[16:], 16, ""), trtMoved(3, 0, 1), trtRemoved(2))
	e.want(Incomplete, unusableBefore, p, 16)
}

func TestWhatIsNoPlainPromptIsMetByNone(t *testing.T) {
	p := tokensOf(32, 1)
	for name, more := range map[string]string{
		"an image": `,"mm_keys":[{"type":"mm_key","hash":"0102","start_offset":3}]`,
		"a salt":   `,"cache_salt":"tenant"`,
	} {
		e := newTRT(t)
		e.tell(trtCreated, trtStored([]u64{1, 2}, nil, p, 16, more))
		e.want(Exact, "", p, 0)
		salted := held(e.x, "a", Query{Tokens: p, Salt: "tenant"}).Tokens
		assert.Equal(t, name == "a salt", salted == 32, name)
		e.tell(trtRemoved(2, 1))
		assert.Zero(t, e.x.find(engineA).blocks)
	}
	for name, stored := range map[string]string{
		"a digest of an image": strings.Replace(trtStored([]u64{1, 2}, nil, p, 16, ""), `"token_id":`,
			`"token_id":"ff00","x":`, 1),
		"a prompt table": strings.Replace(trtStored([]u64{1, 2}, nil, p, 16, ""), `"token_extra_id":0`,
			`"token_extra_id":7`, 1),
	} {
		e := newTRT(t)
		e.tell(trtCreated, stored)
		e.want(Exact, "", p, 0)
		assert.Equal(t, 2, e.x.find(engineA).blocks, name)
	}
	// An adapter is not told. That its blocks look like the model's shows where both are there.
	e := newTRT(t)
	e.tell(trtCreated, trtStored([]u64{1, 2}, nil, p, 16, ""), trtStored([]u64{3, 4}, nil, p, 16, ""))
	e.want(Incomplete, unusableAlike, p, 32)
}

func TestEventsThatCannotBeUsedAreNoReasonToClaimMore(t *testing.T) {
	p := tokensOf(32, 1)
	good := trtStored([]u64{1, 2}, nil, p, 16, "")
	for _, c := range map[string]struct{ event, reason string }{
		"an unknown parent": {trtStored([]u64{3}, "9", p[:16], 16, ""), unusableParent},
		"no hash":           {strings.Replace(good, `"block_hash":1`, `"block_hash":1.5`, 1), unusableHash},
		"a hash of another": {trtStored([]u64{2}, nil, p[:16], 16, ""), unusableHash},
		"no hash goes":      {`{"type":"removed","block_hashes":[null]}`, unusableHash},
		"no hash moves":     {strings.Replace(trtMoved(1, 0, 1), ":1,", ":[],", 1), unusableHash},
		"a hole": {strings.Replace(good, `{"type":"unique_token",`, `{"type":"unique_token"},{`, 1),
			unusableLengths},
	} {
		e := newTRT(t)
		e.tell(trtCreated, good, c.event)
		e.want(Incomplete, c.reason, p, 32)
		e.tell(trtRemoved(2, 1), `"window_size":99999|`+trtCreated)
		e.want(Incomplete, c.reason, p, 0)
	}
	x := New()
	_, err := x.Apply(engineA, 0, []byte(strings.Repeat(`{"a":`, 1<<20)+"1"+strings.Repeat("}", 1<<20)), began)
	require.Error(t, err, "deeper than a stack is")
	assert.Equal(t, Incomplete, x.State("a").State)
}

// A hash of KV cache manager V2 may be the text of a SHA-256.
func TestHashesMayBeText(t *testing.T) {
	e, p := newTRT(t), tokensOf(32, 1)
	a, b := `"`+strings.Repeat("a", 64)+`"`, `"`+strings.Repeat("b", 64)+`"`
	text := strings.NewReplacer(`"block_hash":1,`, `"block_hash":`+a+`,`, `"block_hash":2,`, `"block_hash":`+b+`,`)
	e.tell(trtCreated, text.Replace(trtStored([]u64{1, 2}, nil, p, 16, "")))
	e.want(Exact, "", p, 32)
	e.tell(`{"type":"removed","block_hashes":[` + b + `]}`)
	e.want(Exact, "", p, 16)
	e.tell(text.Replace(trtStored([]u64{2}, a, p[16:], 16, "")))
	e.want(Exact, "", p, 32)
}

// Each event has 16 blocks of 32 tokens. On a busy machine the processor time tells more than the clock.
func BenchmarkTRTLLM(b *testing.B) {
	hashes := make([]u64, 16)
	for i := range hashes {
		hashes[i] = 1<<60 + u64(i)
	}
	event := []byte(`{"data":` + trtStored(hashes, nil, tokensOf(16*32, 1), 32, `,"cache_level":0,"mm_keys":[]`) + "}")
	x := New()
	b.SetBytes(int64(len(event)))
	for seq := uint64(0); b.Loop(); seq++ {
		_, _ = x.Apply(engineA, seq, event, began)
	}
}

func FuzzTRTLLM(f *testing.F) {
	p := tokensOf(48, 1)
	for _, data := range []string{trtCreated, trtStored([]u64{1, 2, 3}, nil, p, 16, `,"cache_level":0,"mm_keys":[1]`),
		trtStored([]u64{3}, "2", p[:9], 16, `,"cache_level":1,"cache_salt":"x"`), trtRemoved(1, 2), trtMoved(1, 0, 2)} {
		f.Add([]byte(`{"event_id":0,"data":`+data+`,"window_size":9}`),
			[]byte(`{"event_id":1,"data":`+data+`,"window_size":10,"layer_group_id":1,"hash_algo":"v2_sha256"}`))
	}
	f.Fuzz(func(t *testing.T, one, two []byte) {
		x := New(WithMaxBlocks(1000))
		for seq, payload := range [][]byte{one, two, one, two} {
			_, _ = x.Apply(engineA, uint64(seq), payload, began)
		}
		x.Match(&Query{Model: "m", Tokens: slices.Concat(p, p)}, nil)
		checkBooks(t, x)
	})
}

// An event of a great many blocks is not read, and takes little memory.
func TestAnEventOfTooManyBlocksIsRefused(t *testing.T) {
	e := &trtEngine{t: t, x: New()}
	e.tell(trtCreated)
	many := `{"type":"stored","blocks":[` + strings.Repeat("0,", 2<<20) + `0]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	e.tell(many)
	runtime.ReadMemStats(&after)
	assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(100<<20))
	e.want(Incomplete, unusableTooMany, nil, 0)
}
