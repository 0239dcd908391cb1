// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"context"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/internal/zmtp"
)

// listening is Options.Listen at work: a bound SUB socket for each rank.
type listening struct {
	s         *Subscriber
	host      string
	port      int
	listeners []*zmtp.Listener
}

func newListening(s *Subscriber) (*listening, error) {
	host, text, err := net.SplitHostPort(s.o.Listen)
	port, errPort := strconv.Atoi(text)
	n := max(s.o.ListenRanks, 1)
	if err != nil || errPort != nil || port < 0 || port+n-1 > 65535 || port == 0 && n > 1 || n > maxRanks {
		return nil, &Error{Op: "listen", Err: plainError("Listen must be HOST:PORT, with ports for all ranks")}
	}
	return &listening{s: s, host: host, port: port}, nil
}

func (l *listening) open(ctx context.Context) error {
	for rank := range max(l.s.o.ListenRanks, 1) {
		ln, err := zmtp.Listen(ctx, net.JoinHostPort(l.host, strconv.Itoa(l.port+rank)), zmtp.Config{
			Socket: "SUB", Peers: []string{"PUB", "XPUB"}, Limits: l.s.limits(),
			Refused: func() { l.s.n.unknown.Add(1) },
			Serve:   func(c *zmtp.Conn, useful func()) { l.serve(rank, c, useful) },
		})
		if err != nil {
			l.close()
			return &Error{Op: "listen", Err: err}
		}
		l.listeners = append(l.listeners, ln)
	}
	return nil
}

// has reports whether a port is one of those that are listened at.
func (l *listening) has(port string) bool {
	n, err := strconv.Atoi(port)
	return l != nil && err == nil && n >= l.port && n < l.port+max(l.s.o.ListenRanks, 1)
}

func (l *listening) close() {
	for _, ln := range l.listeners {
		ln.Close()
	}
	l.listeners = nil
}

// serve reads a connection. Until it is known whose it is, its messages are dropped; the replay has them.
func (l *listening) serve(rank int, c *zmtp.Conn, useful func()) {
	if c.Subscribe("") != nil {
		return
	}
	counted := false
	for {
		if come, err := c.Wait(time.Now().Add(time.Minute)); err != nil {
			return
		} else if !come {
			continue
		}
		frames, err := c.Read()
		if err != nil {
			return
		}
		if en := l.s.recognize(string(frames[0]), c.RemoteAddr()); en != nil {
			useful()
			en.accept(rank, c, frames)
			return
		}
		if !counted {
			counted = true
			l.s.n.unknown.Add(1)
		}
	}
}

// recognize returns the engine that a connection is of, or nil.
func (s *Subscriber) recognize(topic string, remote net.Addr) *engine {
	var named string
	if rest, ok := strings.CutPrefix(topic, "kv@"); ok {
		named, _, _ = strings.Cut(rest, "@")
	}
	from, _, _ := net.SplitHostPort(remote.String())
	s.mu.Lock()
	defer s.mu.Unlock()
	var byName, byAddress []*engine
	for _, en := range s.engines {
		switch named {
		case "":
		case en.e.ID, en.e.URL.Host, en.e.Host():
			byName = append(byName, en)
		}
		if en.e.Host() == from {
			byAddress = append(byAddress, en)
		}
	}
	if len(byName) == 0 && named == "" {
		byName = byAddress
	}
	if len(byName) != 1 {
		return nil
	}
	return byName[0]
}

// accept reads a connection of the engine's. A newer one of the same rank takes its place.
func (en *engine) accept(rank int, c *zmtp.Conn, first [][]byte) {
	en.mu.Lock()
	if en.ended {
		en.mu.Unlock()
		return
	}
	st := en.bound[rank]
	if st == nil {
		st = en.boundStream(rank)
		en.bound[rank] = st
	}
	before, free := st.conn, st.free
	mine := make(chan struct{})
	st.conn, st.free = c, mine
	en.serving.Add(1)
	en.mu.Unlock()
	defer en.serving.Done()
	defer close(mine)
	if before != nil {
		before.Close()
		<-free
	}
	err := st.live(en.ctx, c, first)
	if en.ctx.Err() == nil {
		en.s.observe(st.src, "read", err)
	}
}

func (en *engine) boundStream(rank int) *boundStream { return &boundStream{stream: en.stream(rank)} }

// boundStream is the stream of a rank that connects.
type boundStream struct {
	*stream
	conn *zmtp.Conn    // the newest connection
	free chan struct{} // closed when it is read no more
}
