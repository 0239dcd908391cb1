// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strconv"

	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
)

// renderNixl gives the launch settings of an engine. Each key of the documents becomes a setting of vLLM or of UCX,
// over which NIXL moves the blocks; a note names each key that has no effect. UCX's variables are those that `ucx_info
// -f` lists.
func renderNixl(c connector.KVConnector, given *nixl.Options, t Target) (Settings, error) {
	o := nixlOptions{given}
	s, err := nixlEngine{class: "NixlConnector", lease: c.Traits().Handoff.Lease, port: o.Port}.settings(t)
	if err != nil {
		return s, err
	}
	if err := o.renderTurns(t, &s); err != nil {
		return s, err
	}
	o.renderNetwork(t, &s)
	o.renderIdle(&s)
	return s, nil
}

// nixlOptions are the settings of the connector, with what they mean for engines.
type nixlOptions struct{ *nixl.Options }

// renderTurns adds the settings that bidirectional needs.
func (o nixlOptions) renderTurns(t Target, s *Settings) error {
	if !o.Bidirectional {
		return nil
	}
	if t.Version.Before(0, 22) {
		// 0.21 has it too, but another setting there says how long D keeps the blocks.
		return errors.New("config.bidirectional: vLLM " + t.Version.String() + " is too old for it: 0.22 or later")
	}
	ttl := nixl.DefaultConversationTTL
	if o.ConversationTTL != nil {
		ttl = time.Duration(*o.ConversationTTL)
	}
	s.KVTransfer.Extra["bidirectional_kv_xfer"] = true
	s.KVTransfer.Extra["decoder_kv_blocks_ttl"] = int64(math.Ceil(ttl.Seconds()))
	// P serves /render, which says which tokens a prompt has, only with this argument.
	s.Args = append(s.Args, "--enable-scale-out")
	return nil
}

// renderNetwork adds UCX's settings.
func (o nixlOptions) renderNetwork(t Target, s *Settings) {
	network := o.network()
	memory := ",cuda_copy,cuda_ipc" // without these UCX cannot reach KV in a GPU's memory
	if t.CPU {
		memory = ""
	}
	var device string
	switch network {
	case "tcp":
		s.set("UCX_TLS", "tcp"+memory)
		device = o.NetworkInterface
	case "rdma", "infiniband":
		s.set("UCX_TLS", "rc"+memory)
		device = o.ibDevice(network)
		s.idleIf(o.NetworkInterface != "", "config.networkInterface",
			"RDMA goes over a device, not over a network interface: rdmaConfig.deviceName or infinibandConfig.hcaName")
		o.renderIB(s)
	default:
		device = o.NetworkInterface
		if t.CPU {
			s.set("UCX_TLS", "tcp")
		}
	}
	if device = cmp.Or(device, loopbackDevice(t)); device != "" {
		s.set("UCX_NET_DEVICES", device)
	}
	if o.KeepAliveInterval != nil {
		s.set("UCX_KEEPALIVE_INTERVAL", strconv.FormatFloat(time.Duration(*o.KeepAliveInterval).Seconds(), 'f', -1,
			64)+"s")
	}
	s.idleIf(o.NetworkType != "" && o.Protocol != "" && o.NetworkType != o.Protocol, "config.protocol",
		"networkType says otherwise, and is what counts")
	s.idleIf(o.RDMAConfig != nil && network != "rdma", "config.rdmaConfig", "networkType is not rdma")
	s.idleIf(o.InfiniBandConfig != nil && network != "infiniband", "config.infinibandConfig",
		"networkType is not infiniband")
}

// ibDevice is a device and its port in UCX's notation: mlx5_0:1.
func (o nixlOptions) ibDevice(network string) string {
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

func (o nixlOptions) renderIB(s *Settings) {
	number := func(name string, n int) {
		if n > 0 {
			s.set(name, strconv.Itoa(n))
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
			s.set("UCX_IB_PKEY", ib.PartitionKey)
		}
		number("UCX_IB_SL", ib.ServiceLevel)
	}
}

// pathMTU reports whether InfiniBand has an MTU of n bytes: UCX does not start with another one.
func pathMTU(n int) bool { return slices.Contains([]int{256, 512, 1024, 2048, 4096}, n) }

func (o nixlOptions) network() string { return cmp.Or(o.NetworkType, o.Protocol) }

// renderIdle notes the keys of the documents for which the engines have no setting.
func (o nixlOptions) renderIdle(s *Settings) {
	const (
		noCluster = "there is no cluster to join: engines find each other by the handoff, and the gateway finds them " +
			"by discovery"
		noStore   = "NIXL copies blocks from one engine's memory to another's; it keeps no copies and spreads none"
		noPool    = "NIXL has one connection between each two workers"
		noBatch   = "a request's blocks are read as one transfer, as soon as it is scheduled"
		noTimeout = "NIXL's own limits are fixed: 5 s for a handshake, none for a transfer; the flow's timeouts " +
			"bound the legs"
	)
	var rdma nixl.RDMAConfig
	if o.RDMAConfig != nil {
		rdma = *o.RDMAConfig
	}
	for _, k := range []struct {
		path  string
		given bool
		why   string
	}{
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
	} {
		s.idleIf(k.given, "config."+k.path, k.why)
	}
}
