// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim/virtual"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// RunKV is [Run] with the policy kv, whose index is what the engines' caches hold at that moment: that of events which
// take no time.
func RunKV(ctx context.Context, f Fleet, t *Trace, seed uint64) (*Result, error) {
	k := &known{}
	return run(ctx, f, t, pick.KV(pick.KVOptions{Index: k, Tokens: k}), seed, k)
}

// known tells what the engines hold of the prompt of an arrival.
type known struct {
	places  map[string]int // of engines, by ID
	fleet   *virtual.Fleet
	arrival *virtual.Arrival
}

// Tokens says that a prompt's tokens are known. Match looks its blocks up without them.
func (k *known) Tokens(context.Context, *connector.ClientRequest) (ids []uint32, exact bool, err error) {
	return nil, true, nil
}

// Match tells what each engine holds.
func (k *known) Match(_ *kvindex.Query, dst []kvindex.Hit) []kvindex.Hit {
	for id, place := range k.places {
		if n := min(k.fleet.Engine(place).Known(k.arrival.Keys), k.arrival.Prompt-1); n > 0 {
			dst = append(dst, kvindex.Hit{Engine: id, Device: n, Tokens: n, Exact: true})
		}
	}
	slices.SortFunc(dst, func(a, b kvindex.Hit) int { return strings.Compare(a.Engine, b.Engine) })
	return dst
}
