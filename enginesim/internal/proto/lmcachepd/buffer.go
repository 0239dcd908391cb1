// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"cmp"
	"encoding/json"
	"errors"
	"net"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

var errNoRoom = errors.New("the receiver has no room")

// allocMessage asks for room for chunks.
type allocMessage struct {
	Request string          `json:"req_id"`
	Keys    []core.TokenKey `json:"keys"`
	Ends    []int           `json:"ends"` // the token that each chunk ends before
}

// receiveBuffer is the memory into which senders write chunks, with its two ports.
//
// As with LMCache, a chunk is known as soon as there is room for it, before its bytes have come. A reader that comes
// too early reads what was there before.
type receiveBuffer struct {
	host        *proto.Host
	init, alloc *proto.PipeServer

	mu     sync.Mutex
	room   int // bytes
	chunks map[core.TokenKey][][]byte
}

func openReceiver(h *proto.Host, room int) (*receiveBuffer, error) {
	host, _, err := net.SplitHostPort(h.SideChannel)
	if err != nil {
		return nil, err
	}
	b := &receiveBuffer{host: h, room: room, chunks: map[core.TokenKey][][]byte{}}
	listen := func(key string) (*proto.PipeServer, error) {
		return proto.ListenPipes(net.JoinHostPort(host, cmp.Or(h.Extra[key], "0")))
	}
	if b.init, err = listen("pd_peer_init_port"); err != nil {
		return nil, err
	}
	if b.alloc, err = listen("pd_peer_alloc_port"); err != nil {
		b.init.Close()
		return nil, err
	}
	b.init.Serve(b.meet)
	b.alloc.Serve(b.receive)
	return b, nil
}

func (b *receiveBuffer) address() (host string, init, alloc int) {
	host, init = b.init.Address()
	_, alloc = b.alloc.Address()
	return host, init, alloc
}

// meet answers a sender's hello at the init port.
func (b *receiveBuffer) meet(pipe *core.Pipe) {
	if f, err := pipe.Recv(); err != nil || f.Kind != core.FrameHello {
		return
	}
	if data, err := json.Marshal(b.host.Hello()); err == nil {
		_ = pipe.Send(core.Frame{Kind: core.FrameHello, Data: data})
		_, _ = pipe.Recv() // until the sender has read it and leaves
	}
}

// receive makes room for chunks at the alloc port, and lets the sender write them.
func (b *receiveBuffer) receive(pipe *core.Pipe) {
	f, err := pipe.Recv()
	var m allocMessage
	if err != nil || f.Kind != core.FrameAsk || json.Unmarshal(f.Data, &m) != nil || len(m.Keys) != len(m.Ends) {
		return
	}
	memory, ok := b.reserve(m)
	if !ok {
		_ = pipe.Send(core.Frame{Kind: core.FrameError})
		return
	}
	if pipe.Send(core.Frame{Kind: core.FrameReleased}) != nil {
		return
	}
	for range memory {
		f, err := pipe.Recv()
		if err != nil || f.Kind != core.FrameBlock || int(f.Index) >= len(memory) || !b.alloc.Gate.Pass() {
			return
		}
		b.mu.Lock()
		copy(memory[f.Index], f.Data)
		b.mu.Unlock()
	}
	_ = pipe.Send(core.Frame{Kind: core.FrameReleased})
}

// reserve makes room for all chunks or none, and makes them known.
func (b *receiveBuffer) reserve(m allocMessage) (memory [][]byte, ok bool) {
	size, width := b.host.Core.BlockSize, b.host.Core.BlockBytes
	b.mu.Lock()
	defer b.mu.Unlock()
	at, total := 0, 0
	for i, end := range m.Ends {
		if end <= at || end > b.host.MaxModelLen {
			return nil, false
		}
		if b.chunks[m.Keys[i]] == nil {
			total += core.BlocksFor(end-at, size)
		}
		at = end
	}
	if total*width > b.room {
		return nil, false
	}
	b.room -= total * width
	at = 0
	for i, key := range m.Keys {
		blocks := make([][]byte, core.BlocksFor(m.Ends[i]-at, size))
		for j := range blocks {
			blocks[j] = make([]byte, width)
		}
		at = m.Ends[i]
		memory = append(memory, blocks...)
		if b.chunks[key] == nil { // else it is there, and what comes is not kept
			b.chunks[key] = blocks
		}
	}
	return memory, true
}

// has counts how many of the chunks, from the first on, are known.
func (b *receiveBuffer) has(keys []core.TokenKey) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, key := range keys {
		if b.chunks[key] == nil {
			return i
		}
	}
	return len(keys)
}

// take returns a chunk's blocks and drops the chunk, as LMCache's receivers do after a read.
func (b *receiveBuffer) take(key core.TokenKey) (blocks [][]byte, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	held := b.chunks[key]
	if held == nil {
		return nil, false
	}
	for _, block := range held {
		blocks = append(blocks, append([]byte(nil), block...))
		b.room += len(block)
	}
	delete(b.chunks, key)
	return blocks, true
}

func (b *receiveBuffer) freeze(frozen bool) {
	b.init.Gate.Set(frozen)
	b.alloc.Gate.Set(frozen)
}

func (b *receiveBuffer) close() {
	b.init.Close()
	b.alloc.Close()
}
