// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Hello opens a side channel: it says who talks, and what the blocks look like.
type Hello struct {
	EngineID   string `json:"engine_id"`
	Blocks     int    `json:"blocks"`
	BlockBytes int    `json:"block_bytes"`
	// Compat stands for all that must be equal for KV to make sense elsewhere, as the compatibility hash of vLLM's
	// handshake does.
	Compat uint64 `json:"compatibility"`
}

// AskMessage asks for blocks: of a request by their ids, or of an offer by its name, from the First of it on.
type AskMessage struct {
	Request string  `json:"request,omitempty"`
	Blocks  []int64 `json:"blocks,omitempty"`
	Name    string  `json:"name,omitempty"`
	First   int     `json:"first,omitempty"`
	Count   int     `json:"count,omitempty"`
}

func (m *AskMessage) count() int {
	if m.Name != "" {
		return m.Count
	}
	return len(m.Blocks)
}

// RequestMessage names a handoff by the request that made it, or by the name of its offer.
type RequestMessage struct {
	Request string `json:"request,omitempty"`
	Name    string `json:"name,omitempty"`
}

// Peer is another engine that this one reads KV from: one pipe, on which many requests' blocks arrive in the order the
// other side sends them, and one lookup buffer in which each request finds its own.
type Peer struct {
	wire   *Wire
	hello  Hello
	pipe   *core.Pipe
	buffer *core.LookupBuffer
	gone   chan struct{}

	mu   sync.Mutex
	last uint64
	asks map[uint64]*ask
}

// ask is an exchange that has not been answered yet.
type ask struct {
	key      core.TokenKey
	blocks   [][]byte
	missing  int
	released chan struct{} // for a release, in place of blocks
}

// shakeHands checks who answers on a pipe, and starts receiving. An empty id takes any engine.
func shakeHands(ctx context.Context, c *Wire, id string, pipe *core.Pipe) (*Peer, error) {
	stop := context.AfterFunc(ctx, func() { _ = pipe.Close() })
	defer stop()
	theirs, err := Greet(pipe, c.Host.Hello())
	if err == nil && id != "" && theirs.EngineID != id {
		err = errOtherEngine
	}
	if err != nil {
		_ = pipe.Close()
		return nil, err
	}
	p := &Peer{wire: c, hello: theirs, pipe: pipe, buffer: core.NewLookupBuffer(), gone: make(chan struct{}),
		asks: map[uint64]*ask{}}
	if !c.Spawn(p.receive) {
		_ = pipe.Close()
		return nil, core.ErrKilled
	}
	return p, nil
}

// Greet sends one side's hello and checks that the other side's fits.
func Greet(pipe *core.Pipe, mine Hello) (theirs Hello, err error) {
	data, err := json.Marshal(mine)
	if err == nil {
		err = pipe.Send(core.Frame{Kind: core.FrameHello, Data: data})
	}
	var f core.Frame
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

func (p *Peer) alive() bool {
	select {
	case <-p.gone:
		return false
	default:
		return true
	}
}

func (p *Peer) close() {
	_ = p.pipe.Close()
}

// receive puts whole KVs into the lookup buffer, until the pipe ends.
func (p *Peer) receive() {
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

func (p *Peer) accept(f core.Frame) {
	a := p.asks[f.Transfer]
	if a == nil { // its request has left
		return
	}
	switch {
	case f.Kind == core.FrameReleased && a.released != nil:
		close(a.released)
	case f.Kind == core.FrameError && a.blocks != nil:
		p.buffer.Insert(a.key, core.KV{Request: f.Transfer, Err: ErrOutOfRange})
	case f.Kind == core.FrameBlock && int(f.Count) == len(a.blocks) && a.blocks[f.Index] == nil &&
		len(f.Data) == p.hello.BlockBytes:
		a.blocks[f.Index] = f.Data
		if a.missing--; a.missing > 0 {
			return
		}
		p.buffer.Insert(f.Key, core.KV{Request: f.Transfer, Blocks: a.blocks})
	default:
		return
	}
	delete(p.asks, f.Transfer)
}

// send registers an exchange and sends its first frame. It does not hold the lock while it sends, so that a full pipe
// cannot stop the receiver.
func (p *Peer) send(kind core.FrameKind, a *ask, message any) (uint64, error) {
	data, err := json.Marshal(message)
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	p.last++
	id := p.last
	p.asks[id] = a
	p.mu.Unlock()
	return id, p.pipe.Send(core.Frame{Kind: kind, Transfer: id, Key: a.key, Data: data})
}

func (p *Peer) drop(id uint64) {
	p.mu.Lock()
	delete(p.asks, id)
	p.mu.Unlock()
}

// Ask fetches blocks for a prompt. When ctx ends first, it tells the other side to let go of them.
func (p *Peer) Ask(ctx context.Context, prompt core.TokenKey, m AskMessage) ([][]byte, error) {
	for _, id := range m.Blocks {
		if id < 0 || id > int64(p.hello.Blocks) {
			return nil, &core.LoadError{Failures: 2, Err: ErrOutOfRange}
		}
	}
	if m.count() == 0 {
		return nil, nil
	}
	gone := &core.LoadError{Failures: 2, Notifications: 1, Err: ErrPeerGone}
	a := &ask{key: prompt, blocks: make([][]byte, m.count()), missing: m.count()}
	id, err := p.send(core.FrameAsk, a, m)
	if err != nil {
		p.drop(id)
		return nil, gone
	}
	kv, err := p.buffer.DropSelect(ctx, prompt, id)
	switch {
	case err == nil:
		return kv.Blocks, nil
	case errors.Is(err, core.ErrBufferClosed):
		return nil, gone
	case ctx.Err() != nil:
		p.drop(id)
		p.buffer.Discard(prompt, id)
		if p.wire.Silenced() {
			return nil, err
		}
		p.wire.Spawn(func() {
			rest, stop := context.WithTimeout(p.wire.Ctx, p.wire.Host.Core.Lease())
			defer stop()
			_ = p.Release(rest, RequestMessage{Request: m.Request, Name: m.Name})
		})
		return nil, err
	}
	return nil, &core.LoadError{Failures: 2, Err: err}
}

// Release tells the other engine that a handoff is done with, and waits until it knows.
func (p *Peer) Release(ctx context.Context, m RequestMessage) error {
	a := &ask{released: make(chan struct{})}
	id, err := p.send(core.FrameRelease, a, m)
	if err != nil {
		p.drop(id)
		return err
	}
	limit := time.NewTimer(p.wire.Host.Handshake)
	defer limit.Stop()
	select {
	case <-a.released:
		return nil
	case <-p.gone:
		err = ErrPeerGone
	case <-limit.C:
		err = ErrHandshake
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	p.drop(id)
	return err
}

// Heartbeat extends the lease of a request on the other engine.
func (p *Peer) Heartbeat(request string) {
	data, err := json.Marshal(RequestMessage{Request: request})
	if err == nil {
		_ = p.pipe.Send(core.Frame{Kind: core.FrameHeartbeat, Data: data})
	}
}
