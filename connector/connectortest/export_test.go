// SPDX-License-Identifier: Apache-2.0

package connectortest

import (
	"context"
	"errors"
	"fmt"
)

// Rules are the names of all rules.
func Rules() []string {
	names := make([]string, 0, len(rules))
	for _, r := range rules {
		names = append(names, r.name)
	}
	return names
}

// CheckRule is Check of one rule.
func CheckRule(ctx context.Context, h Harness, name string) error {
	for _, r := range rules {
		if r.name == name {
			return h.try(ctx, r)
		}
	}
	return fmt.Errorf("there is no rule %q", name)
}

// DoesNotApply tells a rule that has nothing to check from one that is broken.
func DoesNotApply(err error) bool {
	_, ok := errors.AsType[notApplicable](err)
	return ok
}

// CheckGolden plays one golden file.
var CheckGolden = checkGolden
