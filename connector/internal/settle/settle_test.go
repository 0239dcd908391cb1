// SPDX-License-Identifier: Apache-2.0

package settle_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector/internal/settle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheTimeIsWaitedAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		wait, done := settle.Expect(50 * time.Millisecond)
		event, err := wait(t.Context())
		require.NoError(t, err)
		assert.Equal(t, 50*time.Millisecond, event.At.Sub(began))
		done(nil)

		left := errors.New("left")
		ctx, leave := context.WithCancelCause(t.Context())
		leave(left)
		_, err = wait(ctx)
		require.ErrorIs(t, err, left)
	})
	for _, none := range []time.Duration{0, -1} {
		wait, done := settle.Expect(none)
		assert.Nil(t, wait)
		done(nil)
	}
}
