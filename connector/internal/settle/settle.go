// SPDX-License-Identifier: Apache-2.0

// Package settle waits between the legs of stores whose put may end after P's answer.
package settle

import (
	"context"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// Expect is what a [connector.Expecter] returns that waits for nothing but a time; for 0 it does not wait.
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
