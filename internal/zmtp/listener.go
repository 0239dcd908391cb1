// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"container/list"
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

const (
	// handshakeTimeout bounds a peer's handshake, which needs a round trip.
	handshakeTimeout = 10 * time.Second
	// maxPeers bounds connections; there is one for each rank of each engine at most. Where there are more, the oldest
	// of those that never told anything makes room: connections that nobody uses must not keep engines out.
	maxPeers = 4096
)

// ErrClosed is what [Listener.Err] returns after Close.
var ErrClosed = errors.New("zmtp: the listener was closed")

// Config says what a listener is for.
type Config struct {
	Socket string   // the listener's own socket type, as peers are told: PULL, ROUTER
	Peers  []string // the socket types that are let in: PUSH, DEALER

	// Peer is called for each peer that was let in, and returns what takes its messages: body is the one frame of a
	// message, and the function's only until it returns; nil stands for a message of several frames. It returns whether
	// the message told something: who has, is not sent away for others. The functions of different peers run at once. A
	// slow one holds up its own peer alone, but must end soon after gone, which is closed when the peer has gone, was
	// sent away, or by Close.
	Peer func(gone <-chan struct{}) func(body []byte) (told bool)

	// Refused is called for each connection that was sent away: a peer that does not speak ZMTP 3, is another socket,
	// sends what is too large, dawdles, or is too many. It may be called by several goroutines at once.
	Refused func()
}

// Listener takes messages at one address.
type Listener struct {
	cfg    Config
	ln     net.Listener
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup

	mu     sync.Mutex
	peers  map[net.Conn]*peer
	silent list.List // of net.Conn, those that have told nothing, oldest first
	failed error     // why nothing is accepted any more
}

// peer is a connection that was let in.
type peer struct {
	silent *list.Element // its place among those that have told nothing, or nil
	gone   chan struct{} // closed when it is forgotten
}

// Listen opens a listener at HOST:PORT. ctx bounds the opening alone; Close must follow.
func Listen(ctx context.Context, address string, cfg Config) (*Listener, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return On(ln, cfg), nil
}

// On is [Listen] on a listener that is open already, and the Listener's from now on.
func On(ln net.Listener, cfg Config) *Listener {
	l := &Listener{cfg: cfg, ln: ln, closed: make(chan struct{}), peers: map[net.Conn]*peer{}}
	l.wg.Go(l.accept)
	return l
}

// Addr is where it listens.
func (l *Listener) Addr() net.Addr { return l.ln.Addr() }

// Done is closed by Close.
func (l *Listener) Done() <-chan struct{} { return l.closed }

// Err says why no peer is accepted at present, or nil. Others than [ErrClosed] may pass.
func (l *Listener) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// Close gives the address back, ends all connections, and waits for all that the listener has started. It may be called
// several times.
func (l *Listener) Close() {
	l.once.Do(func() {
		close(l.closed)
		_ = l.ln.Close()
		l.mu.Lock()
		for conn := range l.peers {
			_ = conn.Close()
			l.drop(conn)
		}
		l.mu.Unlock()
	})
	l.wg.Wait()
}

// accept lets peers in, each served by itself, so that none can stop the others.
func (l *Listener) accept() {
	pause := time.Duration(0)
	for {
		conn, err := l.ln.Accept()
		switch {
		case err == nil:
			pause = 0
			l.admit(conn)
			continue
		case errors.Is(err, net.ErrClosed):
			l.mu.Lock()
			l.failed = ErrClosed
			l.mu.Unlock()
			return
		}
		// Out of file descriptors, most likely: others may give some back.
		l.mu.Lock()
		l.failed = err
		l.mu.Unlock()
		pause = min(max(2*pause, 5*time.Millisecond), time.Second)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-l.closed:
			timer.Stop()
		}
	}
}

func (l *Listener) admit(conn net.Conn) {
	l.mu.Lock()
	l.failed = nil
	select {
	case <-l.closed:
		l.mu.Unlock()
		_ = conn.Close()
		return
	default:
	}
	var refused net.Conn
	if len(l.peers) >= maxPeers {
		refused = l.oldestSilent(conn)
	}
	if refused != conn {
		p := &peer{silent: l.silent.PushBack(conn), gone: make(chan struct{})}
		l.peers[conn] = p
		l.wg.Go(func() { l.serve(conn, p) })
	}
	l.mu.Unlock()
	if refused != nil {
		_ = refused.Close() // what serves it ends of that
		l.cfg.Refused()
	}
}

// oldestSilent forgets the oldest of the peers that have told nothing, and returns it; conn itself if all have. The
// caller holds the lock.
func (l *Listener) oldestSilent(conn net.Conn) net.Conn {
	if oldest := l.silent.Front(); oldest != nil {
		conn = oldest.Value.(net.Conn) //nolint:errcheck,forcetypeassert // the list holds nothing else
		l.drop(conn)
	}
	return conn
}

// drop forgets a peer. The caller holds the lock.
func (l *Listener) drop(conn net.Conn) {
	p := l.peers[conn]
	if p == nil {
		return
	}
	if p.silent != nil {
		l.silent.Remove(p.silent)
	}
	close(p.gone)
	delete(l.peers, conn)
}

// told keeps a peer from being sent away for others.
func (l *Listener) told(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.peers[conn]; p != nil && p.silent != nil {
		l.silent.Remove(p.silent)
		p.silent = nil
	}
}

func (l *Listener) serve(conn net.Conn, p *peer) {
	defer func() {
		_ = conn.Close()
		l.mu.Lock()
		l.drop(conn)
		l.mu.Unlock()
	}()
	r := bufio.NewReaderSize(conn, 512)
	err := conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err == nil {
		err = handshake(conn, r, l.cfg.Socket, l.cfg.Peers)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err == nil {
		take, known := l.cfg.Peer(p.gone), false
		err = readMessages(conn, r, func(body []byte) {
			if take(body) && !known {
				known = true
				l.told(conn)
			}
		})
	}
	if errors.Is(err, errPeer) || errors.Is(err, os.ErrDeadlineExceeded) { // else the peer has gone
		l.cfg.Refused()
	}
}
