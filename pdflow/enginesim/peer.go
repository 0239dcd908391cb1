// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync"
	"time"
)

// hello opens a side channel: who talks, and what the blocks look like.
type hello struct {
	EngineID   string `json:"engine_id"`
	Blocks     int    `json:"blocks"`
	BlockBytes int    `json:"block_bytes"`
	// Compat stands for all that must be equal for KV to make sense elsewhere, as
	// the compatibility hash of vLLM's handshake does.
	Compat uint64 `json:"compatibility"`
}

// askMessage asks for blocks: of a request by their ids, or of an offer by its
// name, from the First of it on.
type askMessage struct {
	Request string  `json:"request,omitempty"`
	Blocks  []int64 `json:"blocks,omitempty"`
	Name    string  `json:"name,omitempty"`
	First   int     `json:"first,omitempty"`
	Count   int     `json:"count,omitempty"`
}

func (m *askMessage) count() int {
	if m.Name != "" {
		return m.Count
	}
	return len(m.Blocks)
}

// requestMessage names a handoff by the request that made it, or by the name of
// its offer.
type requestMessage struct {
	Request string `json:"request,omitempty"`
	Name    string `json:"name,omitempty"`
}

// peer is another engine that this one reads KV from: one pipe, on which many
// requests' blocks arrive in the order the other side sends them, and one lookup
// buffer in which each request finds its own.
type peer struct {
	wire   *wire
	hello  hello
	pipe   *Pipe
	buffer *LookupBuffer
	gone   chan struct{}

	mu   sync.Mutex
	last uint64
	asks map[uint64]*ask
}

// ask is an exchange that has not been answered yet.
type ask struct {
	key      TokenKey
	blocks   [][]byte
	missing  int
	released chan struct{} // for a release, in place of blocks
}

// shakeHands checks who answers on conn, and starts receiving. An empty id takes
// any engine.
func shakeHands(ctx context.Context, c *wire, id string, conn net.Conn) (*peer, error) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	pipe := NewPipe(conn)
	theirs, err := greet(pipe, c.host.hello())
	if err == nil && id != "" && theirs.EngineID != id {
		err = errOtherEngine
	}
	if err != nil {
		_ = pipe.Close()
		return nil, err
	}
	p := &peer{wire: c, hello: theirs, pipe: pipe, buffer: NewLookupBuffer(), gone: make(chan struct{}), asks: map[uint64]*ask{}}
	if !c.spawn(p.receive) {
		_ = pipe.Close()
		return nil, errKilled
	}
	return p, nil
}

// greet sends one side's hello and checks that the other side's fits.
func greet(pipe *Pipe, mine hello) (theirs hello, err error) {
	data, err := json.Marshal(mine)
	if err == nil {
		err = pipe.Send(Frame{Kind: FrameHello, Data: data})
	}
	var f Frame
	if err == nil {
		f, err = pipe.Recv()
	}
	if err == nil {
		err = json.Unmarshal(f.Data, &theirs)
	}
	if err == nil && theirs.Compat != mine.Compat {
		err = errOtherEngine
	}
	return theirs, err
}

func (p *peer) alive() bool {
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

func (p *peer) close() {
	_ = p.pipe.Close()
}

// receive puts whole KVs into the lookup buffer, until the pipe ends.
func (p *peer) receive() {
	for {
		f, err := p.pipe.Recv()
		if err != nil {
			break
		}
		p.mu.Lock()
		p.accept(f)
		p.mu.Unlock()
	}
	_ = p.pipe.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.gone)
	p.buffer.Close()
	clear(p.asks)
}

func (p *peer) accept(f Frame) {
	a := p.asks[f.Transfer]
	if a == nil { // its request has left
		return
	}
	switch {
	case f.Kind == FrameReleased && a.released != nil:
		close(a.released)
	case f.Kind == FrameError && a.blocks != nil:
		p.buffer.Insert(a.key, KV{Request: f.Transfer, Err: errOutOfRange})
	case f.Kind == FrameBlock && int(f.Count) == len(a.blocks) && a.blocks[f.Index] == nil && len(f.Data) == p.hello.BlockBytes:
		a.blocks[f.Index] = f.Data
		if a.missing--; a.missing > 0 {
			return
		}
		p.buffer.Insert(f.Key, KV{Request: f.Transfer, Blocks: a.blocks})
	default:
		return
	}
	delete(p.asks, f.Transfer)
}

// send registers an exchange and sends its opening frame. The lock is not held
// while sending, so that a full pipe cannot stop the receiver.
func (p *peer) send(kind FrameKind, a *ask, message any) (uint64, error) {
	data, err := json.Marshal(message)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	p.last++
	id := p.last
	p.asks[id] = a
	p.mu.Unlock()
	return id, p.pipe.Send(Frame{Kind: kind, Transfer: id, Key: a.key, Data: data})
}

func (p *peer) drop(id uint64) {
	p.mu.Lock()
	delete(p.asks, id)
	p.mu.Unlock()
}

// ask fetches blocks for a prompt. When ctx ends first, the other side is told to
// let go; it will, as soon as it reads again.
func (p *peer) ask(ctx context.Context, prompt TokenKey, m askMessage) ([][]byte, error) {
	for _, id := range m.Blocks {
		if id < 0 || id > int64(p.hello.Blocks) {
			return nil, &loadError{failures: 2, err: errOutOfRange}
		}
	}
	if m.count() == 0 {
		return nil, nil
	}
	gone := &loadError{failures: 2, notifications: 1, err: errPeerGone}
	a := &ask{key: prompt, blocks: make([][]byte, m.count()), missing: m.count()}
	id, err := p.send(FrameAsk, a, m)
	if err != nil {
		p.drop(id)
		return nil, gone
	}
	kv, err := p.buffer.DropSelect(ctx, prompt, id)
	switch {
	case err == nil:
		return kv.Blocks, nil
	case errors.Is(err, ErrBufferClosed):
		return nil, gone
	case ctx.Err() != nil:
		p.drop(id)
		p.buffer.Discard(prompt, id)
		if p.wire.silenced() {
			return nil, err
		}
		p.wire.spawn(func() {
			rest, stop := context.WithTimeout(p.wire.ctx, p.wire.host.core.lease())
			defer stop()
			_ = p.release(rest, requestMessage{Request: m.Request, Name: m.Name})
		})
		return nil, err
	}
	return nil, &loadError{failures: 2, err: err}
}

// release tells the other engine that a handoff is done with, and waits until it
// knows.
func (p *peer) release(ctx context.Context, m requestMessage) error {
	a := &ask{released: make(chan struct{})}
	id, err := p.send(FrameRelease, a, m)
	if err != nil {
		p.drop(id)
		return err
	}
	limit := time.NewTimer(p.wire.host.handshake)
	defer limit.Stop()
	select {
	case <-a.released:
		return nil
	case <-p.gone:
		err = errPeerGone
	case <-limit.C:
		err = errHandshake
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	p.drop(id)
	return err
}

func (p *peer) heartbeat(request string) {
	data, err := json.Marshal(requestMessage{Request: request})
	if err == nil {
		_ = p.pipe.Send(Frame{Kind: FrameHeartbeat, Data: data})
	}
}
