// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

// The default client, over sockets, and engines that speak as vLLM does.
func TestEnginesOverTheNetwork(t *testing.T) {
	port, err := freeport.Find(3) // the engine is started again
	require.NoError(t, err)
	at := func(i int) string { return strconv.Itoa(port + i) }
	engine, err := enginesim.Start(enginesim.Config{Model: "m", Connector: "mooncake", KVRole: enginesim.RoleProducer,
		Listen: "127.0.0.1:" + at(0), SideChannel: "127.0.0.1:" + at(1),
		Extra: map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": at(2)}})
	require.NoError(t, err)
	defer engine.Close()
	e, err := discovery.New(engine.URL(), discovery.RolePrefill)
	require.NoError(t, err)
	e.Attributes = map[string]string{"bootstrapURL": engine.Bootstrap()}
	gone, err := discovery.New("http://127.0.0.1:1", discovery.RoleDecode)
	require.NoError(t, err)
	list, err := static.New(e, gone)
	require.NoError(t, err)

	failed := make(chan error, 100)
	src := inspect.Wrap(list, &inspect.Options{Interval: time.Hour, Observe: func(_ string, err error) {
		failed <- err
	}})
	set := discovery.NewSet(src)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = set.Run(ctx) }()
	defer func() { cancel(); <-done }()

	within, stop := context.WithTimeout(ctx, 20*time.Second)
	defer stop()
	require.NoError(t, set.WaitReady(within, func(s *discovery.Snapshot) bool {
		return len(s.Endpoints) == 2 && s.Endpoints[0].Model == "m" && s.Endpoints[0].Version != ""
	}))
	first, ok := src.Reading(e.ID)
	require.True(t, ok)
	assert.Len(t, first.EngineIDs, 1)
	assert.False(t, first.Load.At.IsZero())
	assert.EqualError(t, <-failed, "inspect: GET /v1/models: the engine could not be reached, or broke off")

	require.NoError(t, engine.Restart())
	src.Refresh(e.ID)
	require.Eventually(t, func() bool {
		now, _ := src.Reading(e.ID)
		return len(now.EngineIDs) == 1 && now.EngineIDs[0] != first.EngineIDs[0]
	}, 20*time.Second, 10*time.Millisecond, "the engine id of the process before is still believed")
}
