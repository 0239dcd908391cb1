// SPDX-License-Identifier: Apache-2.0

// Package moriio is the connector "moriio": vLLM's MoRIIOConnector for AMD's ROCm, in which P writes its KV into D's
// blocks, or D reads it from P's.
//
// All engines of a model work in the same mode. In WRITE, the engines' default, both legs run at once: D tells P which
// blocks it has reserved, and P writes. In READ, P runs first, and its response names its blocks. In both modes
// transfer_id matches the legs at P, each engine must learn its peer's address, and P transfers only if it stopped
// because of the length.
//
// Each leg names the peer's address twice. One place is the X-Request-Id, which is the same for both legs (here in two
// lines):
//
//	___prefill_addr_host:10.0.0.5,handshake:6301,notify:61005
//	___decode_addr_host:10.0.0.6,handshake:6301,notify:61005_<32 hex digits>
//
// Every engine reads it, and prefers it. The other place is the members remote_host, remote_handshake_port and
// remote_notify_port in the parameters. P of /v1/responses works only with these, since its engine id has a suffix that
// the id's pattern does not allow.
//
// In older releases a decode engine treats every request as remote. A request without parameters waits for ever (WRITE
// before vLLM 0.32), or gets a response from memory that nobody wrote (READ before 0.33). So such an engine cannot
// serve alone.
//
// Facts: vLLM at 017e9f4 (2026-08-17, between 0.27.1 and 0.28), 0.32.0 and 0.33.0,
// vllm/distributed/kv_transfer/kv_connector/v1/moriio (moriio_common.py: MoRIIOConnectorMetadata.add_new_req,
// get_peer_zmq_from_request_id, parse_moriio_zmq_address; moriio_connector.py: MoRIIOConnectorScheduler), its toy
// proxy, and llm-d/llm-d-router (pkg/sidecar/proxy/connector_nixlv2.go). Not run: it needs ROCm.
package moriio

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
)

// Name is the name the connector is registered under.
const Name = "moriio"

// Defaults of the settings, which are the engines'.
const (
	DefaultHandshakePort = 6301
	DefaultNotifyPort    = 61005
	DefaultDeferTimeout  = 60 * time.Second
)

// The two modes.
const (
	ModeWrite = "write"
	ModeRead  = "read"
)

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "MoRIIOConnector")
}

// Options are the connector's settings. Ports and sizes are defaults for endpoints without the attribute of the same
// name.
type Options struct {
	Mode          string `json:"mode"`          // write (default) or read; the engines' read_mode
	HandshakePort int    `json:"handshakePort"` // default 6301
	NotifyPort    int    `json:"notifyPort"`    // of rank 0; default 61005
	// 0: the legs leave it out, and each engine takes its own size
	TPSize int `json:"tpSize"`
	DPSize int `json:"dpSize"` // default 1; of all pods of an engine
	// the ranks behind one URL, for an engine of several pods; default dpSize
	DPSizeLocal int `json:"dpSizeLocal"`
	// the engines' release, "0.33.0". A decode engine serves requests alone only if it is told: from 0.32 on in mode
	// write, from 0.33 on in mode read
	EngineVersion string `json:"engineVersion"`
	// how long P keeps unread blocks: the engines' defer_timeout; default 60s
	DeferTimeout *config.Duration `json:"deferTimeout"`
}

// Connector is the connector "moriio".
type Connector struct {
	read          bool
	alone         bool // the decode engines serve requests without parameters
	ports         ports
	tp, dp, local int
	deferred      time.Duration
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	c := &Connector{ports: ports{DefaultHandshakePort, DefaultNotifyPort}, dp: 1, deferred: DefaultDeferTimeout}
	var faults []error
	fault := func(path, problem, remedy string) {
		faults = append(faults, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	switch o.Mode {
	case "", ModeWrite:
	case ModeRead:
		c.read = true
	default:
		fault("mode", "is not a known value", "write, or read where the engines have read_mode")
	}
	number := func(path string, value, high int, into *int) {
		if value < 0 || value > high {
			fault(path, "is out of range", "1 to "+strconv.Itoa(high))
		} else if value > 0 {
			*into = value
		}
	}
	number("handshakePort", o.HandshakePort, 65535, &c.ports.handshake)
	number("notifyPort", o.NotifyPort, 65535, &c.ports.notify)
	number("tpSize", o.TPSize, maxSize, &c.tp)
	number("dpSize", o.DPSize, maxSize, &c.dp)
	number("dpSizeLocal", o.DPSizeLocal, maxSize, &c.local)
	if d := o.DeferTimeout; d != nil {
		if c.deferred = time.Duration(*d); c.deferred <= 0 {
			fault("deferTimeout", "is not above 0", "the engines' defer_timeout, 60s unless they set another")
		}
	}
	v, err := config.ParseEngineVersion(o.EngineVersion)
	if err != nil {
		fault("engineVersion", "is not a version", "the engines' release, like 0.33.0")
	}
	c.alone = v != (config.EngineVersion{}) && (!v.Before(0, 33) || !c.read && !v.Before(0, 32))
	if err := errors.Join(faults...); err != nil {
		return nil, err
	}
	return c, nil
}

// Traits declares the protocol. In write mode both legs run at once, or one after the other as in llm-d: P's writer
// waits for D's blocks. A transfer is single use. After defer_timeout P frees blocks that nobody has taken. A decode
// engine of a release that is old, or not told, cannot serve a request without P (moriio_connector.py:
// get_num_new_matched_tokens). If P fails, D waits for ever; even if its client leaves, D keeps its blocks until the
// transfer ends.
//
// The rules: one tensor-parallel size divides the other (moriio_connector.py of vLLM 0.32.0: get_moriio_remote_tp_rank,
// get_moriio_expected_ack_count). Models without MLA need the same size, unless each engine has as many ranks as KV
// heads; no attribute says that. Both engines work in the connector's mode: two engines of the other mode would wait
// for notices that nobody sends.
func (c *Connector) Traits() connector.Traits {
	own := c.mode()
	t := connector.Traits{
		Name:        Name,
		Order:       connector.Together,
		OtherOrders: []connector.Order{connector.PrefillThenDecode},
		Members:     []string{connector.ParamsMember},
		// The zero Connector has a lease, too.
		Handoff:      connector.Handoff{Member: connector.ParamsMember, Lease: cmp.Or(c.deferred, DefaultDeferTimeout)},
		Ending:       connector.Ending{EndsByLength: true, Orphans: true, PrefillFinishes: true},
		OwnRequestID: true,
		Serving:      connector.Serving{PairOnly: !c.alone, ReusedInUsage: true},

		PairRules: []attr.PairRule{attr.Multiple(attr.TPSize),
			{Attribute: attrMode, Compatible: func(p, d string) bool { return p == own && d == own }}},
	}
	if c.read {
		t.Order, t.OtherOrders = connector.PrefillThenDecode, nil
	}
	return t
}

// Prefill asks P for one token and an end by length, and tells P where D is.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	pair, err := c.pair(s)
	if err != nil {
		return err
	}
	b := newParams(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,`+
		`"remote_block_ids":null,"transfer_id":"`, s)
	b.peer(&pair.d)
	leg.Params(b.end())
	leg.SetRequestID(pair.requestID(s))
	leg.SetHeader(rankHeader, strconv.Itoa(pair.p.rank))
	return nil
}

// Decode tells D where P is. In read mode it also gives D the blocks from P's response. If the response has none, the
// error is [connector.ErrNoTransfer].
func (c *Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	pair, err := c.pair(s)
	if err != nil {
		return err
	}
	var a readBlocks
	if c.read || p != nil { // read mode, or write mode with P first
		if a, err = c.handoff(s, &pair.p, p); err != nil {
			return err
		}
	}
	b := newParams(`{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"`, s)
	if c.read {
		b.raw("remote_engine_id", a.engine)
		b.raw("remote_block_ids", a.blocks)
		if a.rank >= 0 {
			pair.prefillRank(a.rank)
		}
	} else {
		b.text(`,"remote_engine_id":null,"remote_block_ids":null`)
	}
	pod := pair.p.pod()
	b.peer(&pod)
	b.number("remote_dp_rank", pair.p.rank)
	// Without the override some releases compute P's rank from the request id's hash. With the override, and unless the
	// rank that got this leg is called the leader, D tells P about its blocks only if its rank has P's number; P would
	// wait for ever. The leg goes to one rank, so this rank is the leader.
	b.text(`,"remote_dp_rank_override":true,"is_request_leader":true`)
	leg.Params(b.end())
	leg.SetRequestID(pair.requestID(s))
	leg.SetHeader(rankHeader, strconv.Itoa(pair.d.rank))
	return nil
}

// rankHeader names the data-parallel rank that serves a request (docs/protocols/vllm.md §3). On P's leg it is P's rank,
// which D also learns. On D's leg it is the same rank if both engines have as many ranks, as in the toy proxy and in
// llm-d: in some engines only the rank with P's number learns P's blocks. Otherwise it is one of D's ranks. It counts
// the ranks behind the URL, those of one pod. /v1/responses ignores the header.
const rankHeader = "X-data-parallel-rank"

// CheckPrefill requires that P stopped because of the length. Otherwise P transfers nothing, its response has no
// kv_transfer_params, and D waits for ever.
func (c *Connector) CheckPrefill(s *connector.Session, p *connector.PrefillResult) error {
	if c.read {
		return nil // Decode reads the response
	}
	pair, err := c.pair(s)
	if err != nil {
		return err
	}
	_, err = c.handoff(s, &pair.p, p)
	return err
}

// readBlocks is the part of P's response that D needs in read mode.
type readBlocks struct {
	engine, blocks []byte
	rank           int // -1 if it has none
}

// handoff checks P's response. In both modes it must be there and be this session's. In read mode it must also have the
// members with which D reads.
func (c *Connector) handoff(s *connector.Session, e *engine, p *connector.PrefillResult) (readBlocks, error) {
	a := readBlocks{rank: -1}
	_, err := handoff.Member(p, connector.ParamsMember, func(raw json.RawMessage) error {
		o := handoff.Read(raw, "remote_block_ids")
		o.True("do_remote_prefill")
		o.NotTrue("do_remote_decode")
		if id := o.Text("transfer_id"); !isTransferID(id, s) {
			o.Fault("transfer_id", "is not this session's")
		}
		if c.read {
			a.engine = o.Text("remote_engine_id")
			o.SomeBlocks("remote_block_ids", 1, 2) // flat, and since vLLM 0.32.0 one list for each cache group
			a.blocks, _ = o.Get("remote_block_ids")
			o.OptionalInt("remote_dp_rank", 0, int64(e.dp)-1)
			if raw, ok := o.Get("remote_dp_rank"); ok {
				a.rank = digits(raw) % e.local // P counts the ranks of all its pods
			}
		}
		return o.Close()
	})
	return a, err
}

// Rewrite replaces the id with the engines' addresses in responses by the client's id.
func (c *Connector) Rewrite(s *connector.Session, _ func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	pair, err := c.pair(s)
	if err != nil {
		return nil // no leg was sent
	}
	return handoff.HideID(s, pair.requestID(s))
}
