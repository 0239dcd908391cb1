// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"errors"
	"math"
	"slices"
	"strconv"

	"github.com/pdkit/pdkit/connector/internal/nixlengine"
	"github.com/pdkit/pdkit/connector/launch"
)

// Render gives the launch settings of an engine. Each key of the documents becomes a setting of vLLM or of UCX, over
// which NIXL moves the blocks; a note names each key that has no effect. UCX's variables are those that `ucx_info -f`
// lists.
func (c *Connector) Render(t launch.Target) (launch.Settings, error) {
	o := c.opts
	s, err := nixlengine.Settings(t, nixlengine.Config{Class: "NixlConnector", Lease: c.Traits().Handoff.Lease,
		Port: o.Port})
	if err != nil {
		return s, err
	}
	if err := o.renderTurns(t, &s); err != nil {
		return s, err
	}
	o.renderNetwork(t, &s)
	for _, k := range o.without() {
		if k.given {
			s.Notes = append(s.Notes, launch.Note{NoEffect: true, Path: "config." + k.path, Text: k.why})
		}
	}
	return s, nil
}

// renderTurns adds the settings that bidirectional needs.
func (o *Options) renderTurns(t launch.Target, s *launch.Settings) error {
	if !o.Bidirectional {
		return nil
	}
	if t.Version.Before(0, 22) {
		// 0.21 has it too, but another setting there says how long D keeps the blocks.
		return errors.New("config.bidirectional: vLLM " + t.Version.String() + " is too old for it: 0.22 or later")
	}
	s.KVTransfer.Extra["bidirectional_kv_xfer"] = true
	s.KVTransfer.Extra["decoder_kv_blocks_ttl"] = int64(math.Ceil(o.conversationTTL().Seconds()))
	// P serves /render, which says which tokens a prompt has, only with this argument.
	s.Args = append(s.Args, "--enable-scale-out")
	return nil
}

// renderNetwork adds UCX's settings.
func (o *Options) renderNetwork(t launch.Target, s *launch.Settings) {
	network := o.network()
	set := func(name, value string) { s.Env = append(s.Env, launch.EnvVar{Name: name, Value: value}) }
	idle := func(path, why string) {
		s.Notes = append(s.Notes, launch.Note{NoEffect: true, Path: "config." + path, Text: why})
	}
	memory := ",cuda_copy,cuda_ipc" // without these UCX cannot reach KV in a GPU's memory
	if t.CPU {
		memory = ""
	}
	var device string
	switch network {
	case "tcp":
		set("UCX_TLS", "tcp"+memory)
		device = o.NetworkInterface
	case "rdma", "infiniband":
		set("UCX_TLS", "rc"+memory)
		if device = o.ibDevice(network); o.NetworkInterface != "" {
			idle("networkInterface",
				"RDMA goes over a device, not over a network interface: rdmaConfig.deviceName or "+
					"infinibandConfig.hcaName")
		}
		o.renderIB(set)
	default:
		device = o.NetworkInterface
		if t.CPU {
			set("UCX_TLS", "tcp")
		}
	}
	if device == "" {
		device = nixlengine.Loopback(t)
	}
	if device != "" {
		set("UCX_NET_DEVICES", device)
	}
	if o.KeepAliveInterval != nil {
		set("UCX_KEEPALIVE_INTERVAL", strconv.FormatFloat(float64(length(o.KeepAliveInterval))/1e9, 'f', -1, 64)+"s")
	}
	if o.NetworkType != "" && o.Protocol != "" && o.NetworkType != o.Protocol {
		idle("protocol", "networkType says otherwise, and is what counts")
	}
	if o.RDMAConfig != nil && network != "rdma" {
		idle("rdmaConfig", "networkType is not rdma")
	}
	if o.InfiniBandConfig != nil && network != "infiniband" {
		idle("infinibandConfig", "networkType is not infiniband")
	}
}

// ibDevice is a device and its port in UCX's notation: mlx5_0:1.
func (o *Options) ibDevice(network string) string {
	name, port := "", 0
	if r := o.RDMAConfig; r != nil && network == "rdma" {
		name, port = r.DeviceName, r.Port
	}
	if ib := o.InfiniBandConfig; ib != nil && network == "infiniband" {
		name, port = ib.HCAName, ib.Port
	}
	if name == "" {
		return ""
	}
	return name + ":" + strconv.Itoa(max(port, 1))
}

func (o *Options) renderIB(set func(name, value string)) {
	number := func(name string, n int) {
		if n > 0 {
			set(name, strconv.Itoa(n))
		}
	}
	if r := o.RDMAConfig; r != nil && o.network() == "rdma" {
		number("UCX_RC_TX_QUEUE_LEN", r.QueueDepth)
		if pathMTU(r.MTU) {
			number("UCX_RC_PATH_MTU", r.MTU)
		}
	}
	if ib := o.InfiniBandConfig; ib != nil && o.network() == "infiniband" {
		if ib.PartitionKey != "" {
			set("UCX_IB_PKEY", ib.PartitionKey)
		}
		number("UCX_IB_SL", ib.ServiceLevel)
	}
}

// pathMTU reports whether InfiniBand has an MTU of n bytes: UCX does not start with another one.
func pathMTU(n int) bool { return slices.Contains([]int{256, 512, 1024, 2048, 4096}, n) }

func (o *Options) network() string {
	if o.NetworkType != "" {
		return o.NetworkType
	}
	return o.Protocol
}

// idleKey is a key of the documents for which the engines have no setting.
type idleKey struct {
	path  string
	given bool
	why   string
}

func (o *Options) without() []idleKey {
	const (
		noCluster = "there is no cluster to join: engines find each other by the handoff, and the gateway finds them " +
			"by discovery"
		noStore   = "NIXL copies blocks from one engine's memory to another's; it keeps no copies and spreads none"
		noPool    = "NIXL has one connection between each two workers"
		noBatch   = "a request's blocks are read as one transfer, as soon as it is scheduled"
		noTimeout = "NIXL's own limits are fixed: 5 s for a handshake, none for a transfer; the flow's timeouts " +
			"bound the legs"
	)
	var rdma RDMAConfig
	if o.RDMAConfig != nil {
		rdma = *o.RDMAConfig
	}
	return []idleKey{
		{"clusterEndpoints", len(o.ClusterEndpoints) > 0, noCluster},
		{"clusterId", o.ClusterID != "", noCluster},
		{"nodeId", o.NodeID != "",
			"an engine's id must be its own and new at each start, or decode engines use a restarted engine's old " +
				"addresses; vLLM makes it"},
		{"bufferSize", o.BufferSize != 0,
			"blocks are moved straight from one KV cache to another; NixlConnector does not read vLLM's " +
				"kv_buffer_size"},
		{"connectionPoolSize", o.ConnectionPoolSize != 0, noPool},
		{"maxConnections", o.MaxConnections != 0, noPool},
		{"maxConcurrency", o.MaxConcurrency != 0, "the engine's scheduler bounds what runs at once: --max-num-seqs"},
		{"maxMemoryPerNode", o.MaxMemoryPerNode != 0,
			"KV lies in the engine's own cache, which --kv-cache-memory-bytes or --gpu-memory-utilization bounds"},
		{"replicationFactor", o.ReplicationFactor != 0, noStore},
		{"consistencyLevel", o.ConsistencyLevel != "", noStore},
		{"shardingStrategy", o.ShardingStrategy != "", noStore},
		{"hashFunction", o.HashFunction != "", "blocks are named by the handoff, not found by a hash"},
		{"batchSize", o.BatchSize != 0, noBatch},
		{"flushInterval", o.FlushInterval != nil, noBatch},
		{"compressionType", o.CompressionType != "", "blocks are moved as they lie in memory"},
		{"connectionTimeout", o.ConnectionTimeout != nil, noTimeout},
		{"readTimeout", o.ReadTimeout != nil, noTimeout},
		{"writeTimeout", o.WriteTimeout != nil, noTimeout},
		{"failoverTimeout", o.FailoverTimeout != nil, "failing over is the gateway's: retry and fallback"},
		{"retryPolicy", o.RetryPolicy != "", "retrying is the gateway's: retry"},
		{"rdmaConfig.mtu", o.network() == "rdma" && rdma.MTU != 0 && !pathMTU(rdma.MTU),
			"is none that an InfiniBand path can have: 256, 512, 1024, 2048 or 4096"},
		{"rdmaConfig.maxSge", o.network() == "rdma" && rdma.MaxSGE != 0, "UCX takes what the device has"},
	}
}
