// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

func TestTensorRTServersAreConfiguredByAFile(t *testing.T) {
	p, d := engine(t, "http://p:8001", discovery.RolePrefill), engine(t, "http://d:8002", discovery.RoleDecode)
	out := render(t, "trtllm", ``, launch.Target{Endpoint: p, Index: 2})
	assert.Equal(t, []string{"--extra_llm_api_options", "trtllm-context-2.yaml"}, out.Args)
	assert.Equal(
		t, []launch.File{
			{Name: "trtllm-context-2.yaml", Content: "disable_overlap_scheduler: true\ncache_transceiver_config:\n  " +
				"backend: DEFAULT\n"},
		}, out.Files,
	)
	assert.Empty(t, out.Notes)

	out = render(t, "trtllm", ``, launch.Target{Endpoint: d})
	assert.Equal(
		t, []launch.File{
			{Name: "trtllm-generation-0.yaml", Content: "return_perf_metrics: true\nperf_metrics_max_requests: 100\n" +
				"cache_transceiver_config:\n  backend: DEFAULT\n"},
		}, out.Files,
	)

	out = render(t, "trtllm", `{"dispatch":"generation-first"}`,
		launch.Target{Endpoint: d, Version: launch.Version{Major: 1, Minor: 2, Patch: 1}})
	assert.Contains(t, out.Files[0].Content, "cache_transceiver_config:\n  backend: NIXL\n  transceiver_runtime: "+
		"PYTHON\n")
	require.Len(t, out.Notes, 1)
	assert.Equal(t, "config.dispatch", out.Notes[0].Path)
	assert.Empty(t, render(t, "trtllm", `{"dispatch":"generation-first"}`, launch.Target{Endpoint: d}).Notes,
		"the newest has it")
}

func TestNoSettingIsDroppedInSilenceAndNoKeyShown(t *testing.T) {
	out := render(t, "trtllm", `{"machineID":3,"authKey":"the key","dispatch":"context-first"}`,
		launch.Target{Endpoint: engine(t, "http://d:1", discovery.RoleDecode), CPU: true,
			Resources: config.Resources{MaxMemory: "1Gi", MaxDisk: "1Gi", MaxBandwidth: "1Gi"}})
	paths := map[string]bool{}
	for _, n := range out.Notes {
		assert.NotEmpty(t, n.Text)
		assert.NotContains(t, n.Text, "the key")
		paths[n.Path] = n.NoEffect
	}
	assert.Equal(
		t, map[string]bool{"config.machineID": false, "config.authKey": false, "config.dispatch": false,
			"resources.maxMemory": true, "resources.maxDisk": true, "resources.maxBandwidth": true, "cpu": false},
		paths,
	)
	assert.Contains(t, out.Files[0].Content, "internal_request_auth_key")
	assert.NotContains(t, out.Files[0].Content, "the key")
}
