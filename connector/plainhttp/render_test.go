// SPDX-License-Identifier: Apache-2.0

package plainhttp_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/launch"
	"github.com/pdkit/pdkit/connector/plainhttp"
)

func TestEnginesAreToldNothingOfKV(t *testing.T) {
	s, err := open(t, &plainhttp.Options{RequestTimeout: 1, MaxRetries: 1, KVTransferMethod: "implicit"}).Render(
		launch.Target{Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi", MaxBandwidth: "1Gi"}})
	require.NoError(t, err)
	assert.Nil(t, s.KVTransfer)
	assert.Empty(t, s.Env)
	var idle []string
	for _, n := range s.Notes[1:] {
		assert.Equal(t, strings.HasPrefix(n.Path, "resources.") || n.Path == "config.kvTransferMethod", n.NoEffect,
			"%s: the gateway heeds the others", n.Path)
		idle = append(idle, n.Path)
	}
	assert.Contains(t, s.Notes[0].Text, "computed twice")
	assert.Equal(t, []string{"config.requestTimeout", "config.maxRetries", "config.kvTransferMethod",
		"resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"}, idle)
}
