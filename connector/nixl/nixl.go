// SPDX-License-Identifier: Apache-2.0

// Package nixl is the connector "nixl": vLLM's NixlConnector (NixlPullConnector), in which D reads P's KV blocks.
//
// Prefill runs first and answers with a handoff, kv_transfer_params at the top level of its whole answer. Decode gets
// that object byte for byte, unknown keys and big integers included. A handoff is single use and lives as long as P's
// lease (kv_lease_duration, 30 s by default): after that P may have given the blocks to another prompt, and D answers 200
// with that prompt's text. So a retry prefills again, and a handoff older than the lease less a margin is not sent.
//
// Facts: vLLM 0.32.0, recorded exchanges and vllm/distributed/kv_transfer/kv_connector/v1/nixl. The page beside this
// file, README.md, shows the sequence and the engines' settings.
package nixl

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
)

// Name is the name the connector is registered under.
const Name = "nixl"

// DefaultLease is how long vLLM keeps an unread handoff (kv_lease_duration).
const DefaultLease = 30 * time.Second

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "NixlConnector", "NixlPullConnector")
}

// Connector is the connector "nixl". The zero value is ready.
type Connector struct {
	lease time.Duration
	opts  Options
}

// New checks the settings. nil means defaults. The connector is a *[Connector], unless Bidirectional is set: then it is one that
// remembers conversations besides.
func New(o *Options) (connector.KVConnector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Connector{lease: DefaultLease, opts: *o}
	if o.LeaseDuration != nil {
		c.lease = time.Duration(*o.LeaseDuration)
	}
	if o.Bidirectional {
		return newConversational(c), nil
	}
	return c, nil
}

// Traits declares the protocol. D needs the block ids of P's response, which are single use and live as long as P's
// lease.
//
// The rules follow the engines' handshake. One tensor-parallel size must divide the other (TransferTopology.tp_ratio),
// with MLA, too; the type of KV is in the hash that they compare (compute_nixl_compatibility_hash), as are model and
// version, which pickers compare by themselves. Block sizes and layouts may differ within bounds that depend on the
// attention backend, so they are no rules (_validate_remote_agent_handshake; vLLM 0.32.0).
func (c *Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:      Name,
		Members:   []string{connector.ParamsMember},
		Handoff:   connector.Handoff{Member: connector.ParamsMember},
		Lease:     cmp.Or(c.lease, DefaultLease), // the zero Connector must not go without
		PairRules: []connector.PairRule{attr.Multiple(attr.TPSize), attr.Same(attr.KVCacheDtype)},
	}
}

// Name returns "nixl".
// Prefill asks P for one token and for a handoff.
func (*Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Normalize()
	leg.Params(kvparams.Ask)
	return nil
}

// Decode relays P's handoff once it is known to be complete. The error is [connector.ErrNoTransfer] if it is not.
func (*Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult, leg *connector.Leg) error {
	raw, err := handoff.Member(p, connector.ParamsMember, func(raw json.RawMessage) error { return kvparams.NIXL(raw, kvparams.RemotePrefill, nil) })
	if err != nil {
		return err
	}
	leg.Params(raw)
	return nil
}
