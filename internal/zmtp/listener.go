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

	"github.com/pdkit/pdkit/internal/relisten"
)

const (
	// handshakeTimeout bounds a peer's handshake, which needs a round trip.
	handshakeTimeout = 10 * time.Second
	// maxPeers bounds connections. There is at most one for each rank of each engine. When there are more, the oldest
	// connection without a useful message is closed, so that unused connections do not keep engines out.
	maxPeers = 4096
)

// ErrClosed is what [Listener.Err] returns after Close.
var ErrClosed = errors.New("zmtp: the listener was closed")

// Config says which peers a listener accepts, and who gets their messages.
type Config struct {
	Socket string   // the listener's socket type, which it announces to peers: PULL, ROUTER
	Peers  []string // the socket types of accepted peers: PUSH, DEALER

	// Peer is called for each accepted peer and returns the function that takes the peer's messages. body is the one
	// frame of a message, and is valid until the function returns; nil stands for a message of several frames. The
	// function returns true if the message was useful; a peer with a useful message is not closed to make room. The
	// functions of several peers run at once. A slow function delays only its own peer. It must return soon after gone
	// is closed, which happens when the peer has gone, was closed to make room, or by Close.
	Peer func(gone <-chan struct{}) func(body []byte) (told bool)

	// Serve, if it is not nil, is called in place of Peer for each accepted peer, and reads its messages, within
	// Limits. The connection ends when Serve returns; Serve must return soon after a method of c has failed. useful
	// keeps the peer from being closed to make room.
	Serve  func(c *Conn, useful func())
	Limits Limits

	// Refused is called for each connection that was closed because its peer does not speak ZMTP 3, has another socket
	// type, sends too large frames, is too slow, or is one too many. Several goroutines may call it at once.
	Refused func()
}

// Listener receives messages at one address.
type Listener struct {
	cfg    Config
	ln     *relisten.Listener
	closed chan struct{}
	once   sync.Once
	wg     sync.WaitGroup

	mu     sync.Mutex
	peers  map[net.Conn]*peer
	silent list.List // of net.Conn without a useful message, oldest first
}

// peer is an accepted connection.
type peer struct {
	silent *list.Element // its place in Listener.silent, or nil
	gone   chan struct{} // closed when the connection is dropped
}

// Listen opens a listener at HOST:PORT. ctx bounds only the opening. The caller must call Close.
func Listen(ctx context.Context, address string, cfg Config) (*Listener, error) {
	ln, err := relisten.Listen(ctx, address)
	if err != nil {
		return nil, err
	}
	return On(ln, cfg), nil
}

// On does what [Listen] does, with an open listener, which then belongs to the Listener.
func On(ln *relisten.Listener, cfg Config) *Listener {
	l := &Listener{cfg: cfg, ln: ln, closed: make(chan struct{}), peers: map[net.Conn]*peer{}}
	l.wg.Go(l.accept)
	return l
}

// Addr returns the listener's address.
func (l *Listener) Addr() net.Addr { return l.ln.Addr() }

// Done returns a channel that Close closes.
func (l *Listener) Done() <-chan struct{} { return l.closed }

// Err returns why no peer can be accepted at present, or nil. After an error other than
// [ErrClosed] the listener binds its address again by itself.
func (l *Listener) Err() error {
	select {
	case <-l.closed:
		return ErrClosed
	default:
		return l.ln.Err()
	}
}

// Fail closes the socket as if it had died. Only tests call it.
func (l *Listener) Fail() { l.ln.Fail() }

// Close frees the address, ends all connections, and waits for all goroutines of the listener. It may be called several
// times.
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

// accept accepts peers and serves each in a goroutine, so that none can stop the others.
func (l *Listener) accept() {
	for {
		conn, err := l.ln.Accept()
		if err != nil {
			return // only Close ends it
		}
		l.admit(conn)
	}
}

func (l *Listener) admit(conn net.Conn) {
	l.mu.Lock()
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
		_ = refused.Close() // its goroutine ends because of that
		l.cfg.Refused()
	}
}

// oldestSilent drops the oldest connection without a useful message and returns it; it returns conn itself if there is
// none. The caller holds the lock.
func (l *Listener) oldestSilent(conn net.Conn) net.Conn {
	if oldest := l.silent.Front(); oldest != nil {
		conn = oldest.Value.(net.Conn) //nolint:errcheck,forcetypeassert // the list holds nothing else
		l.drop(conn)
	}
	return conn
}

// drop removes a peer. The caller holds the lock.
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

// told records a useful message, so that the peer is not closed to make room.
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
	if err == nil && l.cfg.Serve != nil {
		l.cfg.Serve(newConn(conn, r, l.cfg.Limits), func() { l.told(conn) })
		return
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
