// SPDX-License-Identifier: Apache-2.0

package lmcachepd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/zmtp"
)

var errClosed = errors.New("lmcachepd: the notice listener was closed")

// shared are the listeners of this process, by address. This is state of the package because the address is one of the machine: engines
// know one place to tell, whichever model they serve, and each model has a flow with a connector of its own. Ids are random, so that
// the flows cannot take each other's notices.
var shared = struct {
	sync.Mutex
	byAddress map[string]*listener
}{byAddress: map[string]*listener{}}

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
	*zmtp.Listener
	key   string // in shared; "" if it is nobody else's
	users int    // guarded by shared

	mu      sync.Mutex
	waiting map[string]*waiter
	counts  Notices
}

// waiter is a session that notices are expected for.
type waiter struct {
	missing int
	came    chan struct{} // closed when none is missing
	event   connector.Event
}

// acquire returns the listener of an address, opened if it is the first. Port 0 gives one of its own.
func acquire(ctx context.Context, address string) (*listener, error) {
	shared.Lock()
	defer shared.Unlock()
	key, alone := canonical(ctx, address)
	if l := shared.byAddress[key]; l != nil {
		l.users++
		return l, nil
	}
	l := &listener{users: 1, waiting: map[string]*waiter{}}
	var err error
	l.Listener, err = zmtp.Listen(ctx, address, zmtp.Config{
		Socket: "PULL", Peers: []string{"PUSH"},
		Peer: func(<-chan struct{}) func([]byte) { return l.take }, Refused: l.refused,
	})
	if err != nil {
		return nil, fmt.Errorf("lmcachepd: notifyListen: %w", err)
	}
	if !alone {
		l.key = key
		shared.byAddress[key] = l
	}
	return l, nil
}

// canonical spells an address so that localhost and 127.0.0.1 are one, and all ways to say "every address". alone tells that its port is
// any free one, which nobody can share.
func canonical(ctx context.Context, address string) (key string, alone bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address, false // Listen tells
	}
	if ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host); err == nil && len(ips) > 0 {
		ip := ips[0].Unmap()
		for _, other := range ips {
			if other = other.Unmap(); other.Is4() { // as net.Listen prefers
				ip = other
				break
			}
		}
		if host = ip.String(); ip.IsUnspecified() {
			host = ""
		}
	}
	return net.JoinHostPort(host, port), port == "0"
}

// release closes the listener when its last user leaves, and waits for all that it has started.
func (l *listener) release() {
	shared.Lock()
	defer shared.Unlock() // held to the end: whoever comes next must find the port free
	if l.users--; l.users > 0 {
		return
	}
	if l.key != "" {
		delete(shared.byAddress, l.key)
	}
	l.Close()
}

func (l *listener) refused() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Refused++
}

// take gives a message to the session it is for.
func (l *listener) take(raw []byte) {
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
	if err := l.Err(); !errors.Is(err, zmtp.ErrClosed) {
		return err
	}
	return errClosed
}
