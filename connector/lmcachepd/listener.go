// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/listen"
	"github.com/pdkit/pdkit/internal/relisten"
	"github.com/pdkit/pdkit/internal/zmtp"
)

var errClosed = errors.New("lmcachepd: the notice listener was closed")

// shared are the listeners of this process, by address. Flows that share a listener cannot take each other's notices,
// since the ids are random.
var shared listen.Shared[*listener]

// Notices counts messages since a listener was opened.
type Notices struct {
	Matched   int64 // for sessions that wait or will wait
	Surplus   int64 // for sessions that already have all of their notices
	Unknown   int64 // for sessions that are over, for other gateways' sessions, or for none
	Malformed int64 // messages that are not notices
	Refused   int64 // connections of peers that do not speak ZMTP as a PUSH socket, or are too many
}

// listener receives notices at one address.
type listener struct {
	*zmtp.Listener

	mu      sync.Mutex
	waiting map[string]*waiter
	counts  Notices
}

// waiter is a session that expects notices.
type waiter struct {
	missing int
	came    chan struct{} // closed when all notices have come
	event   connector.Event
}

// acquire returns the listener of an address. The first caller opens it. With port 0 each caller gets its own.
func acquire(ctx context.Context, address string) (*listener, error) {
	l, err := shared.Acquire(ctx, address, func(ln *relisten.Listener) *listener {
		l := &listener{waiting: map[string]*waiter{}}
		l.Listener = zmtp.On(ln, zmtp.Config{
			Socket: "PULL", Peers: []string{"PUSH"},
			Peer: func(<-chan struct{}) func([]byte) bool { return l.take }, Refused: l.refused,
		})
		return l
	})
	if err != nil {
		return nil, fmt.Errorf("lmcachepd: notifyListen: %w", err)
	}
	return l, nil
}

// release gives a listener back. The last user's release closes it.
func (l *listener) release() { shared.Release(l, l.Close) }

func (l *listener) refused() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Refused++
}

// take gives a message to its session.
func (l *listener) take(raw []byte) (told bool) {
	id, ok := readNotice(raw)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ok {
		l.counts.Malformed++
		return false
	}
	w := l.waiting[id]
	switch {
	case w == nil:
		l.counts.Unknown++
	case w.missing == 0:
		l.counts.Surplus++
	default:
		l.counts.Matched++
		told = true
		if w.missing--; w.missing == 0 {
			w.event = connector.Event{Body: append([]byte(nil), raw...), At: time.Now()}
			close(w.came)
		}
	}
	return told
}

// expect registers a session; forget must follow. The listener keeps nothing for other sessions, so lost and late
// notices cost no memory.
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
	switch err := l.Err(); {
	case errors.Is(err, zmtp.ErrClosed):
		return errClosed
	case err != nil:
		return fmt.Errorf("lmcachepd: the notice listener has failed and is being restarted: %w", err)
	}
	return nil
}
