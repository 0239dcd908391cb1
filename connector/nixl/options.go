// SPDX-License-Identifier: Apache-2.0

package nixl

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
)

// Options are the connector's settings: pdkit's own, and every key that the design documents give NIXL, in their YAML
// and in their Go structs. The documents' keys describe the engines' side. This package checks them and renders them as
// the engines' settings; they do not change the legs.
type Options struct {
	LeaseDuration *config.Duration `json:"leaseDuration"` // P's kv_lease_duration; default 30s
	// P reads D's KV of one turn for the next turn; both engines need bidirectional_kv_xfer
	Bidirectional bool `json:"bidirectional"`
	// the client's header that names the conversation, for bidirectional; default X-Session-ID
	ConversationHeader string `json:"conversationHeader"`
	// D's decoder_kv_blocks_ttl, for bidirectional; default 480s
	ConversationTTL *config.Duration `json:"conversationTTL"`

	ClusterEndpoints   []string          `json:"clusterEndpoints"`
	ClusterID          string            `json:"clusterId"`
	NodeID             string            `json:"nodeId"`
	NetworkInterface   string            `json:"networkInterface"`
	NetworkType        string            `json:"networkType"` // rdma, infiniband, tcp
	Protocol           string            `json:"protocol"`    // the YAML's word for networkType
	Port               int               `json:"port"`
	RDMAConfig         *RDMAConfig       `json:"rdmaConfig"`
	InfiniBandConfig   *InfiniBandConfig `json:"infinibandConfig"`
	BufferSize         int64             `json:"bufferSize"` // bytes
	ConnectionPoolSize int               `json:"connectionPoolSize"`
	MaxConnections     int               `json:"maxConnections"`
	MaxConcurrency     int               `json:"maxConcurrency"`
	KeepAliveInterval  *config.Duration  `json:"keepAliveInterval"`
	MaxMemoryPerNode   int64             `json:"maxMemoryPerNode"` // bytes
	ReplicationFactor  int               `json:"replicationFactor"`
	ConsistencyLevel   string            `json:"consistencyLevel"` // strong, eventual
	ShardingStrategy   string            `json:"shardingStrategy"`
	HashFunction       string            `json:"hashFunction"`
	BatchSize          int               `json:"batchSize"`
	FlushInterval      *config.Duration  `json:"flushInterval"`
	CompressionType    string            `json:"compressionType"` // none, lz4, zstd
	ConnectionTimeout  *config.Duration  `json:"connectionTimeout"`
	ReadTimeout        *config.Duration  `json:"readTimeout"`
	WriteTimeout       *config.Duration  `json:"writeTimeout"`
	FailoverTimeout    *config.Duration  `json:"failoverTimeout"`
	RetryPolicy        string            `json:"retryPolicy"`
}

// RDMAConfig is the documents' RDMAConfig.
type RDMAConfig struct {
	DeviceName string `json:"deviceName"`
	Port       int    `json:"port"`
	QueueDepth int    `json:"queueDepth"`
	MaxSGE     int    `json:"maxSge"`
	MTU        int    `json:"mtu"` // bytes
}

// InfiniBandConfig is the documents' InfiniBandConfig.
type InfiniBandConfig struct {
	HCAName      string `json:"hcaName"`
	Port         int    `json:"port"`
	PartitionKey string `json:"partitionKey"`
	ServiceLevel int    `json:"serviceLevel"`
}

func (o *Options) check() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if o.LeaseDuration != nil && *o.LeaseDuration <= 0 {
		fault("leaseDuration", "is not above 0", "the engines' kv_lease_duration, 30s unless they set another")
	}
	if o.ConversationTTL != nil && *o.ConversationTTL <= leastTTL {
		fault("conversationTTL", "is not above 10s, of which prefill would take nothing in the last 5",
			"the decode engines' decoder_kv_blocks_ttl, 480s unless they set another")
	}
	if strings.ContainsFunc(o.ConversationHeader, notInHeaderName) {
		fault("conversationHeader", "is not a header's name", "one like X-Session-ID")
	}
	for _, c := range []struct {
		path, value string
		known       []string
	}{
		{"networkType", o.NetworkType, []string{"rdma", "infiniband", "tcp"}},
		{"protocol", o.Protocol, []string{"rdma", "infiniband", "tcp"}},
		{"consistencyLevel", o.ConsistencyLevel, []string{"strong", "eventual"}},
		{"compressionType", o.CompressionType, []string{"none", "lz4", "zstd"}},
	} {
		if c.value != "" && !slices.Contains(c.known, c.value) {
			fault(c.path, "is not a known value", "one of "+strings.Join(c.known, ", "))
		}
	}
	for _, c := range o.counts() {
		if c.value < 0 {
			fault(c.path, "is negative", "0 or more")
		}
	}
	if o.Port > 65535 {
		fault("port", "is not a port", "1 to 65535")
	}
	return errors.Join(errs...)
}

func notInHeaderName(r rune) bool {
	return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
}

// The defaults of the settings that bidirectional needs.
const (
	DefaultConversationHeader = "X-Session-ID"
	DefaultConversationTTL    = 480 * time.Second // vLLM's decoder_kv_blocks_ttl
)

// leastTTL is the shortest TTL that is of use: half of it is longestMargin's part, and P refuses to take KV in the last
// 5 s.
const leastTTL = config.Duration(10 * time.Second)

func (o *Options) conversationHeader() string {
	if o.ConversationHeader == "" {
		return DefaultConversationHeader
	}
	return o.ConversationHeader
}

func (o *Options) conversationTTL() time.Duration {
	if o.ConversationTTL == nil {
		return DefaultConversationTTL
	}
	return time.Duration(*o.ConversationTTL)
}

type count struct {
	path  string
	value int64
}

// counts lists the settings that cannot be negative: counts, sizes and durations.
func (o *Options) counts() []count {
	rdma, ib := o.RDMAConfig, o.InfiniBandConfig
	if rdma == nil {
		rdma = &RDMAConfig{}
	}
	if ib == nil {
		ib = &InfiniBandConfig{}
	}
	return []count{
		{"port", int64(o.Port)}, {"bufferSize", o.BufferSize}, {"connectionPoolSize", int64(o.ConnectionPoolSize)},
		{"maxConnections", int64(o.MaxConnections)}, {"maxConcurrency", int64(o.MaxConcurrency)},
		{"maxMemoryPerNode", o.MaxMemoryPerNode}, {"replicationFactor", int64(o.ReplicationFactor)},
		{"batchSize", int64(o.BatchSize)},
		{"rdmaConfig.port", int64(rdma.Port)}, {"rdmaConfig.queueDepth", int64(rdma.QueueDepth)},
		{"rdmaConfig.maxSge", int64(rdma.MaxSGE)}, {"rdmaConfig.mtu", int64(rdma.MTU)},
		{"infinibandConfig.port", int64(ib.Port)}, {"infinibandConfig.serviceLevel", int64(ib.ServiceLevel)},
		{"keepAliveInterval", length(o.KeepAliveInterval)}, {"flushInterval", length(o.FlushInterval)},
		{"connectionTimeout", length(o.ConnectionTimeout)}, {"readTimeout", length(o.ReadTimeout)},
		{"writeTimeout", length(o.WriteTimeout)}, {"failoverTimeout", length(o.FailoverTimeout)},
	}
}

func length(d *config.Duration) int64 {
	if d == nil {
		return 0
	}
	return int64(*d)
}
