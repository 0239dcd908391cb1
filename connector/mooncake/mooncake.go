// SPDX-License-Identifier: Apache-2.0

// Package mooncake is the connector "mooncake": vLLM's MooncakeConnector, in which P writes its KV into D's blocks.
//
// Both legs carry the same transfer_id, which is made for the attempt. They go out together, and either may arrive
// first. D asks P for that id, and P writes when it has finished the prompt. P's response says nothing about the
// transfer. So the gateway itself must know three things:
//
//   - P's engine id, which is new at every start. The decode leg carries it, and the address of P's bootstrap server.
//     GET /query of that server returns the engine id of each data-parallel rank. The connector keeps the response for
//     Options.EngineTTL, and asks once however many requests wait for it. After a failed attempt it forgets the
//     response.
//   - P's rank. The prefill leg names it in the header X-data-parallel-rank, and the decode leg carries the engine id
//     of that rank.
//   - that P stopped because of the length. If P stops for another reason it offers nothing, and D waits for minutes.
//     So the prefill leg masks the end of sequence if the API allows it, and CheckPrefill checks P's response.
//
// The connector never sends a decode leg without remote_engine_id or remote_bootstrap_addr: D would wait, and die when
// its client leaves (docs/protocols/mooncake.md, recording 15). A decode whose prefill failed occupies a sender's task
// of P for VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, 480 s by default, and a few such tasks stop all transfers between the
// two engines (docs/protocols/mooncake.md, recording 17): see [Connector.Traits].
//
// Facts: recorded exchanges of vLLM 0.32.0, and
// vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py of 017e9f44 (0.28) and 00f4240e.
// README.md beside this file shows the sequence and the engines' settings.
package mooncake

import (
	"cmp"
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/querycache"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "mooncake"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "MooncakeConnector")
}

// Connector is the connector "mooncake". Its only state is the cached responses of bootstrap servers.
type Connector struct {
	opts  Options
	cache querycache.Cache[*listing]
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	c := &Connector{opts: *o}
	c.cache.TTL = o.ttl()
	return c, nil
}

// Traits declares the protocol. Neither leg needs the other's response. P may also run first; its blocks then wait for
// VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, which is the lease. A D that asks later waits as an orphan does. A transfer is
// single use: P forgets it after the first read. Two decodes of one prompt did work when D asked for both in one
// message. When it asks in two, the second waits as an orphan does (mooncake_connector.py, send_kv_to_decode).
//
// A decode leg whose prefill offers nothing is an orphan: it occupies one sender's task of P, and another one when it
// is given up, until P stops waiting. With num_workers 2 one such leg stopped every later pair of the two engines; with
// the default of 10 it did not. So P's leg has to finish once it is sent: then P has what its tasks wait for.
//
// The rules follow mooncake_connector.py of vLLM 0.32.0. One tensor-parallel size must divide the other, also with MLA
// (_get_tp_ratio, handshake_target_ranks). P matches its blocks with D's by count, so another block size is an error
// or, worse, gives D other tokens' KV (_build_transfer_params). So does another KV type
// (_validate_asymmetric_region_lengths). The pipeline-parallel sizes may differ.
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:        Name,
		Order:       connector.Together,
		OtherOrders: []connector.Order{connector.PrefillThenDecode},
		Members:     []string{connector.ParamsMember},
		Handoff:     connector.Handoff{Lease: cmp.Or(time.Duration(c.opts.AbortTimeout), DefaultAbortTimeout)},
		Serving:     connector.Serving{ReusedInUsage: true},
		// RefusalHolds is of the same place, and of send_kv_to_decode.
		Ending: connector.Ending{EndsByLength: true, Orphans: true, PrefillFinishes: true, RefusalHolds: true},
		PairRules: []attr.PairRule{attr.Multiple(attr.TPSize), attr.Same(attr.BlockSize),
			attr.Same(attr.KVCacheDtype)},
	}
	if c.opts.Dispatch == dispatchSerial {
		t.Order, t.OtherOrders[0] = t.OtherOrders[0], t.Order
	}
	if c.opts.BootstrapServerAddress != "" { // then the bootstrap server is not P's own
		t.Attributes = []attr.Required{
			{Name: "bootstrapURL", Role: discovery.RolePrefill, Remedy: "the server's address, like http://HOST:8998"},
		}
	}
	return t
}

// Prefill asks P for one token, for an end by length, and to keep the blocks for the engine that asks for the transfer
// id.
func (*Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	t, err := prepared(s)
	if err != nil {
		return err
	}
	const before, after = `{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"`, `"}`
	b := make([]byte, 0, len(before)+transferIDLen+len(after))
	b = append(b, before...)
	b = appendTransferID(b, s)
	leg.Params(append(b, after...))
	if t.ranks > 1 {
		leg.SetHeader("X-data-parallel-rank", strconv.Itoa(t.rank.number))
	}
	return nil
}

// Decode tells D where P's bootstrap server is, which engine has the KV, and under which id. In the order
// prefill-then-decode, P must have stopped because of the length.
func (*Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	t, err := prepared(s)
	if err != nil {
		return err
	}
	if p != nil {
		if err := endedByLength(s.API, p); err != nil {
			return err
		}
	}
	const before, engine, id, after = `{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":`,
		`,"remote_engine_id":`, `,"transfer_id":"`, `"}`
	addr := t.entry.Value.addr
	b := make([]byte, 0, len(before)+len(addr)+len(engine)+len(t.rank.engine)+len(id)+transferIDLen+len(after))
	b = append(append(b, before...), addr...)
	b = append(append(b, engine...), t.rank.engine...)
	b = appendTransferID(append(b, id...), s)
	leg.Params(append(b, after...))
	return nil
}

const transferIDLen = len("xfer-01234567-89ab-4def-8123-456789abcdef")

// appendTransferID writes the attempt's id in the format of vLLM's own proxy.
func appendTransferID(b []byte, s *connector.Session) []byte {
	return append(append(b, "xfer-"...), s.UUID()...)
}

// CheckPrefill checks P's response: P offers its KV only if it stopped because of the length
// (docs/protocols/mooncake.md, recording 08).
func (*Connector) CheckPrefill(s *connector.Session, p *connector.PrefillResult) error {
	return endedByLength(s.API, p)
}
