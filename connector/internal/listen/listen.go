// SPDX-License-Identifier: Apache-2.0

// Package listen shares listeners within the process. Engines know one address to call, whatever model they serve,
// while each model has a flow with its own connector. So several connectors may need the same address.
package listen

import (
	"context"
	"net"
	"sync"

	"github.com/pdkit/pdkit/internal/relisten"
)

// Shared holds the values that listen, by address. The zero value is ready. It may be used concurrently.
type Shared[T comparable] struct {
	mu   sync.Mutex
	keys map[string]T // without those on a free port of their own, which nobody shares
	used map[T]*use
}

type use struct {
	key   string // "" if the address is not shared
	users int
}

// Acquire returns the value that listens on an address. The first caller opens a listener, and serve makes the value
// from it. With port 0 each caller gets a listener of its own. Each Acquire needs a Release. The error is the system's.
func (s *Shared[T]) Acquire(ctx context.Context, address string, serve func(*relisten.Listener) T) (T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key, alone := canonical(ctx, address)
	if v, ok := s.keys[key]; ok {
		s.used[v].users++
		return v, nil
	}
	ln, err := relisten.Listen(ctx, address)
	if err != nil {
		var none T
		return none, err
	}
	if s.used == nil {
		s.keys, s.used = map[string]T{}, map[T]*use{}
	}
	v := serve(ln)
	if alone {
		key = ""
	} else {
		s.keys[key] = v
	}
	s.used[v] = &use{key: key, users: 1}
	return v, nil
}

// Release gives back what Acquire returned. After the last user's Release it calls end, which must close the listener.
// A caller that acquires the same address meanwhile waits, and finds the address free.
func (s *Shared[T]) Release(v T, end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.used[v]
	if u == nil {
		return
	}
	if u.users--; u.users > 0 {
		return
	}
	if delete(s.used, v); u.key != "" {
		delete(s.keys, u.key)
	}
	end()
}

// canonical returns the same key for the same address: localhost and 127.0.0.1 are one, and so are all ways to write
// "every address". alone is true for port 0, any free port, which nobody can share.
func canonical(ctx context.Context, address string) (key string, alone bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address, false // Listen returns the error
	}
	if ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host); err == nil && len(ips) > 0 {
		ip := ips[0].Unmap()
		for _, other := range ips {
			if other = other.Unmap(); other.Is4() { // net.Listen prefers IPv4, too
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
