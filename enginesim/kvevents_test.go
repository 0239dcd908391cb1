// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/pdkit/pdkit/enginesim"
)

// kvReader is a bare ZeroMQ client: a subscriber, or who asks for a replay.
type kvReader struct {
	t    *testing.T
	conn net.Conn
	r    *bufio.Reader
}

func dialKV(t *testing.T, address, socket, first string) *kvReader {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ready := "\x05READY\x0bSocket-Type" + string(binary.BigEndian.AppendUint32(nil, uint32(len(socket)))) + socket
	_, err = conn.Write([]byte("\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + string(make([]byte, 48)) +
		"\x04" + string(rune(len(ready))) + ready + first))
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
	k := &kvReader{t, conn, bufio.NewReader(conn)}
	_, err = io.ReadFull(k.r, make([]byte, 64))
	require.NoError(t, err)
	k.message() // READY
	return k
}

// message reads a message's frames, or a command.
func (k *kvReader) message() (frames [][]byte) {
	k.t.Helper()
	for {
		flags, err := k.r.ReadByte()
		require.NoError(k.t, err)
		size := uint64(0)
		if flags&2 != 0 {
			require.NoError(k.t, binary.Read(k.r, binary.BigEndian, &size))
		} else {
			b, err := k.r.ReadByte()
			require.NoError(k.t, err)
			size = uint64(b)
		}
		body := make([]byte, size)
		_, err = io.ReadFull(k.r, body)
		require.NoError(k.t, err)
		if frames = append(frames, body); flags&1 == 0 {
			return frames
		}
	}
}

// replayKV returns the payloads that a replay from a number on has; the engine may have forgotten the first of these.
func replayKV(t *testing.T, e *enginesim.Engine, from uint64, frames int) (payloads [][]byte) {
	t.Helper()
	_, replay := e.KVEvents()
	k := dialKV(t, replay, "DEALER", "\x01\x00\x00\x08"+string(binary.BigEndian.AppendUint64(nil, from)))
	for {
		m := k.message()
		require.Len(t, m, frames)
		if string(m[frames-2]) == "\xff\xff\xff\xff\xff\xff\xff\xff" {
			return payloads
		}
		n := binary.BigEndian.Uint64(m[frames-2])
		if payloads == nil {
			assert.GreaterOrEqual(t, n, from)
			from = n
		}
		assert.Equal(t, from+uint64(len(payloads)), n)
		payloads = append(payloads, m[frames-1])
	}
}

func generateKV(t *testing.T, e *enginesim.Engine, body string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

func TestEnginesPublishTheirBlocksAsVLLMDoes(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{BlockSize: 4,
		KVEvents: &enginesim.KVEvents{Topic: "kv@x@tiny", Rank: 2}})
	require.NoError(t, err)
	defer e.Close()
	events, _ := e.KVEvents()
	sub := dialKV(t, events, "SUB", "\x00\x03\x01kv\x04\x07\x04PING\x00\x00")
	sub.message() // PONG: it is subscribed
	generateKV(t, e, `{"model":"tiny","prompt":"abcdefghij","max_tokens":1,"cache_salt":"s"}`)
	m := sub.message()
	require.Len(t, m, 3)
	assert.Equal(t, "kv@x@tiny", string(m[0]))
	assert.Zero(t, binary.BigEndian.Uint64(m[1]))
	var batch []any
	require.NoError(t, msgpack.Unmarshal(m[2], &batch))
	require.Len(t, batch, 3)
	assert.InDelta(t, float64(time.Now().Unix()), batch[0], 60)
	assert.EqualValues(t, 2, batch[2])
	var all []any
	var last any
	for _, ev := range batch[1].([]any) {
		stored := ev.(map[string]any)
		assert.Equal(t, "BlockStored", stored["type"])
		assert.Equal(t, last, stored["parent_block_hash"])
		assert.Equal(t, "GPU", stored["medium"])
		assert.Equal(t, "full_attention", stored["kv_cache_spec_kind"])
		assert.Contains(t, stored, "lora_id")
		if last == nil {
			assert.Equal(t, []any{"s"}, stored["extra_keys"].([]any)[0])
		}
		hashes := stored["block_hashes"].([]any)
		last = hashes[len(hashes)-1]
		all = append(all, stored["token_ids"].([]any)...)
	}
	assert.Equal(t, "[97 98 99 100 101 102 103 104]", fmt.Sprint(all), "the last two are no block yet")
	assert.Equal(t, m[2], replayKV(t, e, 0, 4)[0])

	resp, err := http.Get(e.URL() + "/kv_event_sources")
	require.NoError(t, err)
	defer resp.Body.Close()
	var sources map[string]map[string]any
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&sources))
	_, port, _ := net.SplitHostPort(events)
	assert.Equal(t, "tcp://*:"+port, sources["2"]["endpoint"])
}

func TestEvictedBlocksAreAnnounced(t *testing.T) {
	for _, arrays := range []bool{false, true} {
		e, err := enginesim.Start(enginesim.Config{BlockSize: 4, Blocks: 8,
			KVEvents: &enginesim.KVEvents{Arrays: arrays, OldReplay: arrays}})
		require.NoError(t, err)
		defer e.Close()
		held := map[string]bool{}
		frames := 4
		if arrays {
			frames = 3
		}
		for i, batches := 0, 0; i < 8 || len(held) > 8 || batches < 2; i++ { // of quick requests, events come in one
			require.Less(t, i, 1000)
			generateKV(t, e, fmt.Sprintf(`{"model":"tiny","prompt":"prompt number %d","max_tokens":8}`, i))
			payloads := replayKV(t, e, 0, frames)
			batches = len(payloads)
			clear(held)
			for _, p := range payloads {
				var batch []any
				require.NoError(t, msgpack.Unmarshal(p, &batch))
				for _, ev := range batch[1].([]any) {
					var kind string
					var hashes []any
					if arrays {
						kind, hashes = ev.([]any)[0].(string), ev.([]any)[1].([]any)
					} else {
						kind, hashes = ev.(map[string]any)["type"].(string), ev.(map[string]any)["block_hashes"].([]any)
					}
					for _, h := range hashes {
						assert.Equal(t, kind == "BlockRemoved", held[fmt.Sprint(h)], "stored once, removed once")
						if held[fmt.Sprint(h)] = kind == "BlockStored"; kind == "BlockRemoved" {
							delete(held, fmt.Sprint(h))
						}
					}
				}
			}
		}
	}
}

func TestARestartedEngineCountsItsBatchesFromZero(t *testing.T) {
	e, err := enginesim.Start(enginesim.Config{KVEvents: &enginesim.KVEvents{BufferSteps: 2}})
	require.NoError(t, err)
	defer e.Close()
	events, replay := e.KVEvents()
	for i := 0; len(replayKV(t, e, 2, 4)) < 2; i++ { // of quick requests, some events come in one batch
		require.Less(t, i, 1000)
		generateKV(t, e, fmt.Sprintf(`{"model":"tiny","prompt":"%d %s","max_tokens":1}`, i, strings.Repeat("x", 64)))
	}
	assert.Len(t, replayKV(t, e, 0, 4), 2, "no more is kept")
	e.Freeze()
	e.Thaw()
	require.NoError(t, e.Restart())
	again, replayAgain := e.KVEvents()
	assert.Equal(t, events+replay, again+replayAgain)
	assert.Empty(t, replayKV(t, e, 0, 4))
	e.DropKVConnections()
	e.DropKVEvents(1)
	generateKV(t, e, `{"model":"tiny","prompt":"`+strings.Repeat("x", 64)+`","max_tokens":1}`)
	require.Eventually(t, func() bool { return len(replayKV(t, e, 0, 4)) > 0 }, 20*time.Second, 10*time.Millisecond,
		"what was dropped is in the replay")
}
