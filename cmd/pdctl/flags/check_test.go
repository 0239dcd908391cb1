// SPDX-License-Identifier: Apache-2.0

package flags

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors whose pair rules Check uses
	"github.com/pdkit/pdkit/connector/attr"
)

// kv writes --kv-transfer-config. more are members of the connector's own settings, as KEY=JSON. A member whose name
// begins with a dot belongs to the configuration itself.
func kv(class, role string, more ...string) string {
	config := map[string]any{"kv_connector": class, "kv_role": "kv_" + role}
	extra := map[string]any{}
	for _, m := range more {
		key, raw, _ := strings.Cut(m, "=")
		if name, own := strings.CutPrefix(key, "."); own {
			config[name] = json.RawMessage(raw)
		} else {
			extra[key] = json.RawMessage(raw)
		}
	}
	if len(extra) > 0 {
		config["kv_connector_extra_config"] = extra
	}
	raw, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return " --kv-transfer-config=" + string(raw)
}

func child(class string, more ...string) string {
	return strings.TrimPrefix(kv(class, "both", more...), " --kv-transfer-config=")
}

// deploy reads engines, one a line: [NODE] [@VERSION] [NAME=VALUE …] COMMAND. The JSON must have no spaces. The
// engines' names are a, b, c.
func deploy(t *testing.T, lines ...string) []Engine {
	t.Helper()
	var list []Engine
	for i, line := range lines {
		fields := strings.Fields(line)
		node, version := "", ""
		env := map[string]string{}
		for len(fields) > 0 {
			switch f := fields[0]; {
			case strings.HasPrefix(f, "on:"):
				node = f[3:]
			case strings.HasPrefix(f, "@"):
				version = f[1:]
			case !strings.HasPrefix(f, "-") && strings.Contains(f, "="):
				name, value, _ := strings.Cut(f, "=")
				env[name] = value
			default:
				goto command
			}
			fields = fields[1:]
		}
	command:
		e, err := Parse(fields, env, map[string][]byte{
			"pd.yaml": []byte("enable_pd: true\npd_role: sender\npd_proxy_host: 10.0.0.9\npd_proxy_port: 8500\n" +
				"pd_buffer_size: 1073741824\npd_buffer_device: cuda\n"),
			"recv.yaml": []byte("enable_pd: true\npd_role: receiver\npd_peer_host: 10.0.0.2\npd_peer_init_port: " +
				"[8300]\npd_peer_alloc_port: [8400]\npd_buffer_size: 1073741824\npd_buffer_device: cuda\n"),
			"ucx.yaml":   []byte("cache_transceiver_config:\n  backend: UCX\n"),
			"nixl.yaml":  []byte("cache_transceiver_config:\n  backend: NIXL\n"),
			"store.json": []byte(`{"master_server_address":"b:50051"}`),
			"empty.yaml": []byte("# nothing\n"),
		})
		require.NoError(t, err)
		e.Name, e.Node = string(rune('a'+i)), node
		e.Version, err = launch.ParseVersion(version)
		require.NoError(t, err)
		list = append(list, e)
	}
	return list
}

func gateway(t *testing.T, text string) *config.Spec {
	t.Helper()
	if text == "" {
		return nil
	}
	s, err := config.ParseSpec(json.RawMessage(text))
	require.NoError(t, err)
	return &s
}

func codes(found []Finding) []string {
	list := []string{}
	for _, f := range found {
		list = append(list, f.Code)
	}
	return list
}

// finding is a test of one rule: the smallest deployment that breaks it, and the same deployment corrected.
type finding struct {
	code     string
	severity Severity // "" is Error
	engines  string   // the engines that the finding names; "" are a and b
	gateway  string
	wrong    []string
	right    []string
	other    string // the corrected deployment's gateway, if the gateway is what changes
}

const (
	serve = "vllm serve m"
	seed  = "PYTHONHASHSEED=0 "
	store = `lmcache.remote_url="lm://store:65432"`
)

// two returns a prefill and a decode engine with the same environment and settings.
func two(env, class string, more ...string) []string { return unlike(env, env, class, more...) }

// unlike is two with an environment for each of the engines.
func unlike(producer, consumer, class string, more ...string) []string {
	return []string{producer + serve + kv(class, "producer", more...),
		consumer + serve + kv(class, "consumer", more...)}
}

// unlikeBoth is unlike for engines that both produce and consume.
func unlikeBoth(first, second, class string, more ...string) []string {
	return []string{first + serve + kv(class, "both", more...), second + serve + kv(class, "both", more...)}
}

func TestEachRuleFindsItsFaultAndNotItsCorrection(t *testing.T) {
	for i, c := range table() {
		t.Run(fmt.Sprintf("%s-%d", c.code, i), func(t *testing.T) {
			found := Check(deploy(t, c.wrong...), gateway(t, c.gateway))
			at := -1
			for i, f := range found {
				if f.Code == c.code {
					at = i
					break
				}
			}
			require.GreaterOrEqual(t, at, 0, "found only %v", codes(found))
			f := found[at]
			assert.Equal(t, cmp.Or(c.severity, Error), f.Severity)
			assert.Equal(t, cmp.Or(c.engines, "ab"), strings.Join(f.Engines, ""))
			assert.NotEmpty(t, f.Text)
			assert.NotEmpty(t, f.Remedy, "a finding says what to change")

			spec := c.gateway
			if c.other != "" {
				spec = c.other
			}
			assert.NotContains(t, codes(Check(deploy(t, c.right...), gateway(t, spec))), c.code,
				"the corrected deployment is good")
		})
	}
}

func TestNoRuleIsWithoutAFinding(t *testing.T) {
	shown := map[string]bool{}
	for _, c := range table() {
		shown[c.code] = true
	}
	seen := map[string]bool{}
	for _, r := range rules {
		assert.True(t, shown[r.code], "nothing shows %s", r.code)
		assert.False(t, seen[r.code], "two rules are named %s", r.code)
		seen[r.code] = true
	}
}

// For each protocol the findings about tensor-parallel sizes agree with what pickers do.
func TestSizesAreFoundWherePickersPartEngines(t *testing.T) {
	for _, class := range []string{
		"NixlConnector", "NixlPushConnector", "MooncakeConnector", "MooncakeConnectorV1", "MoRIIOConnector",
		"P2pNcclConnector", "PyNcclConnector",
		"MooncakeStoreConnector", "ExampleConnector", "OffloadingConnector",
	} {
		c, err := connector.Open(config.Spec{Type: class})
		require.NoError(t, err)
		for _, sizes := range [][2]string{{"1", "1"}, {"1", "2"}, {"2", "1"}, {"2", "3"}, {"4", "6"}, {"8", "4"},
			{"4", "8"}} {
			engines := two("", class)
			found := codes(Check(deploy(t, engines[0]+" -tp "+sizes[0], engines[1]+" -tp "+sizes[1]), nil))
			found = slices.DeleteFunc(found, func(code string) bool {
				return !slices.Contains([]string{"nixl-tp", "nccl-tp-differs", "pair-sizes"}, code)
			})
			parted := slices.ContainsFunc(c.Traits().PairRules, func(r attr.PairRule) bool {
				return r.Attribute == attr.TPSize && !r.Compatible(sizes[0], sizes[1])
			})
			assert.Len(t, found, map[bool]int{true: 1}[parted], "%s, %v", class, sizes)
		}
	}
}

// The corrected deployments have no findings at all, since readers copy them.
func TestGoodDeploymentsHaveNoFindings(t *testing.T) {
	encode := encodeTable()
	for name, c := range map[string]struct {
		gateway string
		engines []string
	}{
		"nixl":          {`{"type":"nixl"}`, two("", "NixlConnector")},
		"nixl, several": {`{"type":"nixl"}`, append(two("", "NixlConnector"), two("", "NixlConnector")...)},
		"lmcache":       {`{"type":"lmcache"}`, two(seed, "LMCacheConnectorV1", store)},
		"mooncake":      {`{"type":"mooncake"}`, two("", "MooncakeConnector")},
		"example":       {`{"type":"sharedstorage"}`, two("", "ExampleConnector")},
		"multi": {`{"type":"multi"}`, two("", "MultiConnector", "connectors=["+child("NixlConnector")+","+
			child("ExampleConnector")+"]")},
		"multi by child": {`{"type":"nixl"}`, two("", "MultiConnector", "connectors=["+child("NixlConnector")+","+
			child("LMCacheMPConnector")+"]")},
		"two models": {
			"", append(two("", "NixlConnector"), strings.Replace(two("", "NixlConnector")[0], " m ", " n -tp 2 ", 1),
				strings.Replace(two("", "NixlConnector")[1], " m ", " n -tp 2 ", 1)),
		},
		"no transfer":  {`{"type":"http"}`, []string{serve, serve}},
		"encode stage": {`{"type":"nixl"}`, []string{encode[0].right[0], encode[0].right[1], encode[0].right[2]}},
		"alone":        {"", []string{serve}},
		"trtllm": {
			`{"type":"trtllm"}`, []string{"trtllm-serve m --config ucx.yaml", "trtllm-serve m --config ucx.yaml"},
		},
		"none": {"", nil},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Empty(t, Check(deploy(t, c.engines...), gateway(t, c.gateway)))
		})
	}
}

// In each spelling of PD mode the rules choose the same connector as the gateway.
func TestLMCachesClassIsResolvedAsTheGatewayResolvesIt(t *testing.T) {
	for _, setting := range []string{"enable_pd", "lmcache.enable_pd", "enable_nixl", "lmcache.enable_nixl",
		"enable_xpyd"} {
		assert.Equal(t, "lmcache-pd", gatewayName("LMCacheConnectorV1", map[string]any{setting: true}), setting)
	}
	assert.Equal(t, "lmcache", gatewayName("LMCacheConnectorV1", map[string]any{"enable_pd": false}))
}

// These are both halves of kthena's issue 1069, in the reporter's own settings.
func TestTheDeploymentsOfKthenaIssue1069AreFound(t *testing.T) {
	const env = "UCX_TLS=tcp PYTHONHASHSEED=0 "
	first := two("on:pod "+env, "LMCacheConnectorV1", "discard_partial_chunks=true", `lmcache_rpc_port="10086"`)
	first[1] = strings.Replace(first[1], "on:pod", "on:other", 1)
	found := Check(deploy(t, first...), gateway(t, `{"type":"lmcache"}`))
	assert.Equal(t, []string{"lmcache-not-shared"}, codes(found))
	assert.Equal(t, []string{"a", "b"}, found[0].Engines)

	pd := []string{
		"discard_partial_chunks=true", `lmcache_rpc_port="10086"`, `lmcache.enable_pd=true`,
		`lmcache.transfer_channel="nixl"`, `lmcache.nixl_backends=["UCX"]`,
		`lmcache.pd_skip_proxy_notification=true`, `lmcache.pd_peer_host="10.0.0.2"`,
		`lmcache.pd_peer_init_port="10086"`, `lmcache.pd_peer_alloc_port="10087"`, `lmcache.pd_buffer_device="cuda"`,
	}
	second := []string{
		env + serve + kv("LMCacheConnectorV1", "producer", append(pd, `lmcache.pd_role="sender"`)...),
		env + serve + kv("LMCacheConnectorV1", "consumer", append(pd, `lmcache.pd_role="receiver"`)...),
	}
	found = Check(deploy(t, second...), gateway(t, `{"type":"lmcache"}`))
	for _, code := range []string{"lmcache-pd-behind-lmcache", "lmcache-notice-skipped", "lmcache-pd-partial-chunks",
		"lmcache-pd-buffer"} {
		assert.Contains(t, codes(found), code)
	}
}

func TestErrorsComeBeforeWarnings(t *testing.T) {
	found := Check(deploy(t, two("on:h ", "NixlConnector", `.kv_load_failure_policy="recompute"`)...), nil)
	require.Equal(t, []string{"nixl-port-twice", "load-failure-hidden"}, codes(found))
}

// What one finding says is not said by another: old names are no missing ones, and two children are no two engines.
func TestOneFaultHasOneFinding(t *testing.T) {
	old := seed + "LMCACHE_ENABLE_NIXL=True LMCACHE_NIXL_ROLE=sender " + serve + kv("LMCacheConnectorV1", "producer")
	assert.NotContains(t, codes(Check(deploy(t, old), nil)), "lmcache-pd-buffer")
	twice := "on:h " + serve + kv("MultiConnector", "both",
		"connectors=["+child("NixlConnector")+","+child("NixlPullConnector")+"]")
	assert.NotContains(t, codes(Check(deploy(t, twice), nil)), "nixl-port-twice")
}
