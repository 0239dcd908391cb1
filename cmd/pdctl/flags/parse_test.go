// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
)

func TestParseFindsTheServerBehindWhatStartsIt(t *testing.T) {
	for line, program := range map[string]string{
		"vllm serve m": "vllm",
		"/opt/venv/bin/python /opt/venv/bin/vllm serve m":            "vllm",
		"numactl -N 0 vllm serve m":                                  "vllm",
		"python3 -m vllm.entrypoints.openai.api_server --model m":    "vllm",
		"python -m vllm.entrypoints.cli.main serve m":                "vllm",
		"python3 /x/vllm/entrypoints/openai/api_server.py --model=m": "vllm",
		"python3 -m sglang.launch_server --model-path m":             "sglang",
		"sglang serve --model-path m":                                "sglang",
		"trtllm-serve m":                                             "trtllm",
		"mpirun -n 1 trtllm-serve serve m":                           "trtllm",
	} {
		e, err := Parse(strings.Fields(line), nil, nil)
		require.NoError(t, err, line)
		assert.Equal(t, program, e.Program, line)
		assert.Equal(t, "m", e.Model, line)
	}
	for _, line := range []string{"", "vllm bench m", "nginx -g daemon", "python3 -m http.server", "vllm"} {
		_, err := Parse(strings.Fields(line), nil, nil)
		assert.ErrorIs(t, err, ErrNoEngine, line)
	}
}

func TestParseReadsEachFormOfAnArgument(t *testing.T) {
	for _, line := range []string{
		"vllm serve m --tensor-parallel-size 4 --port 8100",
		"vllm serve m --tensor-parallel-size=4 --port=8100",
		"vllm serve m --tensor_parallel_size 4 --port 8100",
		"vllm serve m -tp 4 --port 8100",
		"vllm serve m -tp=4 --port 8100",
		"vllm serve --port 8100 -tp 2 -tp 4 --model m", // the last -tp counts
		"vllm serve --enforce-eager m -tp 4 --port 8100",
	} {
		e, err := Parse(strings.Fields(line), nil, nil)
		require.NoError(t, err, line)
		assert.Equal(t, 4, e.TP, line)
		assert.Equal(t, 8100, e.Port, line)
		assert.Equal(t, "m", e.Model, line)
		assert.Equal(t, 1, e.DP, line)
	}
	e, err := Parse(strings.Fields("vllm serve m --served-model-name a b --host 10.0.0.1 --port 1 -dp 2 -pp 3"), nil,
		nil)
	require.NoError(t, err)
	assert.Equal(t, []string{"a", "b"}, e.Served)
	assert.Equal(t, "10.0.0.1:1", e.Address())
	assert.Equal(t, []int{2, 3}, []int{e.DP, e.PP})
}

func TestParseReadsKVTransferInEachForm(t *testing.T) {
	const object = `{"kv_connector":"NixlConnector","kv_role":"kv_producer",` +
		`"kv_connector_extra_config":{"kv_lease_duration":60}}`
	for _, argv := range [][]string{
		{"vllm", "serve", "m", "--kv-transfer-config", object},
		{"vllm", "serve", "m", "--kv-transfer-config=" + object},
		{"vllm", "serve", "m", "--kv-transfer-config.kv_connector", "NixlConnector",
			"--kv-transfer-config.kv_role=kv_producer",
			"--kv-transfer-config.kv_connector_extra_config.kv_lease_duration", "60"},
		{"vllm", "serve", "m", "--kv_transfer_config",
			`{"kv_connector":"NixlConnector","kv_role":"kv_consumer",` +
				`"kv_connector_extra_config":{"kv_lease_duration":60}}`, "--kv-transfer-config.kv_role", "kv_producer"},
	} {
		e, err := Parse(argv, nil, nil)
		require.NoError(t, err, argv)
		require.NotNil(t, e.Transfer, argv)
		assert.Equal(t, []string{"NixlConnector"}, e.Classes(), argv)
		assert.Equal(t, discovery.RolePrefill, e.Role, argv)
		assert.Equal(t, "60", text(e.Transfer.Extra, "kv_lease_duration"), argv)
	}
}

func TestParseRefusesWhatItCannotRead(t *testing.T) {
	for _, argv := range [][]string{
		{"vllm", "serve", "m", "--kv-transfer-config", "{secret"},
		{"vllm", "serve", "m", "--kv-transfer-config", "[]"},
		{"vllm", "serve", "m", "--kv-transfer-config", "{}"},
		{"vllm", "serve", "m", "--kv-transfer-config", ""},
		{"vllm", "serve", "m", "--kv-transfer-config",
			`{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":["secret"]}}`},
		{"vllm", "serve", "m", "-tp", "secret"},
		{"vllm", "serve", "m", "-tp", "0"},
	} {
		_, err := Parse(argv, nil, nil)
		require.Error(t, err, argv)
		assert.NotContains(t, err.Error(), "secret", "values may be secrets")
	}
}

func TestLMCacheSettingsLieOverEachOther(t *testing.T) {
	argv := []string{"vllm", "serve", "m", `--kv-transfer-config={"kv_connector":"LMCacheConnectorV1",` +
		`"kv_role":"kv_both","kv_connector_extra_config":{"lmcache.remote_serde":"c"}}`}
	files := map[string][]byte{
		"f.yaml": []byte("chunk_size: 64\nremote_url: \"file\"\nremote_serde: naive\npd_peer_init_port: [1, 2]\n"),
	}
	e, err := Parse(
		argv, map[string]string{"LMCACHE_CONFIG_FILE": "f.yaml", "LMCACHE_REMOTE_URL": "env",
			"LMCACHE_REMOTE_SERDE": "env"}, files,
	)
	require.NoError(t, err)
	assert.Equal(t, "64", text(e.LMCache, "chunk_size"), "the file")
	assert.Equal(t, "env", text(e.LMCache, "remote_url"), "a variable wins over the file")
	assert.Equal(t, "c", text(e.LMCache, "remote_serde"), "the connector's own settings win over both")
	assert.Equal(t, 2, count(e.LMCache, "pd_peer_init_port"))
	assert.Empty(t, e.Unread)

	e, err = Parse(
		[]string{"vllm", "serve", "m", `--kv-transfer-config={"kv_connector":"LMCacheConnectorV1",` +
			`"kv_role":"kv_both","kv_connector_extra_config":{"config_path":"old.yaml"}}`}, nil,
		map[string][]byte{"old.yaml": []byte("enable_nixl: True\nnixl_role: \"sender\"  # or \"receiver\"\n")})
	require.NoError(t, err)
	assert.True(t, isPD(&e), "the old names, in the file that the design documents name")
	assert.Equal(t, "sender", pdRole(&e))
}

func TestServeReadsItsConfigFileBelowTheCommandLine(t *testing.T) {
	e, err := Parse([]string{"vllm", "serve", "--config", "c.yaml", "--port", "1"}, nil,
		map[string][]byte{"c.yaml": []byte(
			"model: m\nport: 2\ntensor-parallel-size: 2\nserved-model-name: [a, b]\nkv-transfer-config:\n  " +
				"kv_connector: " +
				"NixlConnector\n  kv_role: kv_consumer\n")})
	require.NoError(t, err)
	assert.Equal(t, 1, e.Port)
	assert.Equal(t, 2, e.TP)
	assert.Equal(t, "m", e.Model)
	assert.Equal(t, []string{"a", "b"}, e.Served)
	assert.Equal(t, discovery.RoleDecode, e.Role)
}

func TestOnlyWhatRulesCompareIsKept(t *testing.T) {
	e, err := Parse([]string{"vllm", "serve", "m", "--api-key", "secret-1"},
		map[string]string{"HF_TOKEN": "secret-2", "PYTHONHASHSEED": "0"}, nil)
	require.NoError(t, err)
	assert.NotContains(t, jsonText(e.args)+jsonText(e.env), "secret")
	assert.Equal(t, map[string]string{"PYTHONHASHSEED": "0"}, e.env)
}

func TestAConfigurationFileIsOneMapping(t *testing.T) {
	one := json.Number("1")
	for text, want := range map[string]map[string]any{
		"---\n# LMCache\na: 1 # one\nb: [x, 'it''s', True, null]\nc:\n  d: {\"e\": 1}\n": {
			"a": one, "b": []any{"x", "it's", true, nil}, "c": map[string]any{"d": map[string]any{"e": one}}},
		`{"a": {"b": [1]}}`:                {"a": map[string]any{"b": []any{one}}},
		"a: &x {b: 1}\nc: *x\nd: |\n  e\n": {"a": map[string]any{"b": one}, "c": map[string]any{"b": one}, "d": "e\n"},
		"# nothing\n":                      {},
	} {
		m, err := readSettings([]byte(text))
		require.NoError(t, err, text)
		assert.Equal(t, want, m, text)
	}
	for text, want := range map[string]string{
		"a: 1\n---\nb: 2":      "is not one mapping",
		"- a":                  "line 1: document: is not a mapping",
		"a: 1\n\tb: hunter2":   "line 2: yaml: the line is indented with a tab",
		"a: hunter2\nb: [1, 2": "line 2: yaml: ",
		"a: !secret hunter2":   "line 1: a: has a YAML tag",
	} {
		_, err := readSettings([]byte(text))
		require.ErrorContains(t, err, want, text)
		assert.NotContains(t, err.Error(), "hunter2")
	}
}

// For any command line, Parse returns an engine or an error, and Check returns findings.
func FuzzParse(f *testing.F) {
	f.Add("vllm\x00serve\x00m\x00--kv-transfer-config\x00{\"kv_connector\":\"MultiConnector\",\"kv_role\":\"kv_both\"}",
		"a: [1")
	f.Add("trtllm-serve\x00m\x00--config\x00f", "cache_transceiver_config:\n  backend: UCX")
	f.Add("sglang\x00serve\x00--page-size", "")
	f.Add("vllm\x00serve\x00--config=f\x00--kv-transfer-config.a.b\x001", "x:\n- 1\n- ")
	f.Fuzz(func(t *testing.T, line, file string) {
		argv := strings.Split(line, "\x00")
		for _, files := range []map[string][]byte{nil, {"f": []byte(file)}} {
			e, err := Parse(argv, map[string]string{"LMCACHE_CONFIG_FILE": "f"}, files)
			if err == nil {
				Check([]Engine{e, e}, nil)
			}
		}
	})
}
