// SPDX-License-Identifier: Apache-2.0

package model

// Request is one request at one engine. The caller fills the exported fields and gives the pointer to [Engine.Add];
// until the request has ended the engine owns it.
type Request struct {
	ID     int // the caller's
	Prompt int // tokens, at least 1
	Output int // tokens that will be made, at least 1: of a prefill leg 1

	// Keys name the request's full blocks of prompt and, as far as they are known, of the response, from the first one
	// on. Each is a hash of the block and of all before it, and never 0. Blocks without a key are found by nobody.
	Keys []uint64
	// Cached says that the first so many tokens of the prompt are computed already, in memory that the caller counts.
	Cached int
	// Fetch says that the prompt's KV comes from another engine: [Placed] tells when its blocks are there and how many
	// tokens they lack, and the caller says when they have come ([Engine.Loaded]).
	Fetch bool
	// Hold keeps the blocks after the end, for another engine to read, until [Engine.Release].
	Hold bool

	state    state
	computed int // tokens whose KV the blocks hold
	made     int // tokens of the response
	known    int // blocks that others can find
	reused   int
	blocks   []int32
	last     float64 // when the last token was made
	again    bool    // it was preempted: all of it is computed here
}

type state uint8

const (
	unknown  state = iota
	waiting        // for blocks
	fetching       // has its blocks; KV is on its way
	running
	holding // has ended; another engine reads its blocks
	ended
	leaving // the client has left while a step ran
)

// Reused is how many tokens of the prompt the prefix cache had when the request first got its blocks.
func (r *Request) Reused() int { return r.reused }

func (r *Request) total() int   { return r.Prompt + r.made }
func (r *Request) missing() int { return r.total() - r.computed }

// Kind says what has happened.
type Kind uint8

// The kinds of events.
const (
	Placed    Kind = iota + 1 // a request with Fetch has its blocks; Tokens are to be fetched
	First                     // the first token was made
	Token                     // a later token was made: only with Engine.EachStep
	Ended                     // the last token was made
	Preempted                 // the request has lost its blocks, and will be computed anew
)

// Event is what has happened to a request.
type Event struct {
	Kind    Kind
	At      float64
	Request *Request
	Tokens  int
}

// Stats are an engine's counters.
type Stats struct {
	Steps       int
	Busy        float64 // seconds of all steps
	Computed    int     // tokens of prompts, and of what was computed anew
	Reused      int     // tokens that the prefix cache had, counted each time that a request got its blocks
	Fetched     int     // tokens that came from another engine
	Made        int     // tokens of responses
	Preemptions int
	PeakBlocks  int
	Ended       int // requests
}
