// SPDX-License-Identifier: Apache-2.0

package discovery_test

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
)

func endpoint(t testing.TB, id string, role discovery.Role) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://"+id+":8000", role)
	require.NoError(t, err)
	e.ID = id
	return e
}

func TestSetPublishesAStaticList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src, err := static.New(endpoint(t, "p", discovery.RolePrefill))
		require.NoError(t, err)
		set := discovery.NewSet(src)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- set.Run(ctx) }()
		require.NoError(t, set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return s.Version == 1 }))
		require.Len(t, set.Load().Endpoints, 1)
		cancel()
		require.NoError(t, <-done)
	})
}
