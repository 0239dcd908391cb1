// SPDX-License-Identifier: Apache-2.0

// Package listen shares listeners within the process. An address is one of the machine: engines know one place to call, whichever model
// they serve, while each model has a flow with a connector of its own.
package listen

import (
	"context"
	"net"
	"sync"
)

// Shared are what listens, by address. The zero value is ready. It may be used concurrently.
type Shared[T comparable] struct {
	mu   sync.Mutex
	keys map[string]T // without those whose port nobody else can ask for
	used map[T]*use
}

type use struct {
	key   string // "" if it is nobody else's
	users int
}

// Acquire returns what listens on an address; for the first who asks it is what serve makes of a new listener. Port 0 gives one of its own.
// Each Acquire needs a Release. The error is the system's.
func (s *Shared[T]) Acquire(ctx context.Context, address string, serve func(net.Listener) T) (T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key, alone := canonical(ctx, address)
	if v, ok := s.keys[key]; ok {
		s.used[v].users++
		return v, nil
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
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

// Release gives back what Acquire has returned. When nobody uses it any more end is called, which must close the listener; whoever asks for
// the address meanwhile waits, and finds it free.
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
