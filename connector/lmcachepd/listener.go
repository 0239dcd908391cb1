// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"bufio"
	"container/list"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/listen"
)

const (
	// handshakeTimeout bounds a peer's handshake. A PUSH socket needs a round trip.
	handshakeTimeout = 10 * time.Second
	// maxPeers bounds connections; there is one for each rank of each prefill engine. Where there are more, the oldest of those that never
	// told a session anything makes room: connections that nobody uses must not keep engines out.
	maxPeers = 4096
)

var errClosed = errors.New("lmcachepd: the notice listener was closed")

// shared are the listeners of the process, by address. Ids are random, so that the flows which share one cannot take each other's notices.
var shared listen.Shared[*listener]

// Notices counts messages since a listener was opened.
type Notices struct {
	Matched   int64 // of sessions that wait, or will
	Surplus   int64 // further ones of a session that has had all of its
	Unknown   int64 // of sessions that are over, of other gateways, or of nobody
	Malformed int64 // not notices at all
	Refused   int64 // connections of peers that do not speak ZMTP as a PUSH socket, or are too many
}

// listener takes notices at one address.
type listener struct {
	ln     net.Listener
	closed chan struct{}
	wg     sync.WaitGroup

	mu      sync.Mutex
	peers   map[net.Conn]*list.Element // of silent; nil of those that have told a session something
	silent  list.List                  // of net.Conn, oldest first
	waiting map[string]*waiter
	counts  Notices
	failed  error // why nothing is accepted any more
}

// waiter is a session that notices are expected for.
type waiter struct {
	missing int
	came    chan struct{} // closed when none is missing
	event   connector.Event
}

// acquire returns the listener of an address, opened if it is the first. Port 0 gives one of its own.
func acquire(ctx context.Context, address string) (*listener, error) {
	l, err := shared.Acquire(ctx, address, func(ln net.Listener) *listener {
		l := &listener{ln: ln, closed: make(chan struct{}), peers: map[net.Conn]*list.Element{}, waiting: map[string]*waiter{}}
		l.wg.Go(l.accept)
		return l
	})
	if err != nil {
		return nil, fmt.Errorf("lmcachepd: notifyListen: %w", err)
	}
	return l, nil
}

// release gives a listener back, and closes it when its last user leaves.
func (l *listener) release() { shared.Release(l, l.end) }

// end closes a listener and waits for all that it has started.
func (l *listener) end() {
	close(l.closed)
	_ = l.ln.Close()
	l.mu.Lock()
	for conn := range l.peers {
		_ = conn.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// accept lets peers in, each served by itself, so that none can stop the others.
func (l *listener) accept() {
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
			l.failed = errClosed
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

func (l *listener) admit(conn net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = nil
	select {
	case <-l.closed:
		_ = conn.Close()
		return
	default:
	}
	if len(l.peers) >= maxPeers && !l.makeRoom() {
		l.counts.Refused++
		_ = conn.Close()
		return
	}
	l.peers[conn] = l.silent.PushBack(conn)
	l.wg.Go(func() { l.serve(conn) })
}

// makeRoom ends the oldest of the peers that have told nothing. The caller holds the lock.
func (l *listener) makeRoom() bool {
	oldest := l.silent.Front()
	if oldest == nil {
		return false
	}
	conn := oldest.Value.(net.Conn) //nolint:errcheck,forcetypeassert // the list holds nothing else
	l.drop(conn)
	l.counts.Refused++
	_ = conn.Close() // what serves it ends of that
	return true
}

// drop forgets a peer. The caller holds the lock.
func (l *listener) drop(conn net.Conn) {
	if e := l.peers[conn]; e != nil {
		l.silent.Remove(e)
	}
	delete(l.peers, conn)
}

func (l *listener) serve(conn net.Conn) {
	defer func() {
		_ = conn.Close()
		l.mu.Lock()
		l.drop(conn)
		l.mu.Unlock()
	}()
	r := bufio.NewReaderSize(conn, 512)
	err := conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err == nil {
		err = handshake(conn, r)
	}
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err == nil {
		err = readMessages(conn, r, func(raw []byte) { l.take(conn, raw) })
	}
	if errors.Is(err, errPeer) || errors.Is(err, os.ErrDeadlineExceeded) { // else the peer has gone
		l.mu.Lock()
		l.counts.Refused++
		l.mu.Unlock()
	}
}

// take gives a message to the session it is for.
func (l *listener) take(from net.Conn, raw []byte) {
	id, ok := readNotice(raw)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ok {
		l.counts.Malformed++
		return
	}
	w := l.waiting[id]
	switch {
	case w == nil:
		l.counts.Unknown++
	case w.missing == 0:
		l.counts.Surplus++
	default:
		l.counts.Matched++
		if e := l.peers[from]; e != nil {
			l.silent.Remove(e)
			l.peers[from] = nil
		}
		if w.missing--; w.missing == 0 {
			w.event = connector.Event{Body: append([]byte(nil), raw...), At: time.Now()}
			close(w.came)
		}
	}
}

// expect arms a session; forget must follow. Nothing is kept of others, so that lost and late notices cost no memory.
func (l *listener) expect(id string, notices int) *waiter {
	w := &waiter{missing: max(notices, 1), came: make(chan struct{})}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting[id] = w
	return w
}

func (l *listener) forget(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, id)
}

func (l *listener) counted() Notices {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts
}

func (l *listener) health() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}
