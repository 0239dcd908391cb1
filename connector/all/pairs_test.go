// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/epd"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/names"
)

// pairs have for each connector the attributes of a prefill and a decode engine that can exchange KV, and of two that
// cannot: "tpSize=2 | tpSize=4".
var pairs = []struct {
	typ, config string
	meet, apart []string
}{
	{typ: "http", meet: []string{"store=a | store=a", "tpSize=2 | tpSize=3"}, apart: []string{"store=a | store=b"}},
	{typ: "nixl",
		meet: []string{"tpSize=2 | tpSize=2", "tpSize=2 | tpSize=8", "tpSize=8 | tpSize=2", "tpSize=3 |",
			"kvCacheDtype=fp8 | kvCacheDtype=fp8", "blockSize=16 | blockSize=64"},
		apart: []string{"tpSize=2 | tpSize=3", "tpSize=6 | tpSize=4", "kvCacheDtype=fp8 | kvCacheDtype=auto",
			"tpSize=2,kvCacheDtype=fp8 | tpSize=2,kvCacheDtype=auto"}},
	{typ: "nixl-push",
		meet:  []string{"tpSize=4,ppSize=2 | tpSize=2", "tpSize=1 | tpSize=8"},
		apart: []string{"tpSize=3 | tpSize=2", "kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "mooncake",
		meet: []string{"tpSize=8 | tpSize=4", "tpSize=2 | tpSize=4", "ppSize=2 | ppSize=1",
			"blockSize=64 | blockSize=64"},
		apart: []string{"tpSize=4 | tpSize=6", "blockSize=64 | blockSize=128", "kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "mooncake-ascend",
		meet: []string{"tpSize=8 | tpSize=4", "tpSize=4 | tpSize=4", "blockSize=128 | blockSize=64",
			"blockSize=64 | blockSize=128"},
		apart: []string{"tpSize=4 | tpSize=8", "tpSize=6 | tpSize=4", "blockSize=96 | blockSize=128"}},
	{typ: "ascend-layerwise", config: `{"callbackListen":"127.0.0.1:8900","callbackURL":"http://127.0.0.1:8900"}`,
		meet:  []string{"tpSize=8 | tpSize=4", "blockSize=64 | blockSize=128"},
		apart: []string{"tpSize=4 | tpSize=8", "blockSize=128 | blockSize=64"}},
	{typ: "moriio",
		meet: []string{"tpSize=8 | tpSize=1", "tpSize=4 | tpSize=4", "mode=write | mode=write", "mode=write |",
			"dpSize=8 | dpSize=2"},
		apart: []string{"tpSize=4 | tpSize=6", "mode=read | mode=read", "mode=write | mode=read",
			"mode=read | mode=write"}},
	{typ: "moriio", config: `{"mode":"read"}`, meet: []string{"mode=read | mode=read"},
		apart: []string{"mode=write | mode=write", "mode=read | mode=write"}},
	{typ: "p2pnccl",
		meet:  []string{"tpSize=4 | tpSize=4", "ppSize=2 | ppSize=2"},
		apart: []string{"tpSize=4 | tpSize=2", "ppSize=2 | ppSize=1"}},
	{typ: "pynccl", meet: []string{"tpSize=2 | tpSize=2"}, apart: []string{"tpSize=2 | tpSize=4"}},
	{typ: "sglang",
		meet: []string{"tpSize=8,dpSize=8 | tpSize=6", "ppSize=4 | ppSize=4", "ppSize=4 | ppSize=1",
			"blockSize=64 | blockSize=64"},
		apart: []string{"ppSize=1 | ppSize=4", "ppSize=4 | ppSize=2", "blockSize=1 | blockSize=64",
			"kvCacheDtype=auto | kvCacheDtype=fp8_e4m3"}},
	{typ: "trtllm",
		meet:  []string{"tpSize=8 | tpSize=2", "ppSize=4 | ppSize=1", "blockSize=32 | blockSize=32"},
		apart: []string{"blockSize=32 | blockSize=64", "kvCacheDtype=auto | kvCacheDtype=fp8"}},
	{typ: "lmcache",
		meet: []string{"store=redis-a | store=redis-a", "store=local-1,redis-a | store=local-2, redis-a",
			"tpSize=8 | tpSize=2"},
		apart: []string{"store=redis-a | store=redis-b", "kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "lmcache-pd", meet: []string{"tpSize=2 | tpSize=2"},
		apart: []string{"tpSize=2 | tpSize=1", "tpSize=1 | tpSize=2", "kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "lmcache-pd", config: `{"notifications":1}`, meet: []string{"tpSize=8 | tpSize=2"},
		apart: []string{"kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "mooncake-store", meet: []string{"store=a | store=a", "tpSize=8 | tpSize=2"},
		apart: []string{"store=a | store=b"}},
	{typ: "sharedstorage", meet: []string{"store=nfs | store=nfs"}, apart: []string{"store=nfs | store=nfs-2"}},
	{typ: "offload-p2p",
		meet:  []string{"tpSize=4 | tpSize=2", "blockSize=16 | blockSize=16"},
		apart: []string{"blockSize=16 | blockSize=32", "kvCacheDtype=fp8 | kvCacheDtype=auto"}},
	{typ: "mooncake-hybrid", meet: []string{"tpSize=8 | tpSize=4", "blockSize=128 | blockSize=128"},
		apart: []string{"tpSize=4 | tpSize=8", "blockSize=128 | blockSize=64"}},
	{typ: "relay", meet: []string{"tpSize=8 | tpSize=2", "blockSize=64 | blockSize=128"}},
	{typ: "tpu", meet: []string{"blockSize=128 | blockSize=128"}, apart: []string{"blockSize=128 | blockSize=64"}},
	{typ: "ascend-store", meet: []string{"store=a | store=a,b"}, apart: []string{"store=a | store=b"}},
	{typ: "flexkv", meet: []string{"store=a | store=a"}, apart: []string{"store=a | store=b"}},
	{typ: "hf3fs", meet: []string{"store=a | store=a"}, apart: []string{"store=a | store=b"}},
	{typ: "ucm", meet: []string{"store=a | store=a"}, apart: []string{"store=a | store=b"}},
	{typ: "kvbm", meet: []string{"tpSize=2 | tpSize=8"}, apart: []string{"tpSize=2 | tpSize=3"}},
	// a transfer parts engines, and a store beside it does not
	{typ: "multi", config: `{"connectors":[{"type":"nixl"},{"type":"lmcache"}]}`,
		meet:  []string{"tpSize=2,store=a | tpSize=4,store=b"},
		apart: []string{"tpSize=2,store=a | tpSize=3,store=a"}},
	{typ: "multi", config: `{"connectors":[{"type":"lmcache"},{"type":"nixl"}]}`, meet: []string{"store=a | store=b"}},
	{typ: "multi", config: `{"connectors":[{"type":"nixl"},{"type":"mooncake"}]}`,
		meet: []string{"blockSize=16 | blockSize=16"}, apart: []string{"blockSize=16 | blockSize=32"}},
	// stores alone need one in common, if all of them have rules
	{typ: "multi", config: `{"connectors":[{"type":"sharedstorage"},{"type":"lmcache"}]}`,
		meet:  []string{"store=nfs-1,redis | store=nfs-2,redis", "kvCacheDtype=fp8 | kvCacheDtype=auto"},
		apart: []string{"store=nfs-1 | store=nfs-2"}},
	{typ: "multi", config: `{"connectors":[{"type":"sharedstorage"},{"kv_connector":"SimpleCPUOffloadConnector"}]}`,
		meet: []string{"store=nfs-1 | store=nfs-2"}},
}

func TestWhichEnginesCanMeet(t *testing.T) {
	for _, m := range pairs {
		t.Run(m.typ+m.config, func(t *testing.T) {
			c := play.Open(t, m.typ, m.config)
			for _, c := range []connector.KVConnector{c, wrapped(t, c)} {
				for _, engines := range m.meet {
					assert.True(t, compatible(t, c, engines), "apart: %s", engines)
				}
				for _, engines := range m.apart {
					assert.False(t, compatible(t, c, engines), "meet: %s", engines)
				}
				assert.True(t, compatible(t, c, " | "), "engines of which nothing is told")
			}
		})
	}
}

// wrapped puts an encode stage before a connector; it changes nothing between the two engines.
func wrapped(t *testing.T, c connector.KVConnector) connector.KVConnector {
	t.Helper()
	c, err := epd.Wrap(c, &epd.Options{Type: epd.Example})
	require.NoError(t, err)
	return c
}

// compatible applies a connector's rules as pickers do: only to attributes that both engines have.
func compatible(t *testing.T, c connector.KVConnector, engines string) bool {
	t.Helper()
	prefill, decode, ok := strings.Cut(engines, "|")
	require.True(t, ok)
	a, b := attributes(prefill), attributes(decode)
	return !slices.ContainsFunc(c.Traits().PairRules, func(r attr.PairRule) bool {
		return a[r.Attribute] != "" && b[r.Attribute] != "" && !r.Compatible(a[r.Attribute], b[r.Attribute])
	})
}

// attributes parses name=value parts. A part without = continues the value of the part before it.
func attributes(text string) map[string]string {
	all, last := map[string]string{}, ""
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		name, value, ok := strings.Cut(part, "=")
		if !ok {
			all[last] += "," + part
			continue
		}
		last = name
		all[name] = value
	}
	return all
}

var row = regexp.MustCompile("(?m)^\\| `([A-Za-z]+)` \\|")

// Each connector's README lists its pair rules and where they come from.
func TestEveryPageSaysWhichEnginesCanMeet(t *testing.T) {
	tested := map[string]bool{}
	for _, m := range pairs {
		tested[m.typ] = true
	}
	for _, name := range names.Connectors() {
		assert.True(t, tested[name], "no engines of %s meet in a test", name)
		file := page(t, name)
		raw, err := os.ReadFile("../" + file)
		require.NoError(t, err)
		_, section, ok := strings.Cut(string(raw), "\n## Which engines can be paired\n")
		// whose rules are its children's
		if !assert.True(t, ok, "connector/%s does not say it", file) || name == "multi" {
			continue
		}
		section, _, _ = strings.Cut(section, "\n## ")
		var told, want []string
		for _, m := range row.FindAllStringSubmatch(section, -1) {
			told = append(told, m[1])
		}
		for _, r := range play.Open(t, name, needed[name]).Traits().PairRules {
			want = append(want, r.Attribute)
		}
		assert.ElementsMatch(t, want, told, "connector/%s", file)
	}
}
