// SPDX-License-Identifier: Apache-2.0

// Package silentstore has the connectors of stores that need nothing in the requests: P puts the prompt's KV into a
// store that the engines share, and D gets the client's own request and finds the KV by the prompt's tokens. Neither a
// request nor a response says anything about it. The stores differ only in what the engines must be launched with:
//
//   - "ascend-store": vllm-ascend's AscendStoreConnector, also called MooncakeConnectorStoreV1;
//   - "flexkv": vLLM's FlexKVConnectorV1;
//   - "hf3fs": vLLM's HF3FSKVConnector;
//   - "ucm": vllm-ascend's UCMConnector.
//
// A put may end after P's response. A D that looks too early computes the prompt itself without saying so;
// [Options.SettleTime] waits between the legs. Stores with more settings of their own have packages of their own:
// mooncakestore, lmcache, sharedstorage.
//
// Facts: docs/protocols/silent-stores.md. Read, not run.
package silentstore

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/settle"
)

func init() {
	for i := range stores {
		s := &stores[i]
		connector.Register(s.name, func(raw json.RawMessage) (connector.KVConnector, error) {
			var o Options
			if err := config.Decode(raw, &o); err != nil {
				return nil, err
			}
			return New(s.name, &o)
		}, s.classes...)
	}
}

// Options are the settings of each of the stores.
type Options struct {
	// SettleTime is the wait between P's response and decode, since P's put may end later. Default 0.
	SettleTime config.Duration `json:"settleTime"`
	// Class is the engine's class to render if the store has several. The default is the first of them.
	Class string `json:"kv_connector"`
	// Extra are the engines' own settings, under the engines' names. They are rendered and do not change the legs.
	Extra map[string]any `json:"kv_connector_extra_config"`
}

// store is a store with the engines' classes for it.
type store struct {
	name    string
	classes []string
}

var stores = []store{
	{"ascend-store", []string{"AscendStoreConnector", "MooncakeConnectorStoreV1"}},
	{"flexkv", []string{"FlexKVConnectorV1"}},
	{"hf3fs", []string{"HF3FSKVConnector"}},
	{"ucm", []string{"UCMConnector"}},
}

// Connector is the connector of one store. Make it with [New].
type Connector struct {
	store *store
	opts  Options
}

// New makes the connector of a store, by the name that it is registered under: ascend-store, flexkv, hf3fs or ucm. nil
// means defaults.
func New(name string, o *Options) (*Connector, error) {
	i := slices.IndexFunc(stores, func(s store) bool { return s.name == name })
	if i < 0 {
		return nil, &config.FieldError{Path: "type", Problem: "is not a store of this package",
			Remedy: "ascend-store, flexkv, hf3fs or ucm"}
	}
	c := &Connector{store: &stores[i]}
	if o != nil {
		c.opts = *o
	}
	if c.opts.SettleTime < 0 {
		return nil, &config.FieldError{Path: "settleTime", Problem: "is negative",
			Remedy: `a duration like "50ms", or 0`}
	}
	if c.opts.Class != "" && !slices.Contains(c.store.classes, c.opts.Class) {
		return nil, &config.FieldError{Path: "kv_connector", Problem: "is not a class of this store",
			Remedy: strings.Join(c.store.classes, " or ")}
	}
	return c, nil
}

// Traits declares the protocol. D looks into the store when it gets its request, and the store may be read any number
// of times. P and D must use the same store.
func (c *Connector) Traits() connector.Traits {
	return connector.Traits{Name: c.store.name, Handoff: connector.Handoff{MultiUse: true, ContentStore: true},
		Serving:   connector.Serving{ReusedInUsage: true},
		PairRules: []attr.PairRule{attr.Shared(attr.Store)}}
}

// Prefill adds nothing: the settings of P make it put its KV into the store.
func (*Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode leaves the client's request as it is.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// Expect waits for the settle time between the legs, if one is set.
func (c *Connector) Expect(*connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	return settle.Expect(time.Duration(c.opts.SettleTime))
}
