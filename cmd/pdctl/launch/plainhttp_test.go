// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
)

func TestEnginesAreToldNothingOfKV(t *testing.T) {
	s := render(t, "http", `{"requestTimeout":"1s","maxRetries":1,"kvTransferMethod":"implicit"}`,
		launch.Target{Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi", MaxBandwidth: "1Gi"}})
	assert.Nil(t, s.KVTransfer)
	assert.Empty(t, s.Env)
	var paths []string
	for _, n := range s.Notes[1:] {
		assert.Equal(t, strings.HasPrefix(n.Path, "resources.") || n.Path == "config.kvTransferMethod", n.NoEffect,
			"%s: the gateway heeds the others", n.Path)
		paths = append(paths, n.Path)
	}
	assert.Contains(t, s.Notes[0].Text, "computed twice")
	assert.Equal(t, []string{"config.requestTimeout", "config.maxRetries", "config.kvTransferMethod",
		"resources.maxMemory", "resources.maxDisk", "resources.maxBandwidth"}, paths)
}
