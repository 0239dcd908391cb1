// SPDX-License-Identifier: Apache-2.0

package kvindex

import "time"

// Source names a stream of events: one data-parallel rank of one engine. Each rank has a stream of its own, with its
// own sequence numbers.
type Source struct {
	Engine string // the endpoint's ID
	Model  string // what Query.Model has to be; an engine has one
	Rank   int    // 0 where the engine has no ranks
}

// Tier is where an engine holds a block, the fastest first.
type Tier uint8

const (
	TierDevice  Tier = iota // the accelerator's memory: medium GPU, or none given
	TierHost                // the host's memory: CPU, CPU_PINNED, and LMCache's cpu
	TierStorage             // disks, remote stores, and every medium that is not known
)

// State is what can be said of the index's view of an engine.
type State uint8

const (
	// Unknown: there is no stream, or it was lost and nothing has shown yet what was missed. Match may be wrong both
	// ways.
	Unknown State = iota
	// Incomplete: events are missing, or could not be used. Match may be wrong both ways.
	Incomplete
	// Exact: each event from the engine's start was applied. Match tells what the engine holds in device memory.
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
