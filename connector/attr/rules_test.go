// SPDX-License-Identifier: Apache-2.0

package attr_test

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/connector/attr"
)

func TestWhichValuesARuleLetsMeet(t *testing.T) {
	type values struct{ p, d string }
	for name, c := range map[string]struct {
		rule        func(attribute string) attr.PairRule
		meet, apart []values
	}{
		"the same": {attr.Same,
			[]values{{"2", "2"}, {"fp8", "fp8"}, {" 2", "2 "}},
			[]values{{"2", "4"}, {"fp8", "FP8"}, {"2", "02"}, {"2", ""}}},
		"one divides the other": {attr.Multiple,
			[]values{{"2", "4"}, {"4", "2"}, {"1", "7"}, {"8", " 8"}, {"x", "x"}, {"0", "0"}},
			[]values{{"2", "3"}, {"6", "4"}, {"x", "2"}, {"2", "x"}, {"0", "2"}, {"2", "0"}, {"-2", "2"},
				{"2", "99999999999999999999"}, {"2", "4,4"}}},
		"prefill's is a multiple": {attr.PrefillMultiple,
			[]values{{"4", "2"}, {"2", "2"}, {"8", "1"}, {"x", "x"}},
			[]values{{"2", "4"}, {"6", "4"}, {"x", "2"}, {"4", "0"}}},
		"decode's is a multiple": {attr.DecodeMultiple,
			[]values{{"2", "4"}, {"2", "2"}, {"1", "8"}},
			[]values{{"4", "2"}, {"4", "6"}, {"0", "4"}}},
		"an element in common": {attr.Shared,
			[]values{{"a", "a"}, {"a, b", "b,c"}, {"a,b", "b"}},
			[]values{{"a", "b"}, {"a,,b", "c,"}, {"", ""}, {"a b", "a"}}},
	} {
		t.Run(name, func(t *testing.T) {
			rule := c.rule("some")
			assert.Equal(t, "some", rule.Attribute)
			for _, v := range c.meet {
				assert.True(t, rule.Compatible(v.p, v.d), "%q and %q", v.p, v.d)
			}
			for _, v := range c.apart {
				assert.False(t, rule.Compatible(v.p, v.d), "%q and %q", v.p, v.d)
			}
		})
	}
}
