// SPDX-License-Identifier: Apache-2.0

package kvindex

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Index knows which engines hold which blocks. Its methods may be called concurrently, with these bounds: the live
// batches of one source come in one after the other, and so do the answers of its replay. Live batches and a replay may
// come beside each other. Match waits for neither.
type Index struct {
	hash   *hasher
	maxLag time.Duration
	blocks int // of one source at most

	models    atomic.Pointer[map[string]*model] // a new map for each change
	scratches sync.Pool

	mu      sync.RWMutex
	streams map[string][]*stream // by engine
}

// Option is an option of [New].
type Option func(*Index)

// WithMaxLag says how much later than usual a batch may come, by the engine's clock in it, before the state is
// [Incomplete]: 1 s without this option.
func WithMaxLag(d time.Duration) Option { return func(x *Index) { x.maxLag = d } }

// WithMaxBlocks bounds what is kept of one source, so that an engine that tells nonsense takes no more memory: 4
// million blocks without this option. A block takes about 50 bytes. Blocks above the bound are left out.
func WithMaxBlocks(n int) Option { return func(x *Index) { x.blocks = n } }

// New returns an empty index.
func New(opts ...Option) *Index {
	x := &Index{hash: newHasher(), maxLag: time.Second, blocks: 4 << 20, streams: map[string][]*stream{}}
	x.models.Store(&map[string]*model{})
	for _, opt := range opts {
		opt(x)
	}
	return x
}

// stream returns a source's stream, and makes it if it is new or the engine now has another model. It is locked.
func (x *Index) stream(src Source) *stream {
	for {
		x.mu.RLock()
		s := x.find(src)
		x.mu.RUnlock()
		if s == nil || s.source.Model != src.Model {
			s = x.replace(src)
		}
		s.mu.Lock()
		if !s.gone {
			return s
		}
		s.mu.Unlock()
	}
}

// find returns the stream of a source's engine and rank.
func (x *Index) find(src Source) *stream {
	for _, s := range x.streams[src.Engine] {
		if s.source.Rank == src.Rank {
			return s
		}
	}
	return nil
}

func (x *Index) replace(src Source) *stream {
	x.mu.Lock()
	defer x.mu.Unlock()
	if old := x.find(src); old != nil {
		if old.source.Model == src.Model {
			return old
		}
		x.end(old)
		x.streams[src.Engine] = slices.DeleteFunc(x.streams[src.Engine], func(s *stream) bool { return s == old })
	}
	models := *x.models.Load()
	m := models[src.Model]
	if m == nil {
		m = &model{columns: map[*stream][]*column{}}
		m.look()
		models = maps.Clone(models)
		models[src.Model] = m
		x.models.Store(&models)
	}
	s := &stream{index: x, source: src, model: m, status: Status{Reason: reasonNone}}
	m.streams++
	x.streams[src.Engine] = append(x.streams[src.Engine], s)
	return s
}

// end empties a stream, and drops its model if that has no other. x.mu is held.
func (x *Index) end(s *stream) {
	s.mu.Lock()
	s.gone = true
	s.reset()
	s.mu.Unlock()
	if s.model.streams--; s.model.streams == 0 {
		models := maps.Clone(*x.models.Load())
		delete(models, s.source.Model)
		x.models.Store(&models)
	}
}

// Forget drops all that is known of an engine, with all its ranks. Call it when the engine has left the fleet.
func (x *Index) Forget(engine string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.streams[engine] {
		x.end(s)
	}
	delete(x.streams, engine)
}

// State tells what can be said of the view of an engine: the worst of its ranks', and Unknown if it has none. It waits
// for a batch that is being applied.
func (x *Index) State(engine string) Status {
	x.mu.RLock()
	streams := slices.Clone(x.streams[engine])
	x.mu.RUnlock()
	worst := Status{Reason: reasonNone}
	for i, s := range streams {
		s.mu.Lock()
		status := s.status
		s.mu.Unlock()
		if i == 0 || status.State < worst.State || status.State == worst.State && status.Since.After(worst.Since) {
			worst = status
		}
	}
	return worst
}

// Source names a stream of events: one data-parallel rank of one engine. Each rank has a stream of its own, with its
// own sequence numbers.
type Source struct {
	Engine string // the endpoint's ID
	Model  string // what Query.Model has to be; an engine has one
	Rank   int    // 0 where the engine has no ranks
}

// Tier is where an engine holds a block.
type Tier uint8

// The tiers, the fastest first.
const (
	TierDevice  Tier = iota // the accelerator's memory: medium GPU, or none given
	TierHost                // the host's memory: CPU, CPU_PINNED, and LMCache's cpu
	TierStorage             // disks, remote stores, and every medium that is not known
)

// State is what can be said of the index's view of an engine.
type State uint8

// The states, the worst first.
const (
	// Unknown says that there is no stream, or that it was lost and nothing has shown yet what was missed. Match may be
	// wrong both ways.
	Unknown State = iota
	// Incomplete says that events are missing, or could not be used. Match may be wrong both ways.
	Incomplete
	// Exact says that each event from the engine's start was applied: Match tells what the engine holds in device
	// memory.
	Exact
)

// Status is the state of an engine: the worst of its ranks'.
type Status struct {
	State  State
	Since  time.Time     // when this state began
	Heard  time.Time     // when the last batch came
	Lag    time.Duration // how much later than the fastest batch the last one came
	Reason string        // why it is not exact, in a few words; "" if it is
}

// Query is a prompt.
type Query struct {
	Model  string   // as in Source.Model
	LoRA   string   // the adapter's name as the engine knows it; "" for the model itself
	Salt   string   // the request's cache salt; "" for none
	Tokens []uint32 // the prompt's token ids
	Media  []Media  // images and the like, in the order of their offsets
}

// Media is one item (image, audio, video) in a prompt.
type Media struct {
	Key            string // the engine's identifier of its content
	Offset, Length int    // its placeholder tokens in Query.Tokens
}

// Hit tells how much of a prompt's beginning one rank of one engine holds.
type Hit struct {
	Engine string
	Rank   int
	Device int  // tokens in device memory
	Tokens int  // tokens in any one tier: at least Device
	Tier   Tier // the tier that holds Tokens, the fastest of several
	Exact  bool // the view of this rank's device memory is exact, so Device is right
}
