// SPDX-License-Identifier: Apache-2.0

// Package lmcache is the connector "lmcache": vLLM's LMCacheConnectorV1 and LMCacheMPConnector over a store that P and
// D share.
//
// P computes the prompt and puts its KV into the store, in chunks of 256 tokens. D gets the client's own request and
// finds the chunks by the prompt's tokens. The requests and responses say nothing about it: neither leg carries
// transfer members, and no response says whether D found anything. It is the engines that must be set right: one store
// that both reach, and one PYTHONHASHSEED, without which P's keys differ from D's. The put is asynchronous: P may
// answer before its chunks are in the store, and a D that looks too early computes the prompt itself without saying so
// (LMCache issues 1350, 2471). [Options.SettleTime] waits between the legs.
//
// With enable_pd the same engine class has another protocol, in which P pushes to D: the connector lmcache-pd. The two
// names are not aliases.
//
// Facts: LMCache 0.5 (lmcache/integration/vllm/vllm_v1_adapter.py, lmcache/v1/config.py at 000620e3), vLLM
// vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector.py. README.md beside this file has the engines'
// settings.
package lmcache

import (
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/lmcacheconf"
	"github.com/pdkit/pdkit/connector/internal/settle"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "lmcache"

// pdName is the connector of the same engine class with enable_pd. This package only names it, so that a program that
// does not need ZeroMQ does not link it.
const pdName = "lmcache-pd"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		own, engine := lmcacheconf.Split(raw)
		o.Engine = engine
		if err := config.Decode(own, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, ClassMP)
	// vllm-ascend's and LMCache's own names for the same class.
	for _, class := range []string{ClassV1, "LMCacheAscendConnector", "LMCacheConnectorV1Dynamic"} {
		names.Register(class, Choose)
	}
}

// Choose returns the connector for LMCacheConnectorV1 with these settings: lmcache-pd if enable_pd, lmcache.enable_pd
// or the old enable_nixl is true, otherwise lmcache.
func Choose(config json.RawMessage) string {
	if lmcacheconf.PD(config) {
		return pdName
	}
	return Name
}

// Connector is the connector "lmcache".
type Connector struct {
	options Options
	engine  lmcacheconf.Config
	settle  time.Duration
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	engine, err := o.check()
	if err != nil {
		return nil, err
	}
	c := &Connector{options: *o, engine: engine}
	if o.SettleTime != nil {
		c.settle = time.Duration(*o.SettleTime)
	}
	return c, nil
}

// EngineConfig are LMCache's own settings, as [Options] has them.
type EngineConfig = lmcacheconf.Config

// Settings returns the settings that the connector was made of, and LMCache's own among them.
func (c *Connector) Settings() (Options, EngineConfig) { return c.options, c.engine }

// Traits declares the protocol. D looks into the store when it gets its request. The store may be read any number of
// times.
//
// The rules: P and D must use the same store, and its keys hold the KV type (lmcache/utils.py of 0.5.6:
// CacheEngineKey). The keys also hold the number of ranks, but not with MLA (lmcache/v1/token_database.py:
// _make_key_by_hash), and no attribute says whether a model has MLA. For engines that cannot share, name different
// stores.
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:    Name,
		Handoff: connector.Handoff{MultiUse: true, ContentStore: true},

		Serving:   connector.Serving{ReusedInUsage: true},
		PairRules: []attr.PairRule{attr.Shared(attr.Store), attr.Same(attr.KVCacheDtype)},
	}
}

// Prefill adds nothing: the settings of P make it put its KV into the store.
func (*Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode leaves the client's request as it is.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// Expect waits for the settle time between the legs, if one is set.
func (c *Connector) Expect(*connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	return settle.Expect(c.settle)
}

// CheckEndpoint refuses engines of the connector lmcache-pd, which a prefill leg without its members ends.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return lmcacheconf.CheckNoPD(e) }
