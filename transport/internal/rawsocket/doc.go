// SPDX-License-Identifier: Apache-2.0

// Package rawsocket reads and writes TCP connections by system calls of which Go's scheduler is not told: see
// transport.NewListener, which says what that is good for. On systems other than Linux connections stay as they are.
package rawsocket

import "sync"

// PooledReader is a connection that can wait for bytes without a buffer for them.
type PooledReader interface {
	// ReadPooled reads into a buffer of pool, which holds *[]byte. It has the buffer only while it looks for bytes, not
	// while it waits for them. The buffer is nil if there is an error.
	ReadPooled(pool *sync.Pool) (*[]byte, int, error)
}
