// SPDX-License-Identifier: Apache-2.0

// Package mooncakestore is the connector "mooncake-store": vLLM's MooncakeStoreConnector, whose engines share a pool of
// KV blocks.
//
// P computes the prompt and puts its whole blocks into the pool. D gets the client's own request and finds the blocks
// by the prompt's tokens. The requests and responses say nothing about it: neither leg carries transfer members, and no
// response says whether D found anything. It is the engines that must be set right: one master, the same namespace
// (cache_prefix, tenant_id), and block hashes that agree (PYTHONHASHSEED). The put is asynchronous: P may answer before
// its blocks are in the pool, and a D that looks too early computes the prompt itself without saying so.
// [Options.SettleTime] waits between the legs.
//
// The design documents call this protocol "mooncake". The connector [github.com/pdkit/pdkit/connector/mooncake] is
// another protocol, in which P writes into D's blocks. Engines may run both as children of a MultiConnector, which is
// the connector "multi".
//
// Facts: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store and vllm/distributed/mooncake_store.py at
// 07d682b5, docs/features/mooncake_store_connector_usage.md at 01529cf1. Read, not run. README.md beside this file has
// the engines' settings.
package mooncakestore

import (
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/settle"
)

// Name is the name the connector is registered under.
const Name = "mooncake-store"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "MooncakeStoreConnector")
}

// Connector is the connector "mooncake-store". The zero value is ready.
type Connector struct{ opts Options }

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	return &Connector{opts: *o}, nil
}

// Traits declares the protocol. D looks into the pool when it gets its request. The pool may be read any number of
// times.
//
// The rules: P and D must use the same store. The sizes are no rule: it depends on the model's heads and on
// store_tp_size whether ranks share keys (mooncake/store/worker.py of vLLM 0.32.0: _select_store_layout). For engines
// that cannot share, name different stores.
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:    Name,
		Handoff: connector.Handoff{MultiUse: true, ContentStore: true},

		Serving:   connector.Serving{ReusedInUsage: true},
		PairRules: []attr.PairRule{attr.Shared(attr.Store)},
	}
}

// Prefill adds nothing: the settings of P make it put its KV into the pool.
func (*Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode leaves the client's request as it is.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// Expect waits for the settle time between the legs, if one is set.
func (c *Connector) Expect(*connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	return settle.Expect(time.Duration(c.opts.SettleTime))
}
