// SPDX-License-Identifier: Apache-2.0

// Package nixlpush is the connector "nixl-push": vLLM's NixlPushConnector, in which P writes its KV blocks into D's
// memory.
//
// D allocates blocks, tells P where they are, and waits. P writes when its prefill has ended. P finds D's registration
// by the request id without its random suffix, so both legs carry the same X-Request-Id, which is made for the attempt.
// With dispatch together the flow sends both legs at once; P has not answered yet, so D learns from P's endpoint
// attributes where P is. With dispatch serial P runs first, and D gets P's handoff byte for byte, as with the connector
// nixl.
//
// If P never writes, D waits until its client leaves, and keeps the blocks even then (docs/protocols/nixl-push.md,
// recordings 04, 06, 09). So when a prefill fails or transfers nothing, the flow must cancel decode at once, and it
// counts such orphans.
//
// Facts: vLLM 0.32.0, recorded exchanges, and vllm/distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py and
// push_worker.py.
package nixlpush

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/kvparams"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/jsonedit"
)

// Name is the name the connector is registered under.
const Name = "nixl-push"

// DefaultLease is how long vLLM's P keeps blocks that wait for D's registration (kv_lease_duration).
const DefaultLease = 30 * time.Second

// The values of [Options.Dispatch].
const (
	DispatchTogether = "together" // both legs at once; P's endpoints need the attributes engineID and sideChannelPort
	DispatchSerial   = "serial"   // P, then D with P's handoff
)

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "NixlPushConnector")
}

// Options are the connector's settings.
type Options struct {
	Dispatch      string           `json:"dispatch"`      // together (default) or serial
	LeaseDuration *config.Duration `json:"leaseDuration"` // P's kv_lease_duration; default 30s
}

// Connector is the connector "nixl-push". The zero value is ready and sends both legs together.
type Connector struct {
	serial bool
	lease  time.Duration
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	c := &Connector{lease: DefaultLease}
	if o == nil {
		return c, nil
	}
	switch o.Dispatch {
	case "", DispatchTogether:
	case DispatchSerial:
		c.serial = true
	default:
		return nil, &config.FieldError{Path: "dispatch", Problem: "is not a known value", Remedy: "together or serial"}
	}
	if o.LeaseDuration != nil {
		if *o.LeaseDuration <= 0 {
			return nil, &config.FieldError{Path: "leaseDuration", Problem: "is not above 0",
				Remedy: "the engines' kv_lease_duration, 30s unless they set another"}
		}
		c.lease = time.Duration(*o.LeaseDuration)
	}
	return c, nil
}

// Traits declares the protocol. P writes once, to one reader. The engines accept the legs in either order. But without
// the attributes only P's response says where P is, so dispatch serial allows no other order. If P never writes, D
// waits until its client leaves, and keeps the blocks even then: such decode legs are orphans.
//
// The rules are those of nixl. The handshake is the same, but P begins it (nixl/base_worker.py:
// _validate_remote_agent_handshake; vLLM 0.32.0). P may have pipeline stages; a D with pipeline stages does not start.
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:        Name,
		Order:       connector.Together,
		OtherOrders: []connector.Order{connector.PrefillThenDecode},
		Members:     []string{connector.ParamsMember},
		// The lease is how long P keeps blocks for a D that has not registered.
		Handoff:      connector.Handoff{Member: connector.ParamsMember, Lease: cmp.Or(c.lease, DefaultLease)},
		OwnRequestID: true,
		Ending:       connector.Ending{Orphans: true, PrefillFinishes: true},
		Serving:      connector.Serving{ReusedInUsage: true},
		PairRules:    []attr.PairRule{attr.Multiple(attrTPSize), attr.Same(attr.KVCacheDtype)},
	}
	if c.serial {
		t.Order, t.OtherOrders = connector.PrefillThenDecode, nil
		t.Serving = kvparams.Usage // only here D gets P's handoff
		return t
	}
	t.Attributes = []attr.Required{
		{Name: attrEngineID, Role: discovery.RolePrefill, Remedy: remedies[attrEngineID]},
		{Name: attrPort, Role: discovery.RolePrefill, Remedy: remedies[attrPort]},
	}
	return t
}

// Prefill asks P for one token, under the attempt's id. If several ranks are behind P's URL, the leg names the
// attempt's rank.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	leg.SetRequestID(s.ID)
	leg.Params(kvparams.Ask)
	if c.serial {
		return nil // P's response names the rank that P chose
	}
	ranks, err := attr.RanksOf(s.Prefill)
	if err != nil || ranks.Local == 1 {
		return err
	}
	if s.API == connector.APIResponses {
		// This API ignores the header (docs/protocols/vllm.md §2). P would compute on a rank that D does not ask, and D
		// would wait for ever.
		return &connector.UnsupportedError{Member: "X-data-parallel-rank"}
	}
	leg.SetHeader("X-Data-Parallel-Rank", strconv.Itoa(s.PrefillRank))
	return nil
}

// Decode gives D P's handoff if P has answered. Otherwise it takes from P's attributes which engine D waits for.
func (c *Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	leg.SetRequestID(s.ID)
	if p == nil && !c.serial {
		params, err := static(s)
		if err != nil {
			return err
		}
		leg.Params(params)
		return nil
	}
	raw, err := ownHandoff(s, p, "")
	if err != nil {
		return err
	}
	leg.Params(kvparams.ForDecode(raw))
	return nil
}

// CheckPrefill finds in P's response that P will write nothing, or not to this D: P aborted, or is another engine than
// D was told, or did not get the request id that D was told.
func (c *Connector) CheckPrefill(s *connector.Session, p *connector.PrefillResult) error {
	if c.serial {
		return nil // Decode sees the same response before D does
	}
	at, err := coordinatesOf(s)
	if err != nil {
		return err
	}
	_, err = ownHandoff(s, p, at.engineID)
	return err
}

// ownHandoff reads P's response and refuses a handoff for which D would wait in vain: one of another protocol, one of
// another engine than engineID (if D was told one; "" if not), or one of a request without the attempt's id. P and D
// put a prefix and a suffix of their own around X-Request-Id.
func ownHandoff(s *connector.Session, p *connector.PrefillResult, engineID string) (json.RawMessage, error) {
	return handoff.Member(p, connector.ParamsMember, func(raw json.RawMessage) error {
		o := handoff.Read(raw, kvparams.Blocks)
		kvparams.CheckNIXL(o, kvparams.RemotePrefill)
		if mode, _ := o.Get("transfer_mode"); mode != nil && string(mode) != `"push"` {
			o.Fault("transfer_mode", "is not push: the prefill engine runs another connector")
		}
		if !bytes.Contains(o.Text("remote_request_id"), []byte(s.ID)) {
			o.Fault("remote_request_id", "does not hold the attempt's id: the X-Request-Id did not reach the prefill "+
				"engine")
		}
		// D gets this handoff. It reads tp_size without a default, and dies if it is missing (push_scheduler.py).
		if engineID == "" {
			o.Int("tp_size", 1, maxRanks)
		} else if id, err := jsonedit.Unquote(o.Text("remote_engine_id")); err != nil || id != engineID {
			o.Fault("remote_engine_id", "is not the endpoint's attribute engineID, which decode was told")
		}
		return o.Close()
	})
}
