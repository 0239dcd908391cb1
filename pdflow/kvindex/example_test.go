// SPDX-License-Identifier: Apache-2.0

package kvindex_test

import (
	"fmt"
	"time"

	"github.com/pdkit/pdkit/pdflow/kvindex"
)

// An engine has stored one block of 4 tokens. The payload is msgpack, as an array of time, events and rank.
func Example() {
	payload := []byte("\x93\x01\x91\x95\xabBlockStored\x91\x07\xc0\x94\x0a\x0b\x0c\x0d\x04\x00")
	index := kvindex.New()
	source := kvindex.Source{Engine: "prefill-0", Model: "m"}
	replay, err := index.Apply(source, 0, payload, time.Now())
	fmt.Println(replay, err, index.State("prefill-0").State == kvindex.Exact)

	for _, hit := range index.Match(&kvindex.Query{Model: "m", Tokens: []uint32{10, 11, 12, 13, 14}}, nil) {
		fmt.Println(hit.Engine, hit.Tokens)
	}
	// Output:
	// false <nil> true
	// prefill-0 4
}
