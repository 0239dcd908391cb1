// SPDX-License-Identifier: Apache-2.0

package sharedstorage_test

import (
	"encoding/json"
	"testing"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
)

func factory(settings json.RawMessage) (connector.KVConnector, error) {
	return connector.Open(config.Spec{Type: "sharedstorage", Config: settings})
}

var harness = connectortest.Harness{
	Name:   "sharedstorage",
	New:    factory,
	Config: json.RawMessage(`{"cacheHitThreshold":0.8,"sharedStoragePath":"/kv"}`),
	BadConfig: []json.RawMessage{json.RawMessage(`{"cacheHitThreshold":2}`),
		json.RawMessage(`{"cacheHitThreshold":"0.5"}`)},
}

// prefillFirst tests the connector without a threshold, which supports all of vLLM's APIs.
var prefillFirst = connectortest.Harness{
	Name:   "sharedstorage",
	New:    factory,
	Config: json.RawMessage(`{"shared_storage_path":"/kv"}`),
}

func TestConformance(t *testing.T) { connectortest.Run(t, harness) }

func TestConformanceWithoutAThreshold(t *testing.T) { connectortest.Run(t, prefillFirst) }

func TestGolden(t *testing.T) { connectortest.Golden(t, factory, "testdata/golden") }

func FuzzConnector(f *testing.F) { connectortest.Fuzz(f, harness) }
