// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
)

// text writes settings in a form that is easy to read.
func text(s launch.Settings) string {
	var b strings.Builder
	for _, e := range s.Env {
		fmt.Fprintf(&b, "%s=%s\n", e.Name, e.Value)
	}
	fmt.Fprintf(&b, "%s %s\n--kv-transfer-config %s\n", s.Engine, strings.Join(s.Args, " "), s.KVTransfer.JSON())
	for _, n := range s.Notes {
		kind := "note"
		if n.NoEffect {
			kind = "no effect"
		}
		fmt.Fprintf(&b, "# %s: %s: %s\n", kind, n.Path, n.Text)
	}
	return b.String()
}

// documentsExample is the config of the design proposal's NIXL example.
const documentsExample = `{"clusterEndpoints":["nixl-node-0.nixl.default.svc.cluster.local:7777",
"nixl-node-1.nixl.default.svc.cluster.local:7777",
	"nixl-node-2.nixl.default.svc.cluster.local:7777","nixl-node-3.nixl.default.svc.cluster.local:7777"],
	"nodeId":"matrixinfer-nixl-node","networkInterface":"eth0","port":7777,"protocol":"tcp","bufferSize":1048576,
	"connectionPoolSize":20,
	"maxConcurrency":10,"keepAliveInterval":"30s","maxMemoryPerNode":17179869184,"replicationFactor":2,
	"consistencyLevel":"strong",
	"shardingStrategy":"consistent_hash","hashFunction":"xxhash","failoverTimeout":"10s","retryPolicy":"exponential"}`

// The design proposal's example, rendered for both engines.
func TestTheDocumentsNixlIsRendered(t *testing.T) {
	p, d := engine(t, "http://10.0.0.1:8000", discovery.RolePrefill),
		engine(t, "http://10.0.0.2:8000", discovery.RoleDecode)
	var got strings.Builder
	for i, e := range []discovery.Endpoint{p, d} {
		fmt.Fprintf(&got, "## %s\n%s", e.Role, text(render(t, "nixl", documentsExample, launch.Target{
			Endpoint: e, Engines: []discovery.Endpoint{p, d}, Model: "llama2-405b",
			Resources: config.Resources{MaxMemory: "32Gi"},
		})))
		if i == 0 {
			got.WriteString("\n")
		}
	}
	want, err := os.ReadFile("testdata/render/documents-2.txt")
	require.NoError(t, err)
	assert.Equal(t, string(want), got.String())
}

// Each key changes what the engine is launched with, or a note says that it has no effect: the rules check that of the
// keys in everyConnector, which are all.
func TestTheRulesKnowEveryKeyOfNixl(t *testing.T) {
	known := map[string]bool{"protocol": true} // it means the same as networkType: TestNetworks has it
	for _, r := range everyConnector {
		if r.name == "nixl" {
			for key := range gjson.Parse(r.settings).Map() {
				known[key] = true
			}
		}
	}
	for f := range reflect.TypeFor[nixl.Options]().Fields() {
		assert.True(t, known[f.Tag.Get("json")], f.Name)
	}
}

func TestNetworks(t *testing.T) {
	remote := engine(t, "http://10.0.0.1:8000", discovery.RolePrefill)
	for _, c := range []struct {
		rule, config  string
		cpu           bool
		url           string
		tls, device   string
		others        []string
		withoutEffect []string
	}{
		{rule: "nothing said: UCX chooses", config: `{}`},
		{rule: "TCP between GPUs", config: `{"networkType":"tcp","networkInterface":"eth0"}`,
			tls: "tcp,cuda_copy,cuda_ipc", device: "eth0"},
		{rule: "the YAML's word for it", config: `{"protocol":"tcp"}`, tls: "tcp,cuda_copy,cuda_ipc"},
		{rule: "on CPUs", config: `{"protocol":"tcp"}`, cpu: true, tls: "tcp"},
		{rule: "on one machine's CPUs", config: `{}`, cpu: true, url: "http://127.0.0.1:8000", tls: "tcp",
			device: "lo"},
		{rule: "RDMA over a device and its port", config: `{"networkType":"rdma","rdmaConfig":{"deviceName":"mlx5_0",` +
			`"port":2,"queueDepth":128,"maxSge":4,"mtu":4096}}`,
			tls: "rc,cuda_copy,cuda_ipc", device: "mlx5_0:2",
			others:        []string{"UCX_RC_TX_QUEUE_LEN=128", "UCX_RC_PATH_MTU=4096"},
			withoutEffect: []string{"config.rdmaConfig.maxSge"}},
		{rule: "RDMA over the first port", config: `{"networkType":"rdma","rdmaConfig":{"deviceName":"mlx5_0"}}`,
			tls: "rc,cuda_copy,cuda_ipc", device: "mlx5_0:1"},
		{rule: "RDMA over whatever there is", config: `{"networkType":"rdma","networkInterface":"eth0"}`,
			tls: "rc,cuda_copy,cuda_ipc", withoutEffect: []string{"config.networkInterface"}},
		{rule: "InfiniBand", config: `{"networkType":"infiniband","infinibandConfig":{"hcaName":"mlx5_1",` +
			`"partitionKey":"0x0005","serviceLevel":3},"rdmaConfig":{"deviceName":"mlx5_0"}}`,
			tls: "rc,cuda_copy,cuda_ipc", device: "mlx5_1:1", others: []string{"UCX_IB_PKEY=0x0005", "UCX_IB_SL=3"},
			withoutEffect: []string{"config.rdmaConfig"}},
		{rule: "two words that differ", config: `{"networkType":"tcp","protocol":"rdma"}`,
			tls: "tcp,cuda_copy,cuda_ipc", withoutEffect: []string{"config.protocol"}},
		{rule: "keep alive", config: `{"keepAliveInterval":"1500ms"}`, others: []string{"UCX_KEEPALIVE_INTERVAL=1.5s"}},
		{rule: "an MTU that no path has", config: `{"networkType":"rdma","rdmaConfig":{"deviceName":"m","mtu":9000}}`,
			tls: "rc,cuda_copy,cuda_ipc", device: "m:1", withoutEffect: []string{"config.rdmaConfig.mtu"}},
	} {
		t.Run(c.rule, func(t *testing.T) {
			e := remote
			if c.url != "" {
				e = engine(t, c.url, discovery.RolePrefill)
			}
			s := render(t, "nixl", c.config, launch.Target{Endpoint: e, CPU: c.cpu})
			assert.Equal(t, c.tls, env(s, "UCX_TLS"))
			assert.Equal(t, c.device, env(s, "UCX_NET_DEVICES"))
			for _, other := range c.others {
				assert.Contains(t, text(s), other+"\n")
			}
			assert.ElementsMatch(t, c.withoutEffect, idle(s))
		})
	}
}
