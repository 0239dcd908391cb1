// SPDX-License-Identifier: Apache-2.0

package wrong

import (
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
)

const rulePairs = "rules about pairs are constant, forbid something, and part no engine from its like"

// pairs makes a fault of one rule about tpSize.
func pairs(what string, compatible func(prefill, decode string) bool) Fault {
	return declares(rulePairs, what, func(t *connector.Traits) {
		t.PairRules = []attr.PairRule{{Attribute: attr.TPSize, Compatible: compatible}}
	})
}

var pairFaults = []Fault{
	declares(rulePairs, "has a rule about nothing", func(t *connector.Traits) {
		t.PairRules = []attr.PairRule{attr.Same("")}
	}),
	declares(rulePairs, "has a rule that cannot be asked", func(t *connector.Traits) {
		t.PairRules = []attr.PairRule{{Attribute: attr.TPSize}}
	}),
	with(rulePairs, "has another rule each time", func(f *faulty) {
		var n atomic.Int32
		f.traits = func(t *connector.Traits) {
			t.PairRules = []attr.PairRule{attr.Same([]string{attr.TPSize,
				attr.PPSize}[n.Add(1)%2])}
		}
	}),
	with(rulePairs, "has a rule more each time", func(f *faulty) {
		var n atomic.Int32
		f.traits = func(t *connector.Traits) {
			t.PairRules = append(t.PairRules, slices.Repeat([]attr.PairRule{attr.Same(attr.PPSize)},
				int(n.Add(1)))...)
		}
	}),
	with(rulePairs, "lets engines form a pair once, and not again", func(f *faulty) {
		var n atomic.Int64
		f.traits = func(t *connector.Traits) {
			first := n.Add(1) == 1
			t.PairRules = []attr.PairRule{{Attribute: attr.TPSize,
				Compatible: func(p, d string) bool { return p == d || first && p == "4" && d == "8" }}}
		}
	}),
	declares(rulePairs, "parts the harness's engines", func(t *connector.Traits) {
		t.PairRules = []attr.PairRule{attr.Same(attr.TPSize), attr.Same(attr.Store)}
	}),
	pairs("pairs equal engines of one value only", func(p, d string) bool { return p == d && p == "4" }),
	pairs("lets every two engines form a pair", func(string, string) bool { return true }),
	pairs("lets no two engines form a pair", func(string, string) bool { return false }),
	pairs("parts engines of the same odd number", func(p, d string) bool { return p == d && p != "3" }),
	pairs("parts engines alike in what is no number", func(p, d string) bool {
		_, err := strconv.Atoi(p)
		return err == nil && p == d
	}),
	pairs("panics at what is no number", func(p, d string) bool {
		n, err := strconv.Atoi(p)
		if err != nil {
			panic(err)
		}
		return p == d || n > 1
	}),
	pairs("divides by nought", func(p, d string) bool {
		a, _ := strconv.Atoi(p) //nolint:errcheck // that is the fault
		b, _ := strconv.Atoi(d) //nolint:errcheck // that is the fault
		return p == d || a%b == 0
	}),
}
