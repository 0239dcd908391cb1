// SPDX-License-Identifier: Apache-2.0

package main

import (
	"container/list"
	"slices"
)

// fleet describes the simulated engines. All engines of one role are alike.
type fleet struct {
	prefill, decode int
	zones           int     // the engines are distributed over them by turns
	tokensPerSecond float64 // of a prefill engine
	cacheTokens     int     // size of a prefill engine's prefix cache
	perStep, perRow float64 // seconds of a decode step: for the step, and for each request in it
	handshake       float64 // seconds, for the first transfer of a pair
	bytesPerSecond  float64 // of KV within a zone; a quarter of it between zones
	bytesPerToken   float64 // of KV
}

// usualFleet has different numbers of prefill and decode engines: with equal numbers round robin would always make the
// same pairs. An engine is about as fast as an 8B model on one H100. Only the order of magnitude matters.
func usualFleet() fleet {
	return fleet{prefill: 8, decode: 7, zones: 2, tokensPerSecond: 16_000, cacheTokens: 120_000, perStep: .010,
		perRow:    .0002,
		handshake: .15, bytesPerSecond: 20e9, bytesPerToken: 128 << 10}
}

// prefiller computes one prompt after the other and caches its blocks. The least recently used blocks are evicted.
type prefiller struct {
	freeAt   float64
	capacity int // blocks
	blocks   map[uint64]*list.Element
	order    *list.List // the most recently used first
	busy     float64    // seconds
}

func newPrefiller(f fleet) *prefiller {
	return &prefiller{capacity: f.cacheTokens / blockTokens, blocks: map[uint64]*list.Element{}, order: list.New()}
}

// cached returns how many tokens of a prompt are in the cache.
func (p *prefiller) cached(j *job) int {
	n := 0
	for _, b := range j.blocks {
		e := p.blocks[b]
		if e == nil {
			break
		}
		p.order.MoveToFront(e)
		n++
	}
	return n * blockTokens
}

func (p *prefiller) keep(j *job) {
	// the first block becomes the most recently used: without it the others are useless
	for _, b := range slices.Backward(j.blocks) {
		if e := p.blocks[b]; e != nil {
			p.order.MoveToFront(e)
			continue
		}
		p.blocks[b] = p.order.PushFront(b)
	}
	for p.order.Len() > p.capacity {
		last := p.order.Back()
		delete(p.blocks, p.order.Remove(last).(uint64)) //nolint:errcheck // nothing else is put in
	}
}

// decoder serves all its requests at the same time: each step makes one token for each of them.
type decoder struct {
	f      fleet
	at     float64 // of the last change
	steps  float64 // until then
	rows   []*row
	tokens int // that it has made
	round  int // of the event that ends the next request
}

type row struct {
	until float64 // steps
	done  func()
}

func (d *decoder) step() float64 { return d.f.perStep + d.f.perRow*float64(len(d.rows)) }

// advance moves the engine's state forward to the given time.
func (d *decoder) advance(now float64) {
	if len(d.rows) > 0 {
		d.steps += (now - d.at) / d.step()
	}
	d.at = now
}

// next returns the request that will end first, and the time.
func (d *decoder) next() (*row, float64) {
	if len(d.rows) == 0 {
		return nil, 0
	}
	first := d.rows[0]
	for _, r := range d.rows {
		if r.until < first.until {
			first = r
		}
	}
	return first, d.at + max(first.until-d.steps, 0)*d.step()
}
