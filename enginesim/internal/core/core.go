// SPDX-License-Identifier: Apache-2.0

// Package core is the core of a simulated engine: real KV memory in blocks, the scheduler that runs requests on it, the
// leases of what it hands to other engines, and the pipe and the lookup buffer through which KV moves.
package core

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/enginesim/pace"
)

// Config is what an engine core is made with.
type Config struct {
	Seed          uint64
	Blocks        int // of KV memory
	BlockSize     int // tokens of a block
	BytesPerToken int
	MaxRunning    int           // requests in execution; others wait
	Lease         time.Duration // how long a handoff pins its blocks
	PrefillRate   float64       // tokens per second; 0 is instant
	ITL           time.Duration // between two tokens
	Timing        *model.Spec   // in place of these two: how long steps take; nil for none
	Link          model.Link    // with Timing: how KV comes from other engines
	Recompute     bool          // a prompt whose KV could not be loaded is computed
	Alone         bool          // the engine has no connector
	MustLoad      bool          // the ledger notes a prompt that is computed here as a breach
	Events        Events        // is told of the prefix cache's blocks; nil: nobody is
}

// Events is told what happens to the blocks of the prefix cache. Its methods must not wait.
type Events interface {
	Stored(s StoredBlock)
	Removed(key TokenKey)
}

// StoredBlock is a block that has become full.
type StoredBlock struct {
	Key, Parent TokenKey // Parent is that of the block before
	First       bool     // it has no block before
	Tokens      []int32  // valid until Stored returns
	Salt        string   // the request's salt, and for an adapter a zero byte and its name
}

// Core is an engine core: the KV memory, the scheduler's queue and the leases of handed-off blocks, under one lock.
type Core struct {
	cfg                   Config
	BlockSize, BlockBytes int
	Die                   func() // ends the engine after an error that its core does not survive
	Gate                  Gate   // shut while the engine is frozen
	model                 toyModel
	pace                  *pace.Engine // nil without Timing

	mu      sync.Mutex
	pool    *blockPool
	queue   []*waiter
	running int
	leases  leaseBook
	Ledger  *ledger
	Stats   *Counters
}

// New makes a core. It calls die when an error happens that an engine core does not survive.
func New(cfg Config, die func()) *Core {
	size := cfg.BlockSize * cfg.BytesPerToken
	c := &Core{
		cfg: cfg, Die: die, BlockSize: cfg.BlockSize, BlockBytes: size,
		model: toyModel{seed: cfg.Seed, width: cfg.BytesPerToken}, pace: newPace(&cfg),
		pool:   newBlockPool(cfg.Blocks, size),
		leases: leaseBook{held: map[string]*lease{}}, Ledger: newLedger(), Stats: newCounters(cfg.Alone),
	}
	if cfg.Events != nil {
		c.Tell(cfg.Events)
	}
	c.Gate.Init()
	return c
}

// Tell says who is told of the prefix cache's blocks, before there are any.
func (c *Core) Tell(events Events) { c.cfg.Events, c.pool.removed = events, events.Removed }

// newPace makes what lets generations take their time; nil without Timing. Memory is the core's own: the model has no
// bound of blocks and places, and is told what is cached.
func newPace(cfg *Config) *pace.Engine {
	if cfg.Timing == nil {
		return nil
	}
	s := *cfg.Timing
	s.Blocks, s.MaxRunning, s.NoPrefixCache = 0, 0, true
	e, err := pace.New(s, cfg.Link)
	if err != nil {
		panic(err) // enginesim.Start has validated it
	}
	return e
}

// Blocks is how many blocks of KV there are.
func (c *Core) Blocks() int { return c.pool.blocks() }

// Compatible is a number that engines must have in common for the KV of one to make sense to the other.
func (c *Core) Compatible(model string) uint64 {
	name := KeyOf(Tokenise(model))
	return Mix(Mix(c.cfg.Seed, uint64(c.BlockSize)<<32|uint64(c.cfg.BytesPerToken)), Mix(name[0], name[1]))
}

// Lease is how long handoffs pin their blocks.
func (c *Core) Lease() time.Duration { return c.cfg.Lease }

// SetLease sets how long handoffs pin their blocks, before there are any.
func (c *Core) SetLease(d time.Duration) { c.cfg.Lease = d }

// Sequence is one request's tokens and the blocks that hold their KV.
type Sequence struct {
	ID       string // the engine's internal request id
	Tokens   []int32
	Prompt   int
	Keys     []TokenKey // of the full blocks, as far as they are known
	salt     string
	noCache  bool // compute the whole prompt, whatever is cached
	corrupt  bool // flip a bit of what comes from another engine
	Blocks   []int32
	Cached   int // tokens that the prefix cache had when the sequence got its blocks
	Computed int // tokens whose KV the blocks hold
	digest   uint64
	placed   bool
	Output   []int32 // the tokens made, once it is over
}

// BlocksFor is how many blocks of a size hold so many tokens.
func BlocksFor(tokens, size int) int { return (tokens + size - 1) / size }

// chain extends the keys of full blocks to all tokens there are.
func (c *Core) chain(s *Sequence) {
	size := c.BlockSize
	for full := len(s.Tokens) / size; len(s.Keys) < full; {
		i := len(s.Keys)
		var before TokenKey
		if i > 0 {
			before = s.Keys[i-1]
		} else {
			before = before.salted(s.salt)
		}
		s.Keys = append(s.Keys, before.Extend(s.Tokens[i*size:(i+1)*size]))
	}
}

// waiter is a place in the queue of requests that do not fit.
type waiter struct {
	seq   *Sequence
	ready chan struct{}
}

// admit gives the sequence its blocks, and waits in line until there is room. front puts a preempted sequence at the
// head of the line. admit calls queued before it waits.
func (c *Core) admit(ctx context.Context, s *Sequence, front bool, queued func()) error {
	c.mu.Lock()
	c.chain(s)
	if (len(c.queue) == 0 || front) && c.place(s) {
		c.mu.Unlock()
		return nil
	}
	w := &waiter{seq: s, ready: make(chan struct{})}
	if front {
		c.queue = slices.Insert(c.queue, 0, w)
	} else {
		c.queue = append(c.queue, w)
	}
	c.mu.Unlock()
	queued()

	select {
	case <-w.ready:
		return nil
	case <-ctx.Done():
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.queue, w); i >= 0 {
		c.queue = slices.Delete(c.queue, i, i+1)
		c.pump()
	}
	return context.Cause(ctx)
}

// pump places waiting sequences, strictly in order. The caller holds the lock.
func (c *Core) pump() {
	for len(c.queue) > 0 && c.place(c.queue[0].seq) {
		close(c.queue[0].ready)
		c.queue = slices.Delete(c.queue, 0, 1)
	}
}

// place takes the sequence's blocks: known ones from the prefix cache, the rest free ones. At least one token is always
// left to compute, since the response starts from it. The caller holds the lock.
func (c *Core) place(s *Sequence) bool {
	if c.running >= c.cfg.MaxRunning {
		return false
	}
	size := c.BlockSize
	var hits []int32
	if !s.noCache {
		hits = c.pool.match(s.Keys[:(len(s.Tokens)-1)/size])
	}
	fresh := BlocksFor(len(s.Tokens), size) - len(hits)
	if !c.pool.fits(fresh, hits) {
		return false
	}
	s.Blocks = make([]int32, 0, len(hits)+fresh+1)
	for _, id := range hits {
		c.pool.hold(id)
		s.Blocks = append(s.Blocks, id)
	}
	for range fresh {
		id, _ := c.pool.take()
		s.Blocks = append(s.Blocks, id)
	}
	c.running++
	s.placed = true
	s.Cached = len(hits) * size
	s.Computed, s.digest = 0, c.model.digestStart()
	c.absorb(s, s.Cached)
	return true
}

// absorb counts the tokens up to upto as computed, and reads their KV as it is in memory. The caller holds the lock.
func (c *Core) absorb(s *Sequence, upto int) {
	size, width := c.BlockSize, c.cfg.BytesPerToken
	for s.Computed < upto {
		block, at := s.Computed/size, s.Computed%size
		end := min(size, at+upto-s.Computed)
		s.digest = c.model.fold(s.digest, c.pool.bytes(s.Blocks[block])[at*width:end*width])
		s.Computed += end - at
	}
}

// compute works out the KV of tokens up to upto and puts full blocks into the prefix cache. It lets go of the lock
// after some blocks, so that a long prompt does not stop the engine.
func (c *Core) compute(s *Sequence, upto int) {
	const atOnce = 64
	for s.Computed < upto {
		c.mu.Lock()
		for range atOnce {
			if s.Computed >= upto {
				break
			}
			c.computeBlock(s, upto)
		}
		c.mu.Unlock()
	}
}

func (c *Core) computeBlock(s *Sequence, upto int) {
	size, width := c.BlockSize, c.cfg.BytesPerToken
	block, at := s.Computed/size, s.Computed%size
	end := min(size, at+upto-s.Computed)
	state := c.model.start()
	if s.Computed > 0 {
		last := s.Computed - 1
		state = c.model.state(c.pool.bytes(s.Blocks[last/size])[last%size*width:])
	}
	memory := c.pool.bytes(s.Blocks[block])
	for i := at; i < end; i++ {
		state = c.model.write(memory[i*width:(i+1)*width], state, s.Tokens[s.Computed+i-at])
	}
	s.digest = c.model.fold(s.digest, memory[at*width:end*width])
	s.Computed += end - at
	if end == size && block < len(s.Keys) {
		c.remember(s, block)
	}
}

// remember puts a sequence's full block into the prefix cache. The caller holds the lock.
func (c *Core) remember(s *Sequence, block int) {
	if !c.pool.remember(s.Blocks[block], s.Keys[block]) || c.cfg.Events == nil {
		return
	}
	stored := StoredBlock{Key: s.Keys[block], First: block == 0, Salt: s.salt,
		Tokens: s.Tokens[block*c.BlockSize : (block+1)*c.BlockSize]}
	if block > 0 {
		stored.Parent = s.Keys[block-1]
	}
	c.cfg.Events.Stored(stored)
}

// Fill writes KV from elsewhere into the blocks that follow the cached ones, and counts the tokens up to upto as
// computed.
func (c *Core) Fill(s *Sequence, contents [][]byte, upto int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := s.Computed / c.BlockSize
	for i, content := range contents {
		copy(c.pool.bytes(s.Blocks[first+i]), content)
	}
	if s.corrupt && len(contents) > 0 {
		c.pool.bytes(s.Blocks[first])[0] ^= 1
	}
	c.absorb(s, upto)
	for i := first; i < upto/c.BlockSize && i < len(s.Keys); i++ {
		c.remember(s, i)
	}
}

// corrupt flips a bit of what a sequence has in memory.
func (c *Core) corrupt(s *Sequence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(s.Blocks) > 0 {
		c.pool.bytes(s.Blocks[0])[0] ^= 1
	}
}

// grow appends a token to the sequence, and a block if the token needs one. It reports whether there was room.
func (c *Core) grow(s *Sequence, token int32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if need := BlocksFor(len(s.Tokens)+1, c.BlockSize); need > len(s.Blocks) {
		id, ok := c.pool.take()
		if !ok {
			return false
		}
		s.Blocks = append(s.Blocks, id)
	}
	s.Tokens = append(s.Tokens, token)
	c.chain(s)
	return true
}

// preempt takes all blocks away from a sequence that could not grow. It keeps its tokens and is computed anew when
// there is room.
func (c *Core) preempt(s *Sequence) {
	c.Stats.Add(&c.Stats.Preemptions, 1)
	c.release(s)
}

// release ends the sequence's execution and lets go of its blocks.
func (c *Core) release(s *Sequence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseLocked(s, true)
}

// Lose ends the sequence's execution and never lets go of its blocks: another engine may yet write into them.
func (c *Core) Lose(s *Sequence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseLocked(s, false)
}

func (c *Core) releaseLocked(s *Sequence, blocks bool) {
	if !s.placed {
		return
	}
	s.placed = false
	c.running--
	if blocks {
		c.pool.release(s.Blocks)
	}
	s.Blocks = nil
	c.pump()
}

// Read copies blocks out of memory. Like a remote read, it does not ask who owns them now.
func (c *Core) Read(ids []int32) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([][]byte, len(ids))
	flat := make([]byte, len(ids)*c.BlockBytes)
	for i, id := range ids {
		out[i] = flat[i*c.BlockBytes : (i+1)*c.BlockBytes : (i+1)*c.BlockBytes]
		copy(out[i], c.pool.bytes(id))
	}
	return out
}

// Known is how many tokens of a sequence the prefix cache holds now.
func (c *Core) Known(s *Sequence) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.chain(s)
	return len(c.pool.match(s.Keys[:(len(s.Tokens)-1)/c.BlockSize])) * c.BlockSize
}

// Totals gives all counters and gauges. A request that waits for KV has its blocks, but does not run yet.
func (c *Core) Totals() Totals {
	c.mu.Lock()
	running, waiting, used, pinned := c.running, len(c.queue), c.pool.used(), c.leases.pinned()
	c.mu.Unlock()
	c.Stats.mu.Lock()
	defer c.Stats.mu.Unlock()
	t, loading := c.Stats.Totals, int(c.Stats.loading)
	t.Running, t.Waiting, t.UsedBlocks, t.PinnedBlocks = running-loading, waiting+loading, used, pinned
	return t
}

// Breaches gives what the ledger has found. When the engine is idle, handoffs that are still pinned count as leaks.
func (c *Core) Breaches(idle bool) []Breach {
	var pinned []string
	c.mu.Lock()
	if idle {
		kept := 0
		for request, l := range c.leases.held {
			if l.kept {
				kept++
			} else {
				pinned = append(pinned, request)
			}
		}
		if used := c.pool.used(); c.running == 0 && used > 0 && kept == 0 && len(pinned) == 0 {
			pinned = append(pinned, "(none)")
		}
	}
	c.mu.Unlock()
	return c.Ledger.found(pinned)
}
