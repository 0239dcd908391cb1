// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// check runs the program with -check and returns what it prints.
func check(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs strings.Builder
	code = run(append(args, "-check"), &out, &errs, nil)
	return code, out.String(), errs.String()
}

func write(t *testing.T, yaml string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(yaml), 0o600))
	return file
}

// The examples of the design documents and of the gateway's contract load as they stand.
func TestTheDocumentsExamplesAreAccepted(t *testing.T) {
	files, err := filepath.Glob("testdata/documents/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 9)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := check(t, "-config", file)
			assert.Equal(t, exitOK, code)
			assert.Empty(t, stderr)
			assert.NotContains(t, stdout, "lmcache-password", "settings may be passwords")
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", stdout)
		})
	}
}

func TestCheckShowsWhatAConfigurationMeans(t *testing.T) {
	code, stdout, _ := check(t, "-config", "testdata/check.yaml")
	assert.Equal(t, exitOK, code)
	golden(t, "testdata/check.txt", stdout)
}

func TestTodaysMooncakeIsNamed(t *testing.T) {
	for spec, warns := range map[string]bool{
		"  kvConnector: {type: mooncake}\n":                                true,
		"  kvConnector: {type: mooncake, config: {bootstrapPort: 8998}}\n": false,
		"  kvConnector: {type: MooncakeConnector}\n":                       false,
		"  kvConnector: {type: mooncake-store}\n":                          false,
	} {
		_, stdout, _ := check(t, "-config", write(t, modelYAML(spec)))
		assert.Equal(t, warns, strings.Contains(stdout, "write type: mooncake-store"), spec)
	}
}

// A setting without an effect is one that no engine has: not one that only P or only D reads, nor that of an engine
// which cannot be launched.
func TestSettingsWithoutEffectAreTold(t *testing.T) {
	for spec, idle := range map[string][]string{
		"{type: LMCacheConnectorV1, config: {enable_nixl: true, nixl_role: sender, nixl_peer_host: h, " +
			"nixl_peer_port: 1, nixl_buffer_size: 1, config_path: c}}": {"config.config_path"},
		// D has no ports here
		"{type: lmcache-pd, config: {config_path: c}}": {"config.config_path"},
		// issue 1069: nothing is shared
		"{type: LMCacheConnectorV1, config: {discard_partial_chunks: true}}": {"config.backendType"},
		"{type: lmcache, config: {remote_url: \"redis://u:p@h:1\"}}":         {"config.remote_url"},
		// the gateway heeds maxRetries
		"{type: http, config: {maxRetries: 1}, resources: " +
			"{maxMemory: 1Gi}}": {"resources.maxMemory"},
		"{type: nixl, fallback: connector, fallbackConnector: {type: lmcache, config: {backendType: redis, " +
			"redisConfig: {host: h}, ttl: 1m}}}": {"fallbackConnector.config.ttl"},
	} {
		_, stdout, stderr := check(t, "-config", write(t, serverYAML("m", "  kvConnector: "+spec+"\n")))
		var told []string
		for line := range strings.Lines(stdout) {
			if rest, ok := strings.CutPrefix(line, "without effect: "); ok {
				_, rest, _ = strings.Cut(rest, "spec.kvConnector.")
				path, _, _ := strings.Cut(rest, ":")
				told = append(told, path)
			}
		}
		assert.ElementsMatch(t, idle, told, "%s\n%s%s", spec, stdout, stderr)
	}
}

// A limit is rendered for the engines, or it has no effect: -check does not say both of one.
func TestALimitIsRenderedOrWithoutEffect(t *testing.T) {
	for connector, rendered := range map[string]string{
		"{type: nixl, resources: {maxMemory: 32Gi, maxDisk: 1Gi}}":        "",
		"{type: lmcache, resources: {maxMemory: 32Gi, maxBandwidth: 1G}}": "memory 32Gi: rendered",
		"{type: http, fallback: connector, fallbackConnector: {type: nixl, " +
			"resources: {maxMemory: 32Gi}}}": "",
	} {
		_, stdout, stderr := check(t, "-config", write(t, modelYAML("  kvConnector: "+connector+"\n")))
		assert.NotEmpty(t, stdout, stderr)
		if rendered == "" {
			assert.NotContains(t, stdout, "rendered for the engines", connector)
		} else {
			assert.Contains(t, stdout, rendered, connector)
		}
		assert.Contains(t, stdout, "without effect: ", connector)
	}
}

func TestTheExampleFileIsGood(t *testing.T) {
	code, stdout, stderr := check(t, "-config", "gateway.yaml")
	assert.Equal(t, exitOK, code, stderr)
	assert.NotContains(t, stdout, "warning")
}
