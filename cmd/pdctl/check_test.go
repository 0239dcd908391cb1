// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
)

func TestIssue1069IsFoundInItsOwnManifest(t *testing.T) {
	code, out, errs := pdctl(t, "", "check", "-f", documents+"4-lmcache.yaml", "testdata/kthena-1069.yaml")
	assert.Equal(t, exitFaults, code, errs)
	assert.Contains(t, out, "error lmcache-not-shared\n  qwen-pd-offline/prefill, qwen-pd-offline/decode: each keeps "+
		"LMCache's chunks")
	assert.Contains(t, out, "2 engines read: 1 error, 0 warnings")

	// The second half of the issue: LMCache's own transfer without notices, behind the same gateway.
	text, err := os.ReadFile("testdata/kthena-1069.yaml")
	require.NoError(t, err)
	for role, pd := range map[string]string{"producer": "sender", "consumer": "receiver"} {
		text = []byte(strings.Replace(string(text), `"kv_role":"kv_`+role+
			`","kv_connector_extra_config":{`, `"kv_role":"kv_`+role+
			`","kv_connector_extra_config":{"lmcache.enable_pd":true,"lmcache.pd_skip_proxy_notification":true,`+
			`"lmcache.pd_role":"`+pd+`",`, 1))
	}
	code, out, _ = pdctl(t, string(text), "check", "-f", documents+"4-lmcache.yaml", "-")
	assert.Equal(t, exitFaults, code)
	assert.Contains(t, out, "error lmcache-pd-behind-lmcache")
	assert.Contains(t, out, "error lmcache-notice-skipped")
	assert.NotContains(t, out, "hf_secret")
}

func TestAComposeFileIsReadWithItsConfigsAndMounts(t *testing.T) {
	code, out, errs := pdctl(t, "", "check", "-f", documents+"2-lmcache.yaml", "testdata/compose.yaml")
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Equal(t, "2 engines read: 0 errors, 0 warnings\n", out)

	text, err := os.ReadFile("testdata/compose.yaml")
	require.NoError(t, err)
	_, out, _ = pdctl(t, strings.Replace(string(text), "lm://store", "lm://other", 1), "check", "-")
	assert.Contains(t, out, "settings-unread", "standard input has no folder to find a mount in")
	file := written(t, strings.Replace(string(text), "lm://store", "lm://other", 1))
	for _, name := range []string{"lmcache.yaml", "decode.env"} {
		content, err := os.ReadFile(filepath.Join("testdata", name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(file), name), content, 0o600))
	}
	code, out, _ = pdctl(t, "", "check", file)
	assert.Equal(t, exitFaults, code)
	assert.Contains(t, out, "error lmcache-remote-differs\n  decode, prefill:")
	assert.NotContains(t, out, "lm://", "addresses of a store may hold its password")
}

func TestManifestsAreReadWhereverTheirContainersAre(t *testing.T) {
	code, out, _ := pdctl(t, "", "check", "-f", documents+"2-nixl.yaml", "testdata/deployment.yaml")
	assert.Equal(t, exitFaults, code)
	assert.Contains(t, out, "error nixl-loopback\n  prefill:", "each pod is a machine of its own")
	assert.Contains(t, out, "error lease-short\n  prefill: keeps unread KV for 10s, and the gateway uses "+
		"handoffs for 30s")
	assert.Contains(t, out, "2 engines read: 2 errors, 0 warnings", "the sidecar is no engine")
}

func TestAScriptIsReadWithItsVariables(t *testing.T) {
	code, out, errs := pdctl(t, "", "check", "testdata/guide.sh", "--engine-version", "0.10.2")
	assert.Equal(t, exitOK, code, errs)
	assert.Equal(t, "2 engines read: 0 errors, 0 warnings\n", out)
	code, out, _ = pdctl(t, "", "check", "testdata/guide.sh", "--engine-version", "0.32.0")
	assert.Equal(t, exitFaults, code)
	assert.NotContains(t, out, assumed)
	code, out, _ = pdctl(t, "", "check", "testdata/guide.sh")
	assert.Equal(t, exitFaults, code, "the newest release is assumed")
	assert.Contains(t, out, "\n"+assumed+"2 engines read: 1 error, 0 warnings\n")
	assert.Contains(t, out, "error connector-removed\n  guide.sh:7, guide.sh:16: each names PyNcclConnector, which "+
		"is gone from vLLM 0.11 on")
}

func TestDockerRunIsReadWithItsOptions(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "lm.yaml"), []byte("remote_url: lm://store:1\n"), 0o600))
	file := filepath.Join(dir, "start.sh")
	const run = `docker run -d --rm --gpus all --name=%s -e PYTHONHASHSEED=%s --env HF_TOKEN -e ` +
		`LMCACHE_CONFIG_FILE=/etc/lm.yaml -v ./lm.yaml:/etc/lm.yaml:ro -p 8100:8000 ` +
		`vllm/vllm-openai:v0.32.0 --model m --kv-transfer-config '{"kv_connector":"LMCacheConnectorV1",` +
		`"kv_role":"kv_%s"}'` + "\n"
	require.NoError(t, os.WriteFile(file, []byte(fmt.Sprintf(run, "p", "0", "producer")+
		fmt.Sprintf(run, "d", "0", "consumer")), 0o600))
	code, out, errs := pdctl(t, "", "check", file)
	assert.Equal(t, exitOK, code, "%s%s", out, errs)
	assert.Equal(t, "2 engines read: 0 errors, 0 warnings\n", out, "each container is a machine of its own")

	require.NoError(t, os.WriteFile(file, []byte(fmt.Sprintf(run, "p", "0", "producer")+
		fmt.Sprintf(run, "d", "1", "consumer")), 0o600))
	_, out, _ = pdctl(t, "", "check", file)
	assert.Contains(t, out, "error hash-seed-differs\n  start.sh:1, start.sh:2:")
}

func TestCommandsAndJSON(t *testing.T) {
	code, out, _ := pdctl(t, "", "check", "--json", "-f", documents+"2-http.yaml",
		"--command", `HF_TOKEN=hf_secret vllm serve m --api-key key_secret --kv-transfer-config `+
			`'{"kv_connector":"NixlConnector","kv_role":"kv_producer"}'`,
		"--command", `vllm serve m --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' `+
			`--kv-cache-dtype fp8`)
	assert.Equal(t, exitFaults, code)
	var found []struct {
		Severity, Code, Text, Remedy string
		Engines                      []string
	}
	require.NoError(t, json.Unmarshal([]byte(out), &found))
	require.Len(t, found, 3)
	assert.Equal(t, "kv-cache-dtype-differs", found[0].Code)
	assert.Equal(t, []string{"command 1", "command 2"}, found[0].Engines)
	assert.Equal(t, "gateway-relays-nothing", found[1].Code)
	assert.Equal(t, "write kvConnector.type: nixl", found[1].Remedy)
	assert.NotContains(t, out, "secret")
	_, out, _ = pdctl(t, "", "check", "--json", "--command", "vllm serve m")
	assert.Equal(t, "[]\n", out)
}

func TestCheckSaysWhatItCannotRead(t *testing.T) {
	nothing := written(t, "a: 1\n")
	for text, args := range map[string][]string{
		"name files":                   {},
		"gone.yaml":                    {"gone.yaml"},
		"no input starts an engine":    {"testdata/decode.env"},
		"neither a Compose file nor":   {nothing},
		"--engine-version":             {"testdata/guide.sh", "--engine-version", "x"},
		"process 4194305":              {"--pid", "4194305"},
		"has no ModelServer":           {"testdata/guide.sh", "-f", "testdata/deployment.yaml"},
		"is not one JSON object":       {"--command", "vllm serve m --kv-transfer-config {secret"},
		"is not a whole number from 1": {"--command", "vllm serve m -tp secret"},
		"choose one with --server":     {"testdata/guide.sh", "-f", "testdata/documents-3.yaml"},
		"unknown flag --unknown":       {"--unknown"},
		"configuration file of LMCache:": {"--command",
			"cat > f <<X\na: - b\nX\nLMCACHE_CONFIG_FILE=f vllm serve m --kv-transfer-config " +
				"'{\"kv_connector\":\"LMCacheConnectorV1\",\"kv_role\":\"kv_both\"}'"},
	} {
		code, out, errs := pdctl(t, "", append([]string{"check"}, args...)...)
		assert.Equal(t, exitUsage, code, text)
		assert.Contains(t, errs, text)
		assert.NotContains(t, out+errs, "secret")
	}
	code, out, _ := pdctl(t, "", "check", "--help")
	assert.Equal(t, exitOK, code)
	assert.Contains(t, out, "--all-local")
}

// process writes a process into a folder that tests use as /proc.
func process(t *testing.T, proc string, pid, ppid, uid int, environ string, argv ...string) {
	t.Helper()
	dir := filepath.Join(proc, fmt.Sprint(pid))
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "cwd"), 0o750))
	for name, content := range map[string]string{
		"cmdline": strings.Join(argv, "\x00") + "\x00", "environ": environ,
		"status":      fmt.Sprintf("Name:\tx\nPPid:\t%d\nUid:\t%d\t0\t0\t0\n", ppid, uid),
		"cwd/lm.yaml": "remote_url: lm://store:1\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
}

// assumed is what check says of engines without a release.
const assumed = "engines whose release is not told are taken for vLLM 0.33.0, the newest of November 2026 " +
	"(--engine-version)\n"

func TestRunningProcessesAreReadWithoutTellingTheirEnvironment(t *testing.T) {
	proc, me := t.TempDir(), os.Getuid()
	const env = "PYTHONHASHSEED=0\x00LMCACHE_CONFIG_FILE=lm.yaml\x00HF_TOKEN=hf_secret\x00"
	engine := func(role string) []string {
		return []string{"/venv/bin/python", "/venv/bin/vllm", "serve", "m", "--kv-transfer-config",
			`{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_` + role +
				`","kv_connector_extra_config":{"lmcache_rpc_port":"x"}}`}
	}
	process(t, proc, 100, 1, me, env, engine("producer")...)
	process(t, proc, 101, 100, me, env, engine("producer")...)   // its worker
	process(t, proc, 102, 1, me+1, env, engine("consumer")...)   // another user's
	process(t, proc, 103, 1, me, env, "vi", "vllm", "serve.txt") // no engine
	process(t, proc, 104, 1, me, env, "sh", "-c", "vllm serve m")
	process(t, proc, 105, 104, me, env, engine("consumer")...)
	require.NoError(t, os.MkdirAll(filepath.Join(proc, "self"), 0o750))

	var out strings.Builder
	err := (&checkCmd{AllLocal: true, proc: proc}).Run(streams{nil, &out, nil})
	require.ErrorIs(t, err, errFaults)
	assert.Equal(t, "error lmcache-rpc-port-twice\n  pid 100, pid 105: have the same lmcache_rpc_port on one "+
		"machine: one answers the other's lookups\n"+
		"  remedy: give each engine of a machine its own lmcache_rpc_port\n"+assumed+
		"2 engines read: 1 error, 0 warnings\n",
		out.String())

	out.Reset()
	require.NoError(t, (&checkCmd{PID: []int{100}, proc: proc}).Run(streams{nil, &out, nil}))
	assert.Equal(t, assumed+"1 engine read: 0 errors, 0 warnings\n", out.String())
	assert.NotContains(t, out.String(), "hf_secret")
}

// The test's own process can be read, and is no engine.
func TestARealProcessIsRead(t *testing.T) {
	if _, err := os.Stat("/proc/self/cmdline"); err != nil {
		t.Skip("needs /proc, which this system does not have")
	}
	l, err := readProcess("/proc", os.Getpid())
	require.NoError(t, err)
	assert.Equal(t, os.Args, l.argv)
	_, ok, err := l.parse(launch.Version{})
	require.NoError(t, err)
	assert.False(t, ok)
}

func TestImagesTellReleases(t *testing.T) {
	for image, want := range map[string]string{"vllm/vllm-openai:v0.32.0": "0.32.0",
		"h:5000/vllm-openai:v0.20.0-cu130-x": "0.20.0", "vllm/vllm-openai:latest": "", "h:5000/x": "", "": ""} {
		e, _, err := launched{argv: []string{"vllm", "serve", "m"}, tag: tagOf(image)}.parse(launch.Version{})
		require.NoError(t, err)
		assert.Equal(t, want, e.Version.String(), image)
	}
}
