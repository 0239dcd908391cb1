// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"fmt"

	"github.com/pdkit/pdkit/connector"
)

// NoTransfer returns an error that is [connector.ErrNoTransfer] and says what is wrong with the handoff. The text must
// not hold values of the handoff.
func NoTransfer(format string, args ...any) error {
	return fmt.Errorf("%w: %s", connector.ErrNoTransfer, fmt.Sprintf(format, args...))
}
