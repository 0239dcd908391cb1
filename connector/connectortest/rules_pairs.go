// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/pdkit/pdkit/connector/attr"
)

// pairValues are what an attribute may have in a list, on one side or the other: sizes, types, names, lists, and what
// is none of these.
var pairValues = []string{
	"1", "2", "3", "4", "6", "8", "16", "64", "128", " 8", "08", "8,8", "1,2,4", "auto", "fp8", "bfloat16", "read",
	"write", "a", "a,b", "b, c", "ib0,,roce",
	"", " ", ",", "x", "-1", "0", "65536", "99999999999999999999", "1e3", "8.0", "0x8", "\x00", "\xff", "é",
	strings.Repeat("8,", 1<<10), plantedValue,
}

func checkPairs(t *trial) error {
	rules := t.traits.PairRules
	if len(rules) == 0 {
		return notApplicable("its PairRules are none: any two engines can exchange KV")
	}
	again := t.c.Traits().PairRules
	if len(again) != len(rules) {
		return fmt.Errorf("it has %d PairRules once and %d then", len(rules), len(again))
	}
	seen := map[string]bool{}
	for i, r := range rules {
		seen[r.Attribute] = true
		switch {
		case r.Attribute == "" || strings.ContainsFunc(r.Attribute, func(c rune) bool { return c <= ' ' || c == ',' }):
			return fmt.Errorf("PairRules[%d] is about an attribute %q, which no list can have", i, r.Attribute)
		case r.Compatible == nil:
			return fmt.Errorf("the rule about %s has no Compatible", r.Attribute)
		case again[i].Attribute != r.Attribute:
			return fmt.Errorf("PairRules[%d] is about %s once and %s then", i, r.Attribute, again[i].Attribute)
		}
		if err := t.checkPairRule(r, again[i]); err != nil {
			return fmt.Errorf("the rule about %s: %w", r.Attribute, err)
		}
	}
	for name := range t.Except.OwnValues {
		if !seen[name] {
			return fmt.Errorf("the harness says that %s has one value, but no rule is about it", name)
		}
	}
	return nil
}

func (t *trial) checkPairRule(r, again attr.PairRule) error {
	values := slices.Clone(pairValues)
	if own := t.Except.OwnValues[r.Attribute]; own != "" && !slices.Contains(values, own) {
		values = append(values, own)
	}
	verdicts, err := judge(r, values)
	if err != nil {
		return err
	}
	// A picker asks from many goroutines, and an engine's entry outlives many calls.
	var wg sync.WaitGroup
	faults := make([]error, 4)
	for i := range faults {
		rule := []attr.PairRule{r, again}[i%2]
		wg.Go(func() {
			now, err := judge(rule, values)
			if err == nil && !slices.Equal(now, verdicts) {
				err = errors.New("it answers otherwise when it is asked again")
			}
			faults[i] = err
		})
	}
	wg.Wait()
	for _, err := range faults {
		if err != nil {
			return err
		}
	}
	if !slices.Contains(verdicts, false) {
		return errors.New("it forbids nothing")
	}
	if err := t.pairsEquals(r.Attribute, values, verdicts); err != nil {
		return err
	}
	if a, b := t.Prefill.Attribute(r.Attribute), t.Decode.Attribute(r.Attribute); a != "" && b != "" &&
		!r.Compatible(a, b) {
		return errors.New("it parts the harness's engines")
	}
	return nil
}

// pairsEquals checks that two engines with the same value can form a pair: a fleet whose engines are all equal must
// serve. Pickers do not apply rules to an empty value.
func (t *trial) pairsEquals(attribute string, values []string, verdicts []bool) error {
	own, hasOwn := t.Except.OwnValues[attribute]
	alone := true
	for i, v := range values {
		paired := verdicts[i*len(values)+i]
		switch {
		case strings.Trim(v, " ,") == "":
		case hasOwn && v != own:
			alone = alone && !paired
		case !paired:
			return fmt.Errorf("it parts two engines that both have %.20q", v)
		}
	}
	if hasOwn && !alone {
		return fmt.Errorf("the harness says that only engines of %q form pairs with their equals, but others do", own)
	}
	return nil
}

// judge asks a rule about all pairs of values.
func judge(r attr.PairRule, values []string) (verdicts []bool, err error) {
	for _, p := range values {
		for _, d := range values {
			var yes bool
			if err := guard(func() error { yes = r.Compatible(p, d); return nil }); err != nil {
				return nil, fmt.Errorf("asked about %.20q and %.20q: %w", p, d, err)
			}
			verdicts = append(verdicts, yes)
		}
	}
	return verdicts, nil
}
