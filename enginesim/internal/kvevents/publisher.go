// SPDX-License-Identifier: Apache-2.0

// Package kvevents publishes what happens to an engine's KV blocks as vLLM does (distributed/kv_events.py of 0.32.0): a
// PUB socket with three frames a batch (topic, sequence number, msgpack), and a ROUTER that sends past batches again.
package kvevents

import (
	"bytes"
	"context"
	"encoding/binary"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/python"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

// Config is what a publisher is made with.
type Config struct {
	Endpoint  string // HOST:PORT of the PUB socket
	Replay    string // HOST:PORT of the ROUTER; "" has none
	Connect   bool   // the PUB socket connects to Endpoint
	Topic     string
	Steps     int  // batches kept for a replay
	Queue     int  // messages that wait for a slow subscriber before they are dropped
	Arrays    bool // events as arrays
	OldReplay bool // a replay without topic frames
	Rank      int  // data-parallel rank
	BlockSize int
}

// Publisher publishes the events of one engine. All methods may be called concurrently.
type Publisher struct {
	cfg    Config
	pub    *zmq.Listener // nil if it connects
	router *zmq.Listener
	dialed *zmq.Socket // the loop's alone
	wake   chan struct{}
	quit   context.Context
	stop   context.CancelFunc
	ended  chan struct{}

	mu      sync.Mutex
	pending []event
	drop    int
	frozen  bool

	keeping sync.Mutex // seq and kept
	seq     uint64
	kept    [][]byte // the last batches
}

// Start opens the sockets.
func Start(cfg Config) (*Publisher, error) {
	p := &Publisher{cfg: cfg, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	var err error
	if !cfg.Connect {
		if p.pub, err = zmq.ListenPUB(cfg.Endpoint, cfg.Queue); err != nil {
			return nil, err
		}
	}
	if cfg.Replay != "" {
		if p.router, err = zmq.ListenROUTER(cfg.Replay, p.replay); err != nil {
			if p.pub != nil {
				p.pub.Close()
			}
			return nil, err
		}
	}
	p.quit, p.stop = context.WithCancel(context.Background())
	go p.loop()
	return p, nil
}

// Endpoint is the address of the PUB socket, or the one that it connects to.
func (p *Publisher) Endpoint() string {
	if p.pub == nil {
		return p.cfg.Endpoint
	}
	return p.pub.Addr()
}

// Rank is the engine's data-parallel rank.
func (p *Publisher) Rank() int { return p.cfg.Rank }

// Source describes the publisher as vLLM's GET /kv_event_sources does.
func (p *Publisher) Source() any {
	at := func(address string, bound bool) any {
		if address == "" {
			return nil
		}
		if _, port, err := net.SplitHostPort(address); err == nil && bound {
			address = "*:" + port
		}
		return "tcp://" + address
	}
	return python.Object{"enable_kv_cache_events", true, "publisher", "zmq", "endpoint",
		at(p.Endpoint(), p.pub != nil), "replay_endpoint", at(p.Replay(), true), "buffer_steps", p.cfg.Steps,
		"hwm", p.cfg.Queue, "max_queue_size", 100_000, "topic", p.cfg.Topic}
}

// Replay is the address of the ROUTER, "" without one.
func (p *Publisher) Replay() string {
	if p.router == nil {
		return ""
	}
	return p.router.Addr()
}

// Stored announces a full block.
func (p *Publisher) Stored(s core.StoredBlock) {
	p.mu.Lock()
	defer p.mu.Unlock()
	hash, parent := hashOf(s.Key), hashOf(s.Parent)
	if n := len(p.pending); n > 0 && !s.First {
		last := &p.pending[n-1]
		if last.kind == blockStored && last.hashes[len(last.hashes)-1] == parent {
			last.hashes, last.tokens = append(last.hashes, hash), append(last.tokens, s.Tokens...)
			return
		}
	}
	salt, adapter, _ := strings.Cut(s.Salt, "\x00")
	p.add(event{kind: blockStored, hashes: []uint64{hash}, parent: parent, first: s.First,
		tokens: append([]int32(nil), s.Tokens...), size: p.cfg.BlockSize, salt: salt, adapter: adapter})
}

// Removed announces that a block was evicted.
func (p *Publisher) Removed(key core.TokenKey) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.add(event{kind: blockRemoved, hashes: []uint64{hashOf(key)}})
}

// Cleared announces that all blocks were dropped.
func (p *Publisher) Cleared() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.add(event{kind: allBlocksCleared})
}

func hashOf(key core.TokenKey) uint64 { return core.Mix(key[0], key[1]) }

// add queues an event. The caller holds the lock.
func (p *Publisher) add(e event) {
	p.pending = append(p.pending, e)
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Drop keeps the next n batches from subscribers; a replay has them.
func (p *Publisher) Drop(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.drop += n
}

// Freeze stops both sockets as SIGSTOP does, or lets them go on.
func (p *Publisher) Freeze(frozen bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.frozen == frozen {
		return
	}
	p.frozen = frozen
	for _, l := range []*zmq.Listener{p.pub, p.router} {
		if l != nil {
			l.Freeze(frozen)
		}
	}
}

// DropConnections ends the connections of all subscribers, which may connect again.
func (p *Publisher) DropConnections() {
	if p.pub != nil {
		p.pub.Drop()
	}
}

// Close frees the addresses and ends all connections.
func (p *Publisher) Close() {
	p.stop()
	p.Freeze(false)
	<-p.ended
	if p.pub != nil {
		p.pub.Close()
	}
	if p.router != nil {
		p.router.Close()
	}
	if p.dialed != nil {
		_ = p.dialed.Close()
	}
}

// loop publishes what has happened since the last batch, as soon as it can: so a step's events are one batch.
func (p *Publisher) loop() {
	defer close(p.ended)
	if p.pub == nil {
		p.dialed, _ = zmq.Dial(p.quit, "PUB", p.cfg.Endpoint, "")
	}
	for {
		select {
		case <-p.quit.Done():
			return
		case <-p.wake:
		}
		p.mu.Lock()
		events, drop := p.pending, p.drop > 0
		p.pending = nil
		if drop && len(events) > 0 {
			p.drop--
		}
		p.mu.Unlock()
		if len(events) == 0 {
			continue
		}
		payload := batch(float64(time.Now().UnixNano())/1e9, events, p.cfg.Rank, p.cfg.Arrays)
		p.keeping.Lock()
		seq := binary.BigEndian.AppendUint64(nil, p.seq)
		p.seq++
		if p.kept = append(p.kept, payload); len(p.kept) > p.cfg.Steps {
			p.kept = p.kept[1:]
		}
		if !drop {
			p.send([]byte(p.cfg.Topic), seq, payload)
		}
		p.keeping.Unlock()
	}
}

// send publishes a batch. A socket that connects does so first, and loses what it cannot send.
func (p *Publisher) send(frames ...[]byte) {
	if p.pub != nil {
		p.pub.Publish(frames...)
		return
	}
	if p.dialed == nil {
		p.dialed, _ = zmq.Dial(p.quit, "PUB", p.cfg.Endpoint, "")
	}
	if p.dialed != nil && p.dialed.Send(frames...) != nil {
		_ = p.dialed.Close()
		p.dialed = nil
	}
}

var (
	endMark = bytes.Repeat([]byte{0xff}, 8)
	empty   = []byte{}
)

// replay sends all kept batches from a sequence number on, and the end mark. Nothing is published meanwhile.
func (p *Publisher) replay(peer *zmq.Peer, frames [][]byte) {
	if len(frames) != 2 || len(frames[0]) != 0 || len(frames[1]) != 8 {
		return
	}
	from := binary.BigEndian.Uint64(frames[1])
	p.keeping.Lock()
	defer p.keeping.Unlock()
	topic := []byte(p.cfg.Topic)
	send := func(topic, seq, payload []byte) error {
		if p.cfg.OldReplay {
			return peer.Send(empty, seq, payload)
		}
		return peer.Send(empty, topic, seq, payload)
	}
	first := p.seq - uint64(len(p.kept))
	for seq := max(from, first); seq < p.seq; seq++ {
		if send(topic, binary.BigEndian.AppendUint64(nil, seq), p.kept[seq-first]) != nil {
			return
		}
	}
	_ = send(empty, endMark, empty)
}
