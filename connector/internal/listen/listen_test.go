// SPDX-License-Identifier: Apache-2.0

package listen

import (
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/internal/relisten"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type server struct{ ln *relisten.Listener }

func serve(ln *relisten.Listener) *server { return &server{ln} }

// free returns an address at which nobody listens.
func free(t *testing.T) string {
	t.Helper()
	port, err := freeport.One()
	require.NoError(t, err)
	return port
}

func TestAllSpellingsOfAnAddressShareItsListener(t *testing.T) {
	var s Shared[*server]
	port, ends := free(t), 0
	var all []*server
	for _, host := range []string{"127.0.0.1", "localhost", "LocalHost", "[::ffff:127.0.0.1]"} {
		v, err := s.Acquire(t.Context(), host+":"+port, serve)
		require.NoError(t, err, host)
		all = append(all, v)
	}
	for i, v := range all {
		assert.Same(t, all[0], v)
		assert.Zero(t, ends)
		s.Release(v, func() { ends++; assert.NoError(t, v.ln.Close()) })
		assert.Equal(t, i == len(all)-1, ends == 1, "the last one ends it")
	}
	s.Release(all[0], func() { t.Error("ended twice") })
	again, err := s.Acquire(t.Context(), "127.0.0.1:"+port, serve)
	require.NoError(t, err, "its address is free again")
	assert.NotSame(t, all[0], again)
	s.Release(again, func() { assert.NoError(t, again.ln.Close()) })
	assert.Empty(t, s.keys)
	assert.Empty(t, s.used)
}

func TestEveryAddressIsOne(t *testing.T) {
	for _, address := range []string{":7", "0.0.0.0:7", "[::]:7"} {
		key, alone := canonical(t.Context(), address)
		assert.Equal(t, ":7", key)
		assert.False(t, alone)
	}
}

func TestAnyFreePortIsNobodyElses(t *testing.T) {
	var s Shared[*server]
	a, err := s.Acquire(t.Context(), "127.0.0.1:0", serve)
	require.NoError(t, err)
	b, err := s.Acquire(t.Context(), "127.0.0.1:0", serve)
	require.NoError(t, err)
	assert.NotSame(t, a, b)
	for _, v := range []*server{a, b} {
		s.Release(v, func() { assert.NoError(t, v.ln.Close()) })
	}
}

func TestAnAddressThatIsTakenLeavesNothing(t *testing.T) {
	var s Shared[*server]
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	for _, address := range []string{ln.Addr().String(), "nonsense", "127.0.0.1:x" + strings.Repeat("y", 9)} {
		_, err = s.Acquire(t.Context(), address, func(*relisten.Listener) *server { t.Error("served"); return nil })
		require.Error(t, err)
	}
	require.NoError(t, ln.Close())
	assert.Empty(t, s.keys)
}

func TestManyAtOnce(t *testing.T) {
	var s Shared[*server]
	address := "127.0.0.1:" + free(t)
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			v, err := s.Acquire(t.Context(), address, serve)
			if assert.NoError(t, err) {
				s.Release(v, func() { assert.NoError(t, v.ln.Close()) })
			}
		})
	}
	all.Wait()
	assert.Empty(t, s.used)
}
