// SPDX-License-Identifier: Apache-2.0

package multi_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/launch"
	_ "github.com/pdkit/pdkit/connector/lmcachepd" // a second child that sets a variable of UCX
	"github.com/pdkit/pdkit/discovery"
)

// Two children that need different values of one variable cannot run in one engine. If they need the same value, the
// engine gets it once.
func TestAVariableHasOneValueForAllChildren(t *testing.T) {
	e, err := discovery.New("http://10.0.0.2:8200", discovery.RoleDecode)
	require.NoError(t, err)
	e.Attributes = map[string]string{"receiverInitPorts": "8300", "receiverAllocPorts": "8400"}
	render := func(config string) (launch.Settings, error) {
		r, ok := connector.As[launch.Renderer](open(t, config))
		require.True(t, ok)
		return r.Render(launch.Target{Endpoint: e})
	}
	_, err = render(`{"connectors":[{"type":"nixl","config":{"protocol":"rdma"}},{"type":"lmcache-pd"}]}`)
	require.ErrorContains(t, err, "connectors[1]: wants another value of UCX_TLS than a connector before it")

	s, err := render(`{"connectors":[{"type":"nixl"},{"type":"lmcache-pd"}]}`)
	require.NoError(t, err)
	seeds := 0
	for _, v := range s.Env {
		if v.Name == "PYTHONHASHSEED" {
			seeds++
		}
	}
	assert.Equal(t, 1, seeds)
}
