// SPDX-License-Identifier: Apache-2.0

// Package plainhttp is the connector "http": prefill, then decode, and nothing relayed between them.
//
// It says nothing about KV. Whether decode finds P's cache is up to the engines (a store that both are configured for).
// With engines that share nothing, every prompt is computed twice, and all responses are still right. Who wants a
// transfer that pdkit can vouch for names its protocol: nixl, lmcache, mooncake ….
package plainhttp

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/lmcacheconf"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "http"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	})
}

// Options are the settings of the design documents' HTTPConnectorConfig. The flow's own timeouts and attempts
// (Spec.Timeouts, Spec.Retry) are what runs; these two are read for old files.
type Options struct {
	// RequestTimeout is the time of the prefill leg, where timeouts.prefill is not given; 0 is none.
	RequestTimeout   config.Duration `json:"requestTimeout"`
	MaxRetries       int             `json:"maxRetries"`       // further attempts, where retry.maxAttempts is not given
	KVTransferMethod string          `json:"kvTransferMethod"` // "" or implicit
}

// Connector is the connector "http". The zero value is ready.
type Connector struct{ opts Options }

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	switch o.KVTransferMethod {
	case "", "implicit":
	case "explicit":
		return nil, &config.FieldError{Path: "kvTransferMethod", Problem: `"explicit" is not what this connector does`,
			Remedy: "use type nixl, which relays the handoff"}
	default:
		return nil, &config.FieldError{Path: "kvTransferMethod", Problem: "unknown method",
			Remedy: "implicit is the only one"}
	}
	if o.RequestTimeout < 0 {
		return nil, &config.FieldError{Path: "requestTimeout", Problem: "is negative",
			Remedy: "a duration of 0 (none) or more"}
	}
	if o.MaxRetries < 0 {
		return nil, &config.FieldError{Path: "maxRetries", Problem: fmt.Sprintf("is %d", o.MaxRetries),
			Remedy: "0 or more"}
	}
	return &Connector{opts: *o}, nil
}

// Traits declares that nothing is known of the engines but where they keep KV: D finds what P has put where both look.
// Any API is carried, and several choices to one prompt, since there is no handoff that only one of them could read.
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:      Name,
		APIs:      connector.APIs(),
		Handoff:   connector.Handoff{MultiUse: true},
		Timeouts:  config.Timeouts{Prefill: time.Duration(c.opts.RequestTimeout)},
		PairRules: []attr.PairRule{attr.Shared(attr.Store)},
	}
	if c.opts.MaxRetries > 0 {
		t.Retry.MaxAttempts = c.opts.MaxRetries + 1
	}
	return t
}

// Prefill adds nothing: the flow asks P for one token.
func (*Connector) Prefill(context.Context, *connector.Session, *connector.Leg) error { return nil }

// Decode sends the client's own request.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// CheckEndpoint refuses engines of the connector lmcache-pd, which a prefill leg without its members ends.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return lmcacheconf.CheckNoPD(e) }
