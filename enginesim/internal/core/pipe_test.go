// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pipes(t *testing.T) (a, b *core.Pipe) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	out, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	in, err := ln.Accept()
	require.NoError(t, err)
	a, b = core.NewPipe(out), core.NewPipe(in)
	t.Cleanup(func() { _ = errors.Join(a.Close(), b.Close()) })
	return a, b
}

func TestPipeIsFIFO(t *testing.T) {
	a, b := pipes(t)
	var sent []core.Frame
	for i := range 100 {
		sent = append(sent, core.Frame{
			Kind: core.FrameBlock, Transfer: uint64(i), Key: core.KeyOf([]int32{int32(i)}), Index: uint32(i),
			Count: 100,
			Data:  bytes.Repeat([]byte{byte(i)}, i*1000),
		})
	}
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, a.Send(sent...)) })
	for i := range sent {
		got, err := b.Recv()
		require.NoError(t, err)
		require.Equal(t, sent[i], got)
	}
	wg.Wait()
}

func TestPipeKeepsTheFramesOfOneSendTogether(t *testing.T) {
	a, b := pipes(t)
	var wg sync.WaitGroup
	const senders, each = 8, 20
	for s := range senders {
		wg.Go(func() {
			frames := make([]core.Frame, each)
			for i := range frames {
				frames[i] = core.Frame{Kind: core.FrameBlock, Transfer: uint64(s), Index: uint32(i), Count: each,
					Data: make([]byte, 5000)}
			}
			assert.NoError(t, a.Send(frames...))
		})
	}
	for range senders {
		first, err := b.Recv()
		require.NoError(t, err)
		for i := 1; i < each; i++ {
			f, err := b.Recv()
			require.NoError(t, err)
			require.Equal(t, first.Transfer, f.Transfer)
			require.EqualValues(t, i, f.Index)
		}
	}
	wg.Wait()
}

func TestPipeEnds(t *testing.T) {
	t.Run("between frames with EOF", func(t *testing.T) {
		a, b := pipes(t)
		require.NoError(t, a.Send(core.Frame{Kind: core.FrameHello}))
		require.NoError(t, a.Close())
		_, err := b.Recv()
		require.NoError(t, err)
		_, err = b.Recv()
		assert.ErrorIs(t, err, io.EOF)
		assert.Error(t, a.Send(core.Frame{Kind: core.FrameHello}))
	})
	t.Run("within a frame with an error", func(t *testing.T) {
		whole := frameBytes(t, core.Frame{Kind: core.FrameHello, Data: []byte("0123456789")})
		_, err := core.NewPipe(readOnly{bytes.NewReader(whole[:len(whole)-1])}).Recv()
		assert.ErrorIs(t, err, io.ErrUnexpectedEOF)
	})
	t.Run("too much data is not sent", func(t *testing.T) {
		a, _ := pipes(t)
		assert.ErrorIs(t, a.Send(core.Frame{Kind: core.FrameBlock, Count: 1, Data: make([]byte, core.MaxFrame+1)}),
			core.ErrFrame)
	})
}

// TestPipeRefusesWhatIsNoFrame flips each byte of a good one: no flip may go unnoticed, but in the fields that are free
// to be anything.
func TestPipeRefusesWhatIsNoFrame(t *testing.T) {
	good := frameBytes(t, core.Frame{Kind: core.FrameBlock, Count: 1, Data: []byte("kv of a block")})
	for i := range good {
		if i >= 8 && i < 32 || i >= 36 && i < 40 { // transfer, key, count
			continue
		}
		bad := bytes.Clone(good)
		bad[i] ^= 0xff
		_, err := core.NewPipe(readOnly{bytes.NewReader(bad)}).Recv()
		assert.Error(t, err, "byte %d", i)
	}
}

type readOnly struct{ io.Reader }

func (readOnly) Write(p []byte) (int, error) { return len(p), nil }
func (readOnly) Close() error                { return nil }

type writeOnly struct{ io.Writer }

func (writeOnly) Read([]byte) (int, error) { return 0, io.EOF }
func (writeOnly) Close() error             { return nil }

func frameBytes(t testing.TB, f core.Frame) []byte {
	var b bytes.Buffer
	require.NoError(t, core.NewPipe(writeOnly{&b}).Send(f))
	return b.Bytes()
}

func FuzzPipeRecv(f *testing.F) {
	good := frameBytes(f, core.Frame{Kind: core.FrameBlock, Transfer: 7, Count: 2, Index: 1, Data: []byte("kv")})
	f.Add(good)
	f.Add(append(bytes.Clone(good), good...))
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, data []byte) {
		p := core.NewPipe(readOnly{bytes.NewReader(data)})
		rest := data
		for {
			frame, err := p.Recv()
			if err != nil {
				return
			}
			// What was accepted is what would be sent.
			again := frameBytes(t, frame)
			require.LessOrEqual(t, len(again), len(rest))
			require.Equal(t, rest[:len(again)], again)
			rest = rest[len(again):]
		}
	})
}

// TestLookupBufferServesAnyOrder is why the buffer is there: P sends A, B, C and D asks for C first.
func TestLookupBufferServesAnyOrder(t *testing.T) {
	names := []string{"A", "B", "C"}
	key := func(name string) core.TokenKey { return core.KeyOf([]int32{int32(name[0])}) }
	kv := func(name string) core.KV { return core.KV{Blocks: [][]byte{[]byte(name)}} }
	for _, order := range [][]string{{"A", "B", "C"}, {"C", "A", "B"}, {"C", "B", "A"}, {"B", "C", "A"}} {
		b := core.NewLookupBuffer()
		for _, name := range names {
			b.Insert(key(name), kv(name))
		}
		for _, name := range order {
			got, err := b.DropSelect(t.Context(), key(name), 0)
			require.NoError(t, err)
			assert.Equal(t, kv(name), got)
		}
		assert.Zero(t, b.Len())

		var wg sync.WaitGroup
		for _, name := range order {
			wg.Go(func() { // asks before it is there
				got, err := b.DropSelect(t.Context(), key(name), 0)
				assert.NoError(t, err)
				assert.Equal(t, kv(name), got)
			})
		}
		for _, name := range names {
			b.Insert(key(name), kv(name))
		}
		wg.Wait()
		assert.Zero(t, b.Len())
	}
}

func TestLookupBufferDropsWhatItSelects(t *testing.T) {
	b := core.NewLookupBuffer()
	key := core.KeyOf([]int32{1, 2, 3})
	b.Insert(key, core.KV{Request: 1})
	_, err := b.DropSelect(t.Context(), key, 1)
	require.NoError(t, err)
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer stop()
	_, err = b.DropSelect(ctx, key, 1)
	assert.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestLookupBufferTellsEqualTokensApart(t *testing.T) {
	b := core.NewLookupBuffer()
	key := core.KeyOf([]int32{1})
	for _, first := range []string{"sent", "asked"} {
		var wg sync.WaitGroup
		ask := func() {
			for _, request := range []uint64{2, 3, 1} {
				wg.Go(func() {
					got, err := b.DropSelect(t.Context(), key, request)
					assert.NoError(t, err)
					assert.Equal(t, request, got.Request)
				})
			}
		}
		if first == "asked" {
			ask()
			time.Sleep(10 * time.Millisecond)
		}
		for _, request := range []uint64{1, 2, 3} {
			b.Insert(key, core.KV{Request: request})
		}
		if first == "sent" {
			ask()
		}
		wg.Wait()
		assert.Zero(t, b.Len())
	}
	b.Insert(key, core.KV{Request: 9})
	b.Discard(key, 8)
	assert.Equal(t, 1, b.Len())
	b.Discard(key, 9)
	assert.Zero(t, b.Len())
}

func TestLookupBufferPassesErrorsAndCloses(t *testing.T) {
	b := core.NewLookupBuffer()
	key, broken := core.KeyOf([]int32{1}), errors.New("broken")
	b.Insert(key, core.KV{Err: broken})
	_, err := b.DropSelect(t.Context(), key, 0)
	assert.ErrorIs(t, err, broken)

	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := b.DropSelect(t.Context(), key, 0)
		assert.ErrorIs(t, err, core.ErrBufferClosed)
	})
	time.Sleep(5 * time.Millisecond)
	b.Close()
	wg.Wait()
	_, err = b.DropSelect(t.Context(), key, 0)
	assert.ErrorIs(t, err, core.ErrBufferClosed)
	b.Insert(key, core.KV{})
	assert.Zero(t, b.Len())
}

// TestLookupBufferLosesNothing under concurrent asks that give up.
func TestLookupBufferLosesNothing(t *testing.T) {
	b := core.NewLookupBuffer()
	key := core.KeyOf([]int32{1})
	const all = 500
	var wg sync.WaitGroup
	var taken atomic.Int64
	for range all {
		wg.Go(func() {
			ctx, stop := context.WithTimeout(t.Context(), time.Millisecond)
			defer stop()
			if _, err := b.DropSelect(ctx, key, 0); err == nil {
				taken.Add(1)
			}
		})
		wg.Go(func() { b.Insert(key, core.KV{}) })
	}
	wg.Wait()
	assert.Equal(t, all, int(taken.Load())+b.Len())
}
