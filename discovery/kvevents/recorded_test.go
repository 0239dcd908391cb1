// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"compress/gzip"
	"encoding/hex"
	"encoding/json"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/zmtp"
)

// recording is what vLLM 0.32.0 said: see testdata/record.py.
type recording struct {
	Version string
	Sources json.RawMessage
	Replay  [][]string // frames in hexadecimal digits
	PastEnd [][]string `json:"past_the_end"`
	Wire    string
}

func recorded(t *testing.T) (r recording) {
	t.Helper()
	f, err := os.Open("testdata/vllm-0.32.0/events.json.gz")
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	require.NoError(t, json.NewDecoder(z).Decode(&r))
	return r
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	require.NoError(t, err)
	return b
}

func TestTheWireOfARealEngine(t *testing.T) {
	wire := unhex(t, recorded(t).Wire)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		_, _ = conn.Write(wire)
		_ = conn.(*net.TCPConn).CloseWrite()
		buf := make([]byte, 1<<10)
		for err == nil { // until the reader has gone
			_, err = conn.Read(buf)
		}
		_ = conn.Close()
	}()
	defer func() { _ = ln.Close(); <-done }()
	c, err := zmtp.Dial(t.Context(), ln.Addr().String(), "SUB", []string{"PUB", "XPUB"},
		zmtp.Limits{Frames: 3, Bytes: 1 << 20, Time: 10 * time.Second})
	require.NoError(t, err)
	defer c.Close()
	var seqs []byte
	messages := 0
	for {
		frames, err := c.Read()
		if err != nil {
			break
		}
		if len(frames) != 3 { // the handshake's READY is read by Dial, so all are batches
			t.Fatalf("%d frames", len(frames))
		}
		assert.Empty(t, frames[0])
		require.Len(t, frames[1], 8)
		seqs = append(seqs, frames[1][7])
		assert.Equal(t, byte(0x93), frames[2][0], "an array of three")
		messages++
	}
	assert.Equal(t, 12, messages)
	for i := range seqs[1:] {
		assert.Equal(t, seqs[i]+1, seqs[i+1])
	}
}

func TestTheReplayOfARealEngine(t *testing.T) {
	r := recorded(t)
	for i, message := range r.Replay {
		var frames [][]byte
		for _, f := range message {
			frames = append(frames, unhex(t, f))
		}
		seq, payload, ok := answer(frames)
		require.True(t, ok)
		if i == len(r.Replay)-1 {
			assert.Equal(t, uint64(endMark), seq)
			continue
		}
		assert.EqualValues(t, i, seq)
		assert.NotEmpty(t, payload)
	}
	assert.Equal(t, [][]string{{"", "", "ffffffffffffffff", ""}}, r.PastEnd)
}

// The engine was told to choose its ports, and says which.
func TestWhereARealEngineSaysThatItPublishes(t *testing.T) {
	got, err := ofVLLM(recorded(t).Sources, "10.0.0.7", func(string) bool { return false })
	require.NoError(t, err)
	assert.Equal(t, []address{{0, "10.0.0.7:33179", "10.0.0.7:37113", ""}}, got)
}
