// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/connector/connectortest"
)

var harness = connectortest.Harness{
	Name:   "sharedstorage",
	Config: json.RawMessage(`{"cacheHitThreshold":0.8,"sharedStoragePath":"/kv"}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"cacheHitThreshold":2}`),
		json.RawMessage(`{"cacheHitThreshold":"0.5"}`)},
}

// prefillFirst tests the connector without a threshold, which supports all of vLLM's APIs.
var prefillFirst = connectortest.Harness{
	Name:   "sharedstorage",
	Config: json.RawMessage(`{"shared_storage_path":"/kv"}`),
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestConformanceWithoutAThreshold(t *testing.T) { connectortest.Run(t, prefillFirst) }

func TestGolden(t *testing.T) {
	connectortest.Golden(t, connectortest.Open("sharedstorage"), "testdata/golden")
}

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
