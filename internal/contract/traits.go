// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/connector"
)

// CheckTraits returns an error if the declaration cannot be kept to, whatever the connector does.
func CheckTraits(t *connector.Traits) error {
	if t.Name == "" || t.Name != strings.ToLower(t.Name) {
		return fmt.Errorf("Traits.Name is %q: write a name in lower case", t.Name)
	}
	members := slices.Concat(t.Members, t.Carries)
	if t.Handoff.Member != "" {
		members = append(members, t.Handoff.Member)
	}
	for _, member := range members {
		if slices.Contains(strings.Split(member, "."), "") {
			return fmt.Errorf("a member %q in Traits: write names with one dot between them", member)
		}
	}
	if t.Handoff.Lease < 0 {
		return errors.New("Traits.Handoff.Lease is negative: write 0 for a handoff that does not age")
	}
	return errors.Join(t.Timeouts.Check(), t.Retry.Check())
}
