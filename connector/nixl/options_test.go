// SPDX-License-Identifier: Apache-2.0

package nixl_test

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/nixl"
)

func openConfig(settings string) error {
	_, err := connector.Open(config.Spec{Type: "nixl", Config: json.RawMessage(settings)})
	return err
}

// The config of the design proposal's NIXL example, then every key of its Go structs NIXLConnectorConfig, RDMAConfig
// and InfiniBandConfig, then pdkit's own.
func TestEveryKeyOfTheDesignDocumentsIsRead(t *testing.T) {
	for rule, settings := range map[string]string{
		"none": ``, "null": `null`, "empty": `{}`,
		"the YAML example": `{"clusterEndpoints":["nixl-node-0.nixl.default.svc.cluster.local:7777",
		"nixl-node-1.nixl.default.svc.cluster.local:7777"],
			"nodeId":"matrixinfer-nixl-node","networkInterface":"eth0","port":7777,"protocol":"tcp",
			"bufferSize":1048576,"connectionPoolSize":20,
			"maxConcurrency":10,"keepAliveInterval":"30s","maxMemoryPerNode":17179869184,"replicationFactor":2,
			"consistencyLevel":"strong",
			"shardingStrategy":"consistent_hash","hashFunction":"xxhash","failoverTimeout":"10s",
			"retryPolicy":"exponential"}`,
		"the Go structs": `{"clusterEndpoints":["a:1"],"clusterId":"c","networkType":"rdma",
			"rdmaConfig":{"deviceName":"mlx5_0","port":1,"queueDepth":128,"maxSge":4,"mtu":4096},
			"infinibandConfig":{"hcaName":"h","port":1,"partitionKey":"p","serviceLevel":1},
			"maxMemoryPerNode":1,"replicationFactor":1,"consistencyLevel":"eventual","batchSize":8,
			"flushInterval":"1ms","compressionType":"zstd",
			"connectionTimeout":"1s","readTimeout":"1s","writeTimeout":"1s","maxConnections":9}`,
		"pdkit's own": `{"leaseDuration":"30s","bidirectional":true,"conversationHeader":"X-Session-ID",` +
			`"conversationTTL":"480s"}`,
	} {
		assert.NoError(t, openConfig(settings), rule)
	}
}

func TestBadValuesAreRefusedAtTheirPath(t *testing.T) {
	play.Refuses(t, nixl.Name, map[string]string{
		`{"leaseDuration":"0s"}`:             "leaseDuration",
		`{"leaseDuration":"-1s"}`:            "leaseDuration",
		`{"leaseDuration":30}`:               "leaseDuration",
		`{"leaseDuration":"30"}`:             "leaseDuration",
		`{"conversationTTL":"10s"}`:          "conversationTTL",
		`{"conversationHeader":"X Y"}`:       "conversationHeader",
		`{"bidirectional":"no"}`:             "bidirectional",
		`{"networkType":"carrier-pigeon"}`:   "networkType",
		`{"protocol":"udp"}`:                 "protocol",
		`{"consistencyLevel":"weak"}`:        "consistencyLevel",
		`{"compressionType":"gzip"}`:         "compressionType",
		`{"port":-1}`:                        "port",
		`{"port":65536}`:                     "port",
		`{"bufferSize":-1}`:                  "bufferSize",
		`{"bufferSize":"1Mi"}`:               "bufferSize",
		`{"connectionPoolSize":-1}`:          "connectionPoolSize",
		`{"maxConnections":-1}`:              "maxConnections",
		`{"maxConcurrency":-1}`:              "maxConcurrency",
		`{"maxMemoryPerNode":-1}`:            "maxMemoryPerNode",
		`{"replicationFactor":-1}`:           "replicationFactor",
		`{"batchSize":-1}`:                   "batchSize",
		`{"rdmaConfig":{"port":"x"}}`:        "rdmaConfig.port",
		`{"clusterEndpoints":"a:1"}`:         "clusterEndpoints",
		`{"rdmaConfig":{"mtu":-1}}`:          "rdmaConfig.mtu",
		`{"rdmaConfig":{"queueDepth":-1}}`:   "rdmaConfig.queueDepth",
		`{"readTimeout":"-1s"}`:              "readTimeout",
		`{"infinibandConfig":{"port":-1}}`:   "infinibandConfig.port",
		`{"leaseDuraton":"30s"}`:             "leaseDuraton … leaseDuration",
		`{"rdmaConfig":{"queuDepth":1}}`:     "rdmaConfig.queuDepth … queueDepth",
		`{"infinibandConfig":{"hcaname":1}}`: "infinibandConfig.hcaname … hcaName",
	})
}

func TestAllFaultsAreReportedAtOnce(t *testing.T) {
	assert.Len(t, config.FieldErrors(openConfig(`{"leaseDuration":"0s","port":-1,"protocol":"udp"}`)), 3)
}

func TestOptionsAreNamedInLowerCamelCase(t *testing.T) {
	for f := range reflect.TypeFor[nixl.Options]().Fields() {
		tag := f.Tag.Get("json")
		assert.NotEmpty(t, tag, f.Name)
		assert.Equal(t, strings.ToLower(tag[:1]), tag[:1], f.Name)
	}
}
