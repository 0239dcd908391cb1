// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"slices"
	"sync"
	"time"
)

// coreConfig is what an engine core is made with.
type coreConfig struct {
	Seed          uint64
	Blocks        int // of KV memory
	BlockSize     int // tokens of a block
	BytesPerToken int
	MaxRunning    int           // requests in execution; others wait
	Lease         time.Duration // how long a handoff pins its blocks
	PrefillRate   float64       // tokens per second; 0 is instant
	ITL           time.Duration // between two tokens
	Recompute     bool          // a prompt whose KV could not be loaded is computed
	Alone         bool          // the engine has no connector
	MustLoad      bool          // a prompt computed here is a fault of KV
}

// core is an engine core: the KV memory, the scheduler's queue and the leases of
// handed-off blocks, under one lock.
type core struct {
	cfg                   coreConfig
	blockSize, blockBytes int
	die                   func() // ends the engine after an error that its core does not survive
	gate                  gate   // shut while the engine is frozen
	model                 model

	mu      sync.Mutex
	pool    *blockPool
	queue   []*waiter
	running int
	leases  leaseBook
	ledger  *ledger
	stats   *counters
}

// newCore makes a core. It calls die when an error happens that an engine core does not survive.
func newCore(cfg coreConfig, die func()) *core {
	size := cfg.BlockSize * cfg.BytesPerToken
	c := &core{
		cfg: cfg, die: die, blockSize: cfg.BlockSize, blockBytes: size, model: model{seed: cfg.Seed, width: cfg.BytesPerToken},
		pool: newBlockPool(cfg.Blocks, size), leases: leaseBook{held: map[string]*lease{}}, ledger: newLedger(), stats: newCounters(cfg.Alone),
	}
	c.gate.init()
	return c
}

// blocks is how many blocks of KV there are.
func (c *core) blocks() int { return c.pool.blocks() }

// compatible is a number that engines must have in common for the KV of one to make sense to the other.
func (c *core) compatible(model string) uint64 {
	name := KeyOf(tokenise(model))
	return mix(mix(c.cfg.Seed, uint64(c.blockSize)<<32|uint64(c.cfg.BytesPerToken)), mix(name[0], name[1]))
}

// lease is how long handoffs pin their blocks.
func (c *core) lease() time.Duration { return c.cfg.Lease }

// setLease sets how long handoffs pin their blocks, before there are any.
func (c *core) setLease(d time.Duration) { c.cfg.Lease = d }

// sequence is one request's tokens and the blocks that hold their KV.
type sequence struct {
	id       string // the engine's internal request id
	tokens   []int32
	prompt   int
	keys     []TokenKey // of the full blocks, as far as they are known
	salt     string
	noCache  bool // compute the whole prompt, whatever is cached
	blocks   []int32
	cached   int // tokens taken over from the prefix cache at the last placement
	computed int // tokens whose KV the blocks hold
	digest   uint64
	placed   bool
	answer   []int32 // the tokens made, once it is over
}

func blocksFor(tokens, size int) int { return (tokens + size - 1) / size }

// chain extends the keys of full blocks to all tokens there are.
func (c *core) chain(s *sequence) {
	size := c.blockSize
	for full := len(s.tokens) / size; len(s.keys) < full; {
		i := len(s.keys)
		var before TokenKey
		if i > 0 {
			before = s.keys[i-1]
		} else {
			before = before.salted(s.salt)
		}
		s.keys = append(s.keys, before.extend(s.tokens[i*size:(i+1)*size]))
	}
}

// waiter is a place in the queue of requests that do not fit.
type waiter struct {
	seq   *sequence
	ready chan struct{}
}

// admit gives the sequence its blocks, waiting in line until there is room. A
// preempted one goes to the front. queued is called when there is waiting to do.
func (c *core) admit(ctx context.Context, s *sequence, front bool, queued func()) error {
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
func (c *core) pump() {
	for len(c.queue) > 0 && c.place(c.queue[0].seq) {
		close(c.queue[0].ready)
		c.queue = slices.Delete(c.queue, 0, 1)
	}
}

// place takes the sequence's blocks: known ones from the prefix cache, the rest
// free ones. At least one token is always left to compute, since the answer
// starts from it. The caller holds the lock.
func (c *core) place(s *sequence) bool {
	if c.running >= c.cfg.MaxRunning {
		return false
	}
	size := c.blockSize
	var hits []int32
	if !s.noCache {
		hits = c.pool.match(s.keys[:(len(s.tokens)-1)/size])
	}
	fresh := blocksFor(len(s.tokens), size) - len(hits)
	if !c.pool.fits(fresh, hits) {
		return false
	}
	s.blocks = make([]int32, 0, len(hits)+fresh+1)
	for _, id := range hits {
		c.pool.hold(id)
		s.blocks = append(s.blocks, id)
	}
	for range fresh {
		id, _ := c.pool.take()
		s.blocks = append(s.blocks, id)
	}
	c.running++
	s.placed = true
	s.cached = len(hits) * size
	s.computed, s.digest = 0, c.model.digestStart()
	c.absorb(s, s.cached)
	return true
}

// absorb takes the KV of tokens up to upto, as it lies in memory, for computed.
// The caller holds the lock.
func (c *core) absorb(s *sequence, upto int) {
	size, width := c.blockSize, c.cfg.BytesPerToken
	for s.computed < upto {
		block, at := s.computed/size, s.computed%size
		end := min(size, at+upto-s.computed)
		s.digest = c.model.fold(s.digest, c.pool.bytes(s.blocks[block])[at*width:end*width])
		s.computed += end - at
	}
}

// compute works out the KV of tokens up to upto and puts full blocks into the
// prefix cache. The lock is let go between blocks, so that a long prompt does not
// stop the engine.
func (c *core) compute(s *sequence, upto int) {
	const atOnce = 64
	for s.computed < upto {
		c.mu.Lock()
		for range atOnce {
			if s.computed >= upto {
				break
			}
			c.computeBlock(s, upto)
		}
		c.mu.Unlock()
	}
}

func (c *core) computeBlock(s *sequence, upto int) {
	size, width := c.blockSize, c.cfg.BytesPerToken
	block, at := s.computed/size, s.computed%size
	end := min(size, at+upto-s.computed)
	state := c.model.start()
	if s.computed > 0 {
		last := s.computed - 1
		state = c.model.state(c.pool.bytes(s.blocks[last/size])[last%size*width:])
	}
	memory := c.pool.bytes(s.blocks[block])
	for i := at; i < end; i++ {
		state = c.model.write(memory[i*width:(i+1)*width], state, s.tokens[s.computed+i-at])
	}
	s.digest = c.model.fold(s.digest, memory[at*width:end*width])
	s.computed += end - at
	if end == size && block < len(s.keys) {
		c.pool.remember(s.blocks[block], s.keys[block])
	}
}

// fill writes KV that came from elsewhere into the blocks that follow the cached
// ones, and takes the tokens for computed.
func (c *core) fill(s *sequence, contents [][]byte, upto int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first := s.computed / c.blockSize
	for i, content := range contents {
		copy(c.pool.bytes(s.blocks[first+i]), content)
	}
	c.absorb(s, upto)
	for i := first; i < upto/c.blockSize && i < len(s.keys); i++ {
		c.pool.remember(s.blocks[i], s.keys[i])
	}
}

// grow appends a token to the sequence, with a block for it if need be, and says
// whether there was room.
func (c *core) grow(s *sequence, token int32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if need := blocksFor(len(s.tokens)+1, c.blockSize); need > len(s.blocks) {
		id, ok := c.pool.take()
		if !ok {
			return false
		}
		s.blocks = append(s.blocks, id)
	}
	s.tokens = append(s.tokens, token)
	c.chain(s)
	return true
}

// preempt takes all blocks away from a sequence that could not grow. It keeps
// its tokens and is computed anew when there is room.
func (c *core) preempt(s *sequence) {
	c.stats.add(&c.stats.Preemptions, 1)
	c.release(s)
}

// release ends the sequence's execution and lets go of its blocks.
func (c *core) release(s *sequence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseLocked(s, true)
}

// lose ends the sequence's execution and never lets go of its blocks: another
// engine may yet write into them.
func (c *core) lose(s *sequence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.releaseLocked(s, false)
}

func (c *core) releaseLocked(s *sequence, blocks bool) {
	if !s.placed {
		return
	}
	s.placed = false
	c.running--
	if blocks {
		c.pool.release(s.blocks)
	}
	s.blocks = nil
	c.pump()
}

// read copies blocks out of memory, whoever owns them by now: a remote read asks
// nobody.
func (c *core) read(ids []int32) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([][]byte, len(ids))
	flat := make([]byte, len(ids)*c.blockBytes)
	for i, id := range ids {
		out[i] = flat[i*c.blockBytes : (i+1)*c.blockBytes : (i+1)*c.blockBytes]
		copy(out[i], c.pool.bytes(id))
	}
	return out
}

// known is how many tokens of a sequence the prefix cache holds now.
func (c *core) known(s *sequence) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.chain(s)
	return len(c.pool.match(s.keys[:(len(s.tokens)-1)/c.blockSize])) * c.blockSize
}

// totals gives all counters and gauges. A request that waits for KV has its blocks, but does not run yet.
func (c *core) totals() totals {
	c.mu.Lock()
	running, waiting, used, pinned := c.running, len(c.queue), c.pool.used(), c.leases.pinned()
	c.mu.Unlock()
	c.stats.mu.Lock()
	defer c.stats.mu.Unlock()
	t, loading := c.stats.totals, int(c.stats.loading)
	t.Running, t.Waiting, t.UsedBlocks, t.PinnedBlocks = running-loading, waiting+loading, used, pinned
	return t
}

// breaches gives what the ledger has found. When the engine is idle, handoffs that are still pinned count as leaks.
func (c *core) breaches(idle bool) []breach {
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
	return c.ledger.found(pinned)
}
