// SPDX-License-Identifier: Apache-2.0

//go:build linux && !race

package transport

// Under the race detector a sync.Pool drops what it is given now and then.

import (
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/transport/internal/rawsocket"
)

// While a read waits, its buffer is in the pool.
func TestAReadThatWaitsHoldsNoBuffer(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // a pool hides from one CPU what another one has
	server, client := accepted(t, listen(t))
	only := make([]byte, 100)
	pool := sync.Pool{New: func() any {
		assert.Fail(t, "the only buffer is not in the pool")
		b := make([]byte, 100)
		return &b
	}}
	pool.Put(&only)
	type result struct {
		pooled *[]byte
		n      int
		err    error
	}
	came := make(chan result)
	go func() {
		pooled, n, err := server.(rawsocket.PooledReader).ReadPooled(&pool)
		came <- result{pooled, n, err}
	}()
	time.Sleep(50 * time.Millisecond) // it has found nothing
	held := pool.Get()
	assert.Same(t, &only, held)
	pool.Put(held)
	_, err := io.WriteString(client, "token")
	require.NoError(t, err)
	got := <-came
	require.NoError(t, got.err)
	require.Same(t, &only, got.pooled)
	assert.Equal(t, "token", string(only[:got.n]))

	pool.Put(&only)
	_ = client.Close()
	pooled, _, err := server.(rawsocket.PooledReader).ReadPooled(&pool)
	require.ErrorIs(t, err, io.EOF)
	assert.Nil(t, pooled)
	assert.Same(t, &only, pool.Get(), "after an error, too")
}
