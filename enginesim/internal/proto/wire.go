// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Wire is an engine's way to the KV of other engines: the side channel from which others read, and the connections on
// which this engine reads from them. All protocols that move KV from engine to engine share it.
//
// KV is read in one of two ways. By block ids, as in NIXL's pull: the reader was told which blocks to read. By name, as
// in all rendezvous protocols: both legs were given the same id, the reader asks for it, and the other side gives what
// it offers under that id, or waits until it offers something.
type Wire struct {
	Host *Host
	Core *core.Core
	Side *side

	Ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[string]*peerSlot
}

// peerSlot is the connection to one engine. The first request that needs it makes it.
type peerSlot struct {
	busy chan struct{} // holds one item while somebody is at it
	peer *Peer
}

// Options say how a protocol differs from others on the wire.
type Options struct {
	// Lease is how long handoffs pin their blocks; 0: as long as the engine says.
	Lease time.Duration
	// Writes says that the engine whose blocks are read moves the bytes, and counts them.
	Writes bool
	// Named, if set, answers a read by name in place of GiveOffered, in a goroutine of its own.
	Named func(pipe *core.Pipe, f core.Frame, m AskMessage)
	// Left, if set, is called when a reader gives up a name that nobody has offered.
	Left func(name string)
}

// StartWire opens the side channel of an engine, unless the settings that were read are wrong.
func StartWire(set *Settings, options Options) (*Wire, error) {
	h := set.host
	if err := set.Err(); err != nil {
		return nil, err
	}
	if options.Lease > 0 {
		h.Core.SetLease(options.Lease)
	}
	pipes, err := ListenPipes(h.SideChannel)
	if err != nil {
		return nil, err
	}
	w := &Wire{Host: h, Core: h.Core, Side: &side{PipeServer: pipes, Options: options, host: h},
		peers: map[string]*peerSlot{}}
	w.Ctx, w.cancel = context.WithCancel(context.Background())
	pipes.Serve(w.Side.serve)
	return w, nil
}

// SideAddress is where the side channel listens, for Restart to take it again.
func (w *Wire) SideAddress() string { return w.Side.ln.Addr().String() }

// Spawn starts work that Close waits for. It returns false when it is too late for that.
func (w *Wire) Spawn(work func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.wg.Go(work)
	}
	return !w.closed
}

// Silenced reports whether this engine can tell others nothing any more.
func (w *Wire) Silenced() bool {
	why := w.Host.Ended()
	return errors.Is(why, core.ErrKilled) || errors.Is(why, core.ErrCoreDead)
}

// Rejected does nothing: most protocols tell nobody of a request that the API refused.
func (w *Wire) Rejected(context.Context, core.Params) {}

// Freeze stops serving other engines, or goes on.
func (w *Wire) Freeze(frozen bool) { w.Side.Gate.Set(frozen) }

// Close ends all connections and waits for what Spawn has started.
func (w *Wire) Close() {
	w.cancel()
	w.Side.Close()
	w.mu.Lock()
	w.closed = true
	slots := make([]*peerSlot, 0, len(w.peers))
	for _, slot := range w.peers {
		slots = append(slots, slot)
	}
	w.mu.Unlock()
	for _, slot := range slots {
		slot.busy <- struct{}{}
		if slot.peer != nil {
			slot.peer.close()
		}
		<-slot.busy
	}
	w.wg.Wait()
}

// Place is where another engine's side channel is. Without an id any engine that answers there will do.
type Place struct {
	ID, Host, Port string
}

func (p Place) key() string {
	if p.ID != "" {
		return p.ID
	}
	return net.JoinHostPort(p.Host, p.Port)
}

// Connect returns the connection to another engine. It tries a first contact until the handshake's time-out, and a
// connection that broke once more, at once.
func (w *Wire) Connect(ctx context.Context, to Place) (*Peer, error) {
	w.mu.Lock()
	slot := w.peers[to.key()]
	if slot == nil {
		slot = &peerSlot{busy: make(chan struct{}, 1)}
		w.peers[to.key()] = slot
	}
	w.mu.Unlock()

	select {
	case slot.busy <- struct{}{}:
		defer func() { <-slot.busy }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	broken := slot.peer != nil
	if broken && slot.peer.alive() {
		return slot.peer, nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, w.Host.Handshake, ErrHandshake)
	defer stop()
	unhook := context.AfterFunc(w.Ctx, stop)
	defer unhook()
	for {
		p, err := w.dial(ctx, to)
		switch {
		case err == nil:
			if broken {
				slot.peer.close()
			}
			slot.peer = p
			return p, nil
		case errors.Is(err, errOtherEngine):
			return nil, &core.LoadError{Failures: 1, Err: err}
		case broken:
			return nil, &core.LoadError{Failures: 2, Notifications: 1, Err: ErrPeerGone}
		}
		if err := core.Sleep(ctx, 20*time.Millisecond); err != nil {
			if errors.Is(err, ErrHandshake) {
				return nil, &core.LoadError{Failures: 1, Err: err}
			}
			return nil, err
		}
	}
}

func (w *Wire) dial(ctx context.Context, to Place) (*Peer, error) {
	if _, err := strconv.Atoi(to.Port); err != nil || to.Host == "" {
		return nil, ErrNoAddress
	}
	pipe, err := Dial(ctx, to.Host, to.Port)
	if err != nil {
		return nil, err
	}
	return shakeHands(ctx, w, to.ID, pipe)
}

// Why KV could not be read from another engine.
var (
	ErrHandshake   = errors.New("no response from the other engine")
	errOtherEngine = errors.New("another engine answers there")
	ErrNoAddress   = errors.New("no address")
	ErrPeerGone    = errors.New("the other engine is gone")
	ErrOutOfRange  = errors.New("block ids out of range")
	ErrNothing     = errors.New("timed out waiting for KV")
)

// Offer lets other engines read a finished sequence's KV by name. It pins the blocks under the sequence's id until they
// are read or the lease ends, and ends the sequence.
func (w *Wire) Offer(s *core.Sequence, name string) {
	prompt := core.KeyOf(s.Tokens[:s.Prompt])
	w.Core.Pin(s, prompt)
	w.Side.Offers.Put(name, s.ID)
}

// ReadNamed fills the sequence's blocks with the KV that another engine offers under a name. It waits for the offer as
// long as ctx lasts, and tells the other engine when it gives up.
func (w *Wire) ReadNamed(ctx context.Context, s *core.Sequence, from Place, name string) error {
	p, err := w.Connect(ctx, from)
	if err != nil {
		return err
	}
	return w.ReadNamedOf(ctx, p, s, name)
}

// ReadNamedOf is ReadNamed from a peer that is connected. It asks even when ctx has ended, and then lets go.
func (w *Wire) ReadNamedOf(ctx context.Context, p *Peer, s *core.Sequence, name string) error {
	first := s.Computed / w.Core.BlockSize
	count := core.BlocksFor(s.Prompt, w.Core.BlockSize) - first
	return w.Take(ctx, p, s, s.Prompt, AskMessage{Name: name, First: first, Count: count})
}

// ReadRequest reads the blocks of a request by their ids, and tells the other engine that they were read.
func (w *Wire) ReadRequest(ctx context.Context, s *core.Sequence, from Place, request string, ids []int64) error {
	p, err := w.Connect(ctx, from)
	if err != nil {
		return err
	}
	return w.Take(ctx, p, s, s.Prompt, AskMessage{Request: request, Blocks: ids})
}

// Take reads the blocks that m names, and tells the other engine that they were read.
func (w *Wire) Take(ctx context.Context, p *Peer, s *core.Sequence, upto int, m AskMessage) error {
	if err := w.Fetch(ctx, p, s, upto, m); err != nil {
		return err
	}
	if p.Release(ctx, RequestMessage{Request: m.Request, Name: m.Name}) != nil {
		w.Core.Stats.Add(&w.Core.Stats.FailedNotifications, 1)
	}
	return nil
}

// Fetch reads the blocks that m names, and counts the sequence's tokens up to upto as computed.
func (w *Wire) Fetch(ctx context.Context, p *Peer, s *core.Sequence, upto int, m AskMessage) error {
	begun := time.Now()
	blocks, err := p.Ask(ctx, core.KeyOf(s.Tokens[:upto]), m)
	if err != nil {
		return err
	}
	w.Core.Fill(s, blocks, upto)
	if !w.Side.Writes {
		w.Core.Stats.Transferred(len(blocks)*w.Core.BlockBytes, len(blocks), time.Since(begun))
	}
	return nil
}

// LetGo tells another engine that nobody will read what m names.
func (w *Wire) LetGo(ctx context.Context, from Place, m RequestMessage) {
	if p, err := w.Connect(ctx, from); err == nil {
		_ = p.Release(ctx, m)
	}
}

// LetGoOf tells the other engine that nobody will read the handoff of params.
func (w *Wire) LetGoOf(ctx context.Context, params core.Params) {
	if Addressed(params) {
		w.LetGo(ctx, Remote(params), RequestMessage{Request: params.Text("remote_request_id")})
	}
}

// Briefly lets the engine tell others something within a second, unless it can tell nothing any more.
func (w *Wire) Briefly(tell func(ctx context.Context)) {
	if w.Silenced() {
		return
	}
	ctx, stop := context.WithTimeout(w.Ctx, time.Second)
	defer stop()
	tell(ctx)
}
