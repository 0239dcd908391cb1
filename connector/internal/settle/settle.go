// SPDX-License-Identifier: Apache-2.0

// Package settle waits between the legs of a store whose put may end after P's response.
package settle

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// Expect is the Expect of a [connector.Expecter] that only waits for a fixed time. For 0 it does not wait.
func Expect(d time.Duration) (wait func(context.Context) (connector.Event, error), done func(error)) {
	done = func(error) {}
	if d <= 0 {
		return nil, done
	}
	return func(ctx context.Context) (connector.Event, error) {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case at := <-timer.C:
			return connector.Event{At: at}, nil
		case <-ctx.Done():
			return connector.Event{}, context.Cause(ctx)
		}
	}, done
}
