// SPDX-License-Identifier: Apache-2.0

// Package model is the time and the memory of one inference engine, as values: no HTTP, no goroutine, no clock.
//
// An [Engine] works in steps, as vLLM's scheduler does (vllm/v1/core/sched/scheduler.py at 0.32.0): continuous batching
// with a budget of tokens for each step, chunked prefill, KV blocks with a prefix cache, eviction of the blocks that
// were free for longest, preemption of the request that came last, and recomputation of what it had. [StepTime] is how
// long a step takes. [Link] is how long KV takes from one engine to another.
//
// The same engine runs in virtual time (package enginesim/virtual) and in real time (enginesim.Config.Timing). All
// times are in seconds.
package model

import (
	"errors"
	"fmt"
)

// Load is what one step computes.
type Load struct {
	Requests      int // in the step
	ContextTokens int // computed before, by all requests of the step: the step reads their KV
	PrefillTokens int // of prompts, and of what is computed anew after a preemption
	Attention     int // pairs of such a token with itself and with each token before it
}

// StepTime is how long a step takes, in seconds: a sum of five terms. [Fit] finds them from steps that were observed.
type StepTime struct {
	Base            float64
	PerRequest      float64
	PerContextToken float64
	PerPrefillToken float64
	// PerAttention makes long prompts take more than in proportion: attention grows with the square of their length.
	PerAttention float64
}

// Seconds is the time of a step.
func (t StepTime) Seconds(l Load) float64 {
	return t.Base + t.PerRequest*float64(l.Requests) + t.PerContextToken*float64(l.ContextTokens) +
		t.PerPrefillToken*float64(l.PrefillTokens) + t.PerAttention*float64(l.Attention)
}

// Spec describes an engine.
type Spec struct {
	StepTime

	StepTokens int // budget of a step (vLLM's max_num_batched_tokens); 0: no bound
	MaxRunning int // requests that run at once (vLLM's max_num_seqs); 0: no bound
	Blocks     int // of KV memory; 0: no bound
	BlockSize  int // tokens of a block

	NoPrefixCache bool // nothing of a prompt is kept for the next one
	NoChunks      bool // a prompt is computed in one step, even if it is longer than the step's budget

	BytesPerToken float64 // of KV, which a transfer moves
}

// Validate tells what is wrong with a spec.
func (s *Spec) Validate() error {
	switch t := s.StepTime; {
	case !(t.Base >= 0 && t.PerRequest >= 0 && t.PerContextToken >= 0 && t.PerPrefillToken >= 0 &&
		t.PerAttention >= 0):
		return errors.New("model: the terms of a step's time are 0 or more")
	case t.Base+t.PerRequest <= 0 && t.PerContextToken+t.PerPrefillToken+t.PerAttention <= 0:
		return errors.New("model: a step takes no time")
	case s.StepTokens < 0 || s.MaxRunning < 0 || s.Blocks < 0 || !(s.BytesPerToken >= 0):
		return errors.New("model: StepTokens, MaxRunning, Blocks and BytesPerToken are 0 or more")
	case s.BlockSize < 1:
		return errors.New("model: BlockSize is at least 1")
	case s.Blocks > 1<<30:
		return fmt.Errorf("model: %d blocks are too many", s.Blocks)
	}
	return nil
}

// Llama8B is Llama-3.1-8B in 16 bits on one H100 with 80 GB, as vLLM 0.32 serves it by default.
//
// Decode is by the coefficients that BLIS has fitted for its model "trained-physics" (github.com/inference-sim/
// inference-sim at f90a1e3a, defaults.yaml and sim/latency/trained_physics_model.go): 13.96 GB of layers' weights at
// 3.35 TB/s, times 1.3625, and 32 layers of 32.1 µs, and 126 µs are 6.83 ms for a step; 4.42 µs for a request; 128 KiB
// of KV at 3.35 TB/s, times 1.947, are 0.0762 µs for a token of context.
//
// Prefill is by roofline: 13.96 GFLOP for a token, at 989.5 TFLOP/s and a share of 0.45 in use (hardware_config.json
// there, mfuPrefill), are 31.4 µs. BLIS's own coefficient for prefill, 0.152 of the time at the chip's peak, is 6.6
// times faster than the chip can be.
//
// Memory: 90 % of 80 GB without weights and activations leave 54 GB, which are 25,700 blocks of 16 tokens.
func Llama8B() Spec {
	return Spec{
		StepTime: StepTime{Base: 6.83e-3, PerRequest: 4.42e-6, PerContextToken: 0.0762e-6, PerPrefillToken: 31.4e-6},
		// vLLM's defaults for a server on an H100 (vllm/engine/arg_utils.py)
		StepTokens: 8192, MaxRunning: 1024,
		Blocks: 25_700, BlockSize: 16, BytesPerToken: 128 << 10,
	}
}

// Link is the way of KV from one engine to another.
type Link struct {
	Latency        float64 // seconds until the first byte, whatever is in the queue
	BytesPerSecond float64 // 0: no bound
}

// Port is one side of links: an engine's network card in one direction. What passes it queues.
type Port struct {
	free float64 // when it has passed all that was sent
}

// Transfer sends bytes from one port to another and returns when they have arrived. They leave after all that was sent
// before from that port, and arrive after all that came before to the other one. Call it in the order of time.
func (l Link) Transfer(from, to *Port, bytes, now float64) float64 {
	takes := 0.0
	if l.BytesPerSecond > 0 {
		takes = bytes / l.BytesPerSecond
	}
	begin := max(now, from.free)
	from.free = begin + takes
	to.free = max(begin, to.free) + takes
	return to.free + l.Latency
}
