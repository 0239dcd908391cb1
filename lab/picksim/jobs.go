// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"hash/maphash"
	"math/rand/v2"
	"net/http"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// job is a request as the picker and the engines see it.
type job struct {
	at     float64
	in     *pdflow.PickInput
	tokens int      // of the prompt
	blocks []uint64 // of the prompt: each is a hash of this block and of all before it
	output int
}

// blockTokens is the size of the engines' KV blocks. The picker does not know it, and uses another size.
const blockTokens = 16

func prepare(trace []entry) ([]*job, error) {
	texts := map[segment][]byte{}
	seed := maphash.MakeSeed() // hashes are only compared with each other
	jobs := make([]*job, 0, len(trace))
	for i := range trace {
		e := &trace[i]
		if err := e.check(); err != nil {
			return nil, err
		}
		var prompt []byte
		for _, s := range e.Segments {
			if texts[s] == nil {
				texts[s] = text(s)
			}
			prompt = append(prompt, texts[s]...)
		}
		body, err := json.Marshal(
			map[string]any{"model": "m", "prompt": string(prompt), "max_tokens": max(256, 2*e.Output), "stream": true},
		)
		if err != nil {
			return nil, err
		}
		request, err := connector.ParseRequest(connector.APICompletions, body)
		if err != nil {
			return nil, err
		}
		j := &job{at: e.At, tokens: (len(prompt) + tokenBytes - 1) / tokenBytes, output: e.Output,
			in: &pdflow.PickInput{Request: request, Attempt: 1}}
		if e.Session != "" {
			j.in.Header = http.Header{"X-Session-Id": {e.Session}}
		}
		h := uint64(0)
		for rest := prompt; len(rest) >= blockTokens*tokenBytes; rest = rest[blockTokens*tokenBytes:] {
			h = maphash.Comparable(seed, [2]uint64{h, maphash.Bytes(seed, rest[:blockTokens*tokenBytes])})
			j.blocks = append(j.blocks, h)
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// text returns a segment's text. Equal ids give equal texts.
func text(s segment) []byte {
	var h uint64 = 14695981039346656037
	for _, c := range []byte(s.ID) {
		h = (h ^ uint64(c)) * 1099511628211
	}
	r := rand.New(rand.NewPCG(h, uint64(s.Bytes))) //nolint:gosec // the same text each time
	b := make([]byte, s.Bytes)
	for i := range b {
		b[i] = "abcdefghijklmnopqrstuvwxyz      "[r.IntN(32)]
	}
	return b
}
