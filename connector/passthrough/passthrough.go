// SPDX-License-Identifier: Apache-2.0

// Package passthrough is the connector "http": prefill, then decode, and nothing relayed between them.
//
// It says nothing about KV. Whether decode finds P's cache is up to the engines (a shared store that both are configured
// for); with engines that share nothing, every prompt is computed twice and all answers are still right. Who wants a
// transfer that pdkit can vouch for names its protocol: nixl, lmcache, mooncake ….
package passthrough

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
)

// Name is the name the connector is registered under.
const Name = "http"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := connector.DecodeConfig(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	})
}

// Options are the settings of the design documents' HTTPConnectorConfig. The flow's own timeouts and attempts
// (Spec.Timeouts, Spec.Retry) are what runs; these two are read for old files.
type Options struct {
	RequestTimeout   connector.Duration `json:"requestTimeout"`   // time of the prefill leg, where timeouts.prefill is not given; 0: none
	MaxRetries       int                `json:"maxRetries"`       // further attempts, where retry.maxAttempts is not given
	KVTransferMethod string             `json:"kvTransferMethod"` // "" or implicit
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
		return nil, &connector.FieldError{Path: "kvTransferMethod", Problem: `"explicit" is not what this connector does`, Remedy: "use type nixl, which relays the handoff"}
	default:
		return nil, &connector.FieldError{Path: "kvTransferMethod", Problem: "unknown method", Remedy: "implicit is the only one"}
	}
	if o.RequestTimeout < 0 {
		return nil, &connector.FieldError{Path: "requestTimeout", Problem: "is negative", Remedy: "a duration of 0 (none) or more"}
	}
	if o.MaxRetries < 0 {
		return nil, &connector.FieldError{Path: "maxRetries", Problem: fmt.Sprintf("is %d", o.MaxRetries), Remedy: "0 or more"}
	}
	return &Connector{opts: *o}, nil
}

// Traits declares that nothing is known of the engines but where they keep KV: D finds what P has put where both look.
// Any API is carried, and several answers to one prompt, since there is no handoff that only one of them could read.
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:      Name,
		APIs:      connector.APIs(),
		MultiUse:  true,
		PairRules: []connector.PairRule{attr.Shared(attr.Store)},
	}
}

// Name returns "http".
// Prefill asks P for one token.
func (*Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Normalize()
	leg.DropThinkingBudget()
	return nil
}

// Decode sends the client's own request.
func (*Connector) Decode(context.Context, *connector.Session, *connector.PrefillResult, *connector.Leg) error {
	return nil
}

// Defaults returns the time of the prefill leg and the attempts that old files set in config; 0 where they do not.
func (c *Connector) Defaults() (prefill time.Duration, attempts int) {
	if c.opts.MaxRetries > 0 {
		attempts = c.opts.MaxRetries + 1
	}
	return time.Duration(c.opts.RequestTimeout), attempts
}
