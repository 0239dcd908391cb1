// SPDX-License-Identifier: Apache-2.0

package pick

import (
	"context"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Func is a function as a picker, for a scheduler that chooses engines by itself. It has no use for the connector's
// rules: the function must know which engines can form a pair, and obey all that [pdflow.PickInput] says. It does not
// tell when engines change, so a flow does not wait for them, and counts as ready even if no engine is there. A
// scheduler that only knows which pair is best has [Score], which leaves all of this to the picker; one that knows more
// has the methods of [pdflow.Picker] itself.
type Func func(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error)

// Pick calls the function.
func (f Func) Pick(ctx context.Context, in *pdflow.PickInput) (pdflow.Pick, error) { return f(ctx, in) }

// Changed returns nil.
func (Func) Changed() <-chan struct{} { return nil }

// Ready returns nil.
func (Func) Ready(*pdflow.PickInput) error { return nil }

// Bind returns f.
func (f Func) Bind(connector.KVConnector, connector.Serving) pdflow.Picker { return f }
