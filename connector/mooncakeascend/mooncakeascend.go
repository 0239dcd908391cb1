// SPDX-License-Identifier: Apache-2.0

// Package mooncakeascend is the connector "mooncake-ascend": vllm-ascend's MooncakeConnectorV1, in which D pulls P's KV
// blocks over Mooncake.
//
// It works like NIXL's pull: P runs first, its whole response has the handoff, the top-level member kv_transfer_params,
// and D gets that object byte for byte. P gives a handoff only if it stopped because of the length, so the prefill leg
// masks the end of sequence and drops stop strings. P keeps unread blocks for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480
// s. If D reads later, the blocks may belong to another prompt. So a retry prefills again, and the flow does not send
// an old handoff.
//
// The package also has the connector "mooncake-hybrid", vllm-ascend's MooncakeHybridConnector for models whose layers
// keep KV in different ways (sliding windows, Mamba): see [NewHybrid].
//
// Facts: vllm-ascend at 182b75e (2026-08-22, between 0.22 and 0.23),
// vllm_ascend/distributed/kv_transfer/kv_p2p/mooncake_connector.py
// (MooncakeConnectorScheduler.update_state_after_alloc, request_finished, MooncakeConnectorMetadata.add_new_req) and
// examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py. Not run: it needs Ascend hardware.
package mooncakeascend

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/ascendengine"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "mooncake-ascend"

// HybridName is the name that the connector for hybrid models is registered under.
const HybridName = "mooncake-hybrid"

// DefaultLease is how long vllm-ascend keeps an unread handoff (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
const DefaultLease = 480 * time.Second

// DefaultKVPort is the first kv_port that launch settings use.
const DefaultKVPort = 30000

const classV1, classHybrid = "MooncakeConnectorV1", "MooncakeHybridConnector"

func init() {
	register(Name, classV1, New)
	register(HybridName, classHybrid, NewHybrid)
}

func register(name, class string, open func(*Options) (*Connector, error)) {
	connector.Register(name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return open(&o)
	}, class)
}

// Options are the connector's settings.
type Options struct {
	// P's VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT; default 480s, whole seconds
	LeaseDuration *config.Duration `json:"leaseDuration"`
	KVPort        int              `json:"kvPort"` // first kv_port of the launch settings; default 30000
}

// Connector is the connector "mooncake-ascend" or "mooncake-hybrid".
type Connector struct {
	lease  time.Duration
	kvPort int
	hybrid bool
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	c := &Connector{lease: DefaultLease, kvPort: DefaultKVPort}
	var faults []error
	if d := o.LeaseDuration; d != nil {
		if c.lease = time.Duration(*d); c.lease < time.Second || c.lease%time.Second != 0 {
			faults = append(
				faults, &config.FieldError{Path: "leaseDuration", Problem: "is not a whole number of seconds above 0",
					Remedy: "the engines' VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480s unless they set another"})
		}
	}
	if o.KVPort != 0 {
		if c.kvPort = o.KVPort; c.kvPort < 1 || c.kvPort > 65535 {
			faults = append(faults, &config.FieldError{Path: "kvPort", Problem: "is not a port", Remedy: "1 to 65535"})
		}
	}
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return c, nil
}

// NewHybrid makes the connector "mooncake-hybrid". nil means defaults.
//
// The handoff is that of MooncakeConnectorV1 less remote_block_size, remote_pcp_size and remote_dcp_size, so both
// engines must have the same block size. remote_block_ids has one list for each group of layers, of which some may be
// empty: a sliding window keeps only the last blocks.
//
// Facts: vllm-ascend 0.26.0rc1, kv_p2p/mooncake_hybrid_connector.py (request_finished_all_groups and
// update_state_after_alloc of MooncakeConnectorScheduler). Read, not run.
func NewHybrid(o *Options) (*Connector, error) {
	c, err := New(o)
	if err == nil {
		c.hybrid = true
	}
	return c, err
}

// Traits declares the protocol. D needs the block ids in P's response. They are single use and live as long as P's
// lease.
//
// The rules: P's tensor-parallel size is a multiple of D's, and one block size divides the other (vllm-ascend 0.23.0,
// mooncake_connector.py: MooncakeConnectorWorker.__init__, _get_local_remote_cp_params;
// Design_Documents/disaggregated_prefill.md, Limitations).
func (c *Connector) Traits() connector.Traits {
	name, blocks := Name, attr.Multiple(attr.BlockSize)
	if c.hybrid {
		name, blocks = HybridName, attr.Same(attr.BlockSize)
	}
	return connector.Traits{
		Name:    name,
		Members: []string{connector.ParamsMember},
		// The zero Connector has a lease, too.
		Handoff:      connector.Handoff{Member: connector.ParamsMember, Lease: cmp.Or(c.lease, DefaultLease)},
		Ending:       connector.Ending{EndsByLength: true, FailureStop: ascendengine.FailureStop},
		OwnRequestID: true,
		Serving:      kvparams.Usage,

		PairRules: []attr.PairRule{ascendengine.TPRule(), blocks},
	}
}

// Prefill asks P for one token, an end by length, and a handoff.
func (*Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	leg.Params(kvparams.Ask)
	leg.SetRequestID(s.ID)
	return nil
}

// Decode gives D P's handoff after checking that it is complete. If it is not, the error is [connector.ErrNoTransfer].
func (*Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	raw, err := handoff.Member(p, connector.ParamsMember, checkHandoff)
	if err != nil {
		return err
	}
	leg.Params(handoff.WithoutNulls(raw, noNulls[:]...))
	leg.SetRequestID(s.ID)
	return nil
}

// checkHandoff refuses a handoff of which D would die, on which it would hang, or with which it would calculate
// wrongly:
//
//   - remote_block_ids absent or empty: an assertion ends the engine;
//   - one of the four remote keys missing: D logs a warning and waits for ever;
//   - num_prompt_blocks absent counts as 0, and an assertion ends the worker;
//   - do_remote_prefill not true: D computes the prompt itself, and P keeps its blocks until the lease ends.
//
// The sizes have defaults if they are absent. Those of remote_ptp_size and remote_block_size also apply to null; the
// others of [noNulls] do not.
func checkHandoff(raw json.RawMessage) error {
	o := handoff.Read(raw, "remote_block_ids")
	o.True("do_remote_prefill")
	o.NotTrue("do_remote_decode")
	o.Text("remote_engine_id")
	o.Text("remote_request_id")
	o.Text("remote_host")
	o.Port("remote_port")
	o.Int("num_prompt_blocks", 1, 1<<40)
	for _, key := range [...]string{"remote_pcp_size", "remote_dcp_size", "remote_ptp_size", "remote_block_size"} {
		o.OptionalInt(key, 1, 1<<20)
	}
	o.OptionalObject("remote_multi_nodes_meta_mapping")
	o.SomeBlocks("remote_block_ids", 2)
	return o.Close()
}

// noNulls are the optional keys with which D calculates also if they are null.
var noNulls = [...]string{"remote_pcp_size", "remote_dcp_size", "remote_multi_nodes_meta_mapping"}

// CheckEndpoint checks the attributes that launch settings need: kvPort, tpSize, dpSize.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return ascendengine.CheckEndpoint(e) }
