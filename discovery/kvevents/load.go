// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/internal/zmtp"
)

const (
	maxStat     = 64 << 10        // bytes of a message with a load; it has about 60
	maxRequests = 1e6             // at a rank; a larger number makes no sense
	polledOld   = 5 * time.Second // by so much older than the stream, polled figures complete it no more
	errNoLoad   = plainError("the engine tells no load")
)

// loads are what the ranks of engines have said of their load.
type loads struct {
	engines atomic.Int32 // len(of), so that nobody waits for the lock where no engine has a stream
	mu      sync.RWMutex
	of      map[string][]rankLoad
}

// rankLoad is what one rank has said last.
type rankLoad struct {
	at       time.Time // zero: nothing since its connection began
	requests int       // that run or wait
	usage    float64   // 0 to 1, of its KV cache; negative: unknown
}

// Load returns how busy an engine is: by its load stream, as far as that tells it, else as polled says, which is what
// the engine told discovery/inspect. It never waits for engines.
//
// A stream counts while each rank has told its load within the last 3 s. Then At is the time of the newest message,
// Running and Waiting together are the requests of all ranks, and KVUsage is the fullest rank's. How many of them are
// Waiting, and of these Fetching, is still what polled says, while it is not much older than the stream, which does not
// tell them apart. KV is polled's.
func (s *Subscriber) Load(engine string, polled inspect.Load) inspect.Load {
	said := s.loads.sum(engine, s.t.loadOld)
	if said.at.IsZero() {
		return polled
	}
	if said.at.Sub(polled.At) > polledOld {
		polled.Waiting, polled.Fetching, polled.KVUsage = 0, 0, 0
	}
	polled.At, polled.Waiting = said.at, min(polled.Waiting, said.requests)
	polled.Running, polled.Fetching = said.requests-polled.Waiting, min(polled.Fetching, polled.Waiting)
	if said.usage >= 0 {
		polled.KVUsage = said.usage
	}
	return polled
}

// sum adds up what an engine's ranks have said. It is nothing where one of them has said nothing lately.
func (l *loads) sum(engine string, lately time.Duration) (all rankLoad) {
	if l.engines.Load() == 0 {
		return all
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	ranks, unknown := l.of[engine], false
	for i := range ranks {
		r := &ranks[i]
		if time.Since(r.at) > lately {
			return rankLoad{}
		}
		if r.at.After(all.at) {
			all.at = r.at
		}
		all.requests, all.usage, unknown = all.requests+r.requests, max(all.usage, r.usage), unknown || r.usage < 0
	}
	if unknown {
		all.usage = -1
	}
	return all
}

func (l *loads) begin(engine string, ranks int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[string][]rankLoad{}
	}
	l.of[engine] = make([]rankLoad, ranks)
	l.engines.Store(int32(len(l.of)))
}

func (l *loads) set(engine string, i int, r rankLoad) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[engine][i] = r
}

func (l *loads) forget(engine string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.of, engine)
	l.engines.Store(int32(len(l.of)))
}

// followLoads reads the load streams of all ranks until ctx ends. Where a rank has none, the others' sum would say too
// little.
func (en *engine) followLoads(ctx context.Context, found []address, running *sync.WaitGroup) {
	if !en.s.o.Loads {
		return
	}
	for _, a := range found {
		if a.load == "" {
			return
		}
	}
	en.s.loads.begin(en.e.ID, len(found))
	for i, a := range found {
		limits := zmtp.Limits{Frames: 8, Bytes: maxStat, Time: en.s.t.dial}
		failed := false // since the last message
		running.Go(func() {
			en.s.connect(ctx, a.load, limits, func(c *zmtp.Conn) error {
				return en.load(ctx, c, i, func() { failed = false })
			}, func(_ string, err error) {
				if !failed {
					en.s.observe(en.source(a.rank), "load", err)
				}
				failed = true
			})
		})
	}
}

// load reads a connection of the i-th rank to its end, which it returns the reason of. A message is a topic, a sequence
// number and a LoadStat. An idle engine sends one a second, a busy one what changes (SGLang 0.5.23, file
// managers/scheduler_components/load_publisher.py). Each is the whole truth, so it does not matter if one is missing.
func (en *engine) load(ctx context.Context, c *zmtp.Conn, i int, came func()) error {
	stop := context.AfterFunc(ctx, c.Close)
	defer stop()
	defer c.Close()
	defer en.s.loads.set(en.e.ID, i, rankLoad{})
	if err := c.Subscribe(""); err != nil {
		return err
	}
	for {
		come, err := c.Wait(time.Now().Add(en.s.t.loadSilence))
		if err == nil && !come {
			err = errNoLoad
		}
		if err != nil {
			return err
		}
		frames, err := c.Read()
		if err != nil {
			return err
		}
		said, ok := rankLoad{}, false
		if len(frames) == 3 {
			said, ok = parseLoadStat(frames[2])
		}
		if !ok {
			en.s.n.malformed.Add(1)
			continue
		}
		said.at = time.Now()
		en.s.loads.set(en.e.ID, i, said)
		came()
	}
}

// parseLoadStat reads the msgpack array ["LoadStat", running, waiting, KV tokens in use, capacity or 0, …]. What
// follows differs between versions, and is skipped.
func parseLoadStat(b []byte) (r rankLoad, ok bool) {
	members := 0
	switch {
	case len(b) > 0 && b[0]&0xf0 == 0x90:
		members, b = int(b[0]&0x0f), b[1:]
	case len(b) > 2 && b[0] == 0xdc:
		members, b = int(binary.BigEndian.Uint16(b[1:])), b[3:]
	}
	b, ok = bytes.CutPrefix(b, []byte("\xa8LoadStat"))
	if !ok || members < 5 {
		return r, false
	}
	var n [4]uint64
	for i := range n {
		if n[i], b, ok = parseCount(b); !ok {
			return r, false
		}
	}
	running, waiting, used, capacity := n[0], n[1], n[2], n[3]
	if running > maxRequests || waiting > maxRequests {
		return r, false
	}
	r.requests, r.usage = int(running+waiting), -1
	if capacity > 0 {
		r.usage = min(float64(used)/float64(capacity), 1)
	}
	return r, true
}

// parseCount reads a msgpack integer that is not negative. msgspec writes it unsigned, in as few bytes as it needs.
func parseCount(b []byte) (n uint64, rest []byte, ok bool) {
	switch {
	case len(b) == 0:
		return 0, nil, false
	case b[0] < 0x80:
		return uint64(b[0]), b[1:], true
	case b[0] < 0xcc || b[0] > 0xcf:
		return 0, nil, false
	}
	size := 1 << (b[0] - 0xcc)
	if len(b) <= size {
		return 0, nil, false
	}
	for _, c := range b[1 : 1+size] {
		n = n<<8 | uint64(c)
	}
	return n, b[1+size:], true
}
