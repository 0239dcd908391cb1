// SPDX-License-Identifier: Apache-2.0

// Package nixl is the connector "nixl": vLLM's NixlConnector (NixlPullConnector), in which D reads P's KV blocks.
//
// P runs first. Its whole response has the handoff, the top-level member kv_transfer_params. D gets that object byte
// for byte, unknown keys and big integers included. A handoff is single use and lives as long as P's lease
// (kv_lease_duration, 30 s by default). After the lease P may have given the blocks to another prompt, and D then
// answers 200 with that prompt's text. So a retry prefills again, and the flow does not send a handoff that is older
// than the lease less a margin.
//
// Facts: vLLM 0.32.0, recorded exchanges and vllm/distributed/kv_transfer/kv_connector/v1/nixl. The page beside this
// file, README.md, shows the sequence and the engines' settings.
package nixl

import (
	"cmp"
	"context"
	"encoding/json"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
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

// New checks the settings; nil means the defaults. It returns a *[Connector], or a connector that also remembers
// conversations if Bidirectional is set.
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

// Traits declares the protocol. D needs the block ids in P's response. They are single use and live as long as P's
// lease.
//
// The rules follow the engines' handshake (_validate_remote_agent_handshake; vLLM 0.32.0). One tensor-parallel size
// must divide the other, also with MLA (TransferTopology.tp_ratio). The engines compare a hash of the KV type, the
// model and the version (compute_nixl_compatibility_hash): the rule covers the KV type, and pickers compare model and
// version themselves. Block sizes and layouts may differ within bounds that depend on the attention backend, so they
// are not rules.
func (c *Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:    Name,
		Members: []string{connector.ParamsMember},
		// The zero Connector has a lease, too.
		Handoff:   connector.Handoff{Member: connector.ParamsMember, Lease: cmp.Or(c.lease, DefaultLease)},
		PairRules: []attr.PairRule{attr.Multiple(attr.TPSize), attr.Same(attr.KVCacheDtype)},
		Serving:   kvparams.Usage,

		Ending: connector.Ending{RefusalReleases: true}, // docs/protocols/nixl.md, recording 25
	}
}

// Prefill asks P for one token and for a handoff.
func (*Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	leg.Params(kvparams.Ask)
	return nil
}

// Decode gives D P's handoff after checking that it is complete. If it is not, the error is [connector.ErrNoTransfer].
func (*Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	raw, err := handoff.Member(p, connector.ParamsMember, func(raw json.RawMessage) error {
		return kvparams.NIXL(raw, kvparams.RemotePrefill)
	})
	if err != nil {
		return err
	}
	leg.Params(kvparams.ForDecode(raw))
	return nil
}
