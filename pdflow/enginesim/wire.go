// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// wire is an engine's way to the KV of other engines, which all connectors that
// move KV from engine to engine share: the side channel from which others read,
// and the connections on which this engine reads from them.
//
// KV is read in one of two ways. By block ids, as NIXL's pull does: the reader
// was told where the blocks lie. By name, as all rendezvous protocols do: both
// legs were given the same id, the reader asks for it, and the other side gives
// what it has offered under that id, or waits until it offers it.
type wire struct {
	host *host
	core *core
	side *side

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[string]*peerSlot
}

// peerSlot is the connection to one engine, made by the first who needs it.
type peerSlot struct {
	turn chan struct{} // holds one item while somebody is at it
	peer *peer
}

// wireOptions say how a protocol differs from others on the wire.
type wireOptions struct {
	// writes says that the engine whose blocks are read moves the bytes, and counts them.
	writes bool
	// named, if set, answers a read by name in place of giveOffered, in a goroutine of its own.
	named func(pipe *Pipe, f Frame, m askMessage)
	// left, if set, is called when a reader gives up a name that nobody has offered.
	left func(name string)
}

func startWire(h *host, options wireOptions) (*wire, error) {
	w := &wire{host: h, core: h.core, peers: map[string]*peerSlot{}}
	w.ctx, w.cancel = context.WithCancel(context.Background())
	side, err := listenSide(h, options)
	if err != nil {
		w.cancel()
		return nil, err
	}
	w.side = side
	return w, nil
}

// sideAddress is where the side channel listens, for Restart to take it again.
func (w *wire) sideAddress() string { return w.side.ln.Addr().String() }

// spawn starts work that close waits for; false when it is too late for that.
func (w *wire) spawn(work func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.wg.Go(work)
	}
	return !w.closed
}

// silenced says whether this engine can tell others nothing any more.
func (w *wire) silenced() bool {
	why := w.host.ended()
	return errors.Is(why, errKilled) || errors.Is(why, errCoreDead)
}

// rejected does nothing: most protocols tell nobody of a request that the API refused.
func (w *wire) rejected(context.Context, kvParams) {}

func (w *wire) freeze(frozen bool) { w.side.freeze(frozen) }

func (w *wire) close() {
	w.cancel()
	w.side.close()
	w.mu.Lock()
	w.closed = true
	slots := make([]*peerSlot, 0, len(w.peers))
	for _, slot := range w.peers {
		slots = append(slots, slot)
	}
	w.mu.Unlock()
	for _, slot := range slots {
		slot.turn <- struct{}{}
		if slot.peer != nil {
			slot.peer.close()
		}
		<-slot.turn
	}
	w.wg.Wait()
}

// place is where another engine's side channel is. Without an id any engine that
// answers there will do.
type place struct {
	id, host, port string
}

func (p place) key() string {
	if p.id != "" {
		return p.id
	}
	return net.JoinHostPort(p.host, p.port)
}

// connect gives the connection to another engine. A first contact is tried until
// HandshakeTimeout; one that broke is tried once more, at once.
func (w *wire) connect(ctx context.Context, to place) (*peer, error) {
	w.mu.Lock()
	slot := w.peers[to.key()]
	if slot == nil {
		slot = &peerSlot{turn: make(chan struct{}, 1)}
		w.peers[to.key()] = slot
	}
	w.mu.Unlock()

	select {
	case slot.turn <- struct{}{}:
		defer func() { <-slot.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	broken := slot.peer != nil
	if broken && slot.peer.alive() {
		return slot.peer, nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, w.host.handshake, errHandshake)
	defer stop()
	unhook := context.AfterFunc(w.ctx, stop)
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
			return nil, &loadError{failures: 1, err: err}
		case broken:
			return nil, &loadError{failures: 2, notifications: 1, err: errPeerGone}
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			if errors.Is(err, errHandshake) {
				return nil, &loadError{failures: 1, err: err}
			}
			return nil, err
		}
	}
}

func (w *wire) dial(ctx context.Context, to place) (*peer, error) {
	if _, err := strconv.Atoi(to.port); err != nil || to.host == "" {
		return nil, errNoAddress
	}
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(to.host, to.port))
	if err != nil {
		return nil, err
	}
	return shakeHands(ctx, w, to.id, conn)
}

var (
	errHandshake   = errors.New("no answer from the other engine")
	errOtherEngine = errors.New("another engine answers there")
	errNoAddress   = errors.New("no address")
	errPeerGone    = errors.New("the other engine is gone")
	errOutOfRange  = errors.New("block ids out of range")
	errNothing     = errors.New("timed out waiting for KV")
)

// offer lets other engines read a finished sequence's KV by name. The blocks are
// pinned under the sequence's id until they are read or the lease ends; the
// sequence is over.
func (w *wire) offer(s *sequence, name string) {
	prompt := KeyOf(s.tokens[:s.prompt])
	w.core.pin(s, prompt)
	w.side.offers.put(name, s.id)
}

// readNamed fills the sequence's blocks with the KV that another engine offers,
// or will offer, under a name; it waits for that as long as ctx lasts. Leaving
// tells the other engine.
func (w *wire) readNamed(ctx context.Context, s *sequence, from place, name string) error {
	p, err := w.connect(ctx, from)
	if err != nil {
		return err
	}
	first := s.computed / w.core.blockSize
	count := blocksFor(s.prompt, w.core.blockSize) - first
	if err := w.fetch(ctx, p, s, s.prompt, askMessage{Name: name, First: first, Count: count}); err != nil {
		return err
	}
	if p.release(ctx, requestMessage{Name: name}) != nil {
		w.host.core.stats.add(&w.host.core.stats.FailedNotifications, 1)
	}
	return nil
}

// fetch reads the blocks that m names and takes the sequence's tokens up to upto for computed.
func (w *wire) fetch(ctx context.Context, p *peer, s *sequence, upto int, m askMessage) error {
	begun := time.Now()
	blocks, err := p.ask(ctx, KeyOf(s.tokens[:upto]), m)
	if err != nil {
		return err
	}
	w.core.fill(s, blocks, upto)
	if !w.side.writes {
		w.core.stats.transferred(len(blocks)*w.core.blockBytes, len(blocks), time.Since(begun))
	}
	return nil
}

// newClient is a client for an engine's own requests, which keeps no connection.
func newClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

// letGo tells another engine that nobody will read what it offers under a name.
func (w *wire) letGo(from place, name string) {
	if w.silenced() {
		return
	}
	ctx, stop := context.WithTimeout(w.ctx, time.Second)
	defer stop()
	if p, err := w.connect(ctx, from); err == nil {
		_ = p.release(ctx, requestMessage{Name: name})
	}
}
