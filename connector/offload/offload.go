// SPDX-License-Identifier: Apache-2.0

// Package offload is the connector "offload-p2p": vLLM's OffloadingConnector with TieringOffloadingSpec and a secondary
// tier of type p2p, with which D fetches P's blocks from P's host memory.
//
// P computes the prompt, copies its whole blocks to host memory and keeps them under an id. D gets that id and the
// address of P's control socket, and fetches the blocks before it schedules the request. The id is made for the
// attempt. P's response says nothing about the transfer, so the socket's address comes from the settings and the
// engine's attributes: each data-parallel rank has one, at the base port plus the rank's number among those of all pods
// of the engine. The legs may come in any order.
//
// If anything goes wrong, D computes the prompt itself, after 30 s at most, and answers 200. Reasons are a wrong port,
// another hash seed, and other names of the keys, which changed in July 2026 (prefill, decode and p2p became
// remote_decoder, remote_prefiller and remote_kv_source: llm-d/llm-d-router#2140). Only the engines' metrics show it.
//
// Facts: vllm/v1/kv_offload/tiering/p2p at 017e9f44 (between 0.27.1 and 0.28) and 0255eeaa,
// tests/v1/kv_offload/tiering/p2p/p2p_connector_proxy.py, docs/features/kv_offloading_usage.md at 0078e9d2. Read, not
// run: the tier needs CUDA, ROCm or XPU.
package offload

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "offload-p2p"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "OffloadingConnector")
}

// Connector is the connector "offload-p2p".
type Connector struct {
	opts   Options
	port   int
	serial bool
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	return &Connector{opts: *o, port: o.BasePort(), serial: o.Dispatch == dispatchSerial}, nil
}

// Traits declares the protocol. The legs may come in any order. D fetches P's blocks once, so several choices for one
// prompt cannot share them. There are no orphans: a decode without its prefill waits 30 s at most and blocks nothing
// meanwhile, and blocks that nobody fetches leave P's host memory after 60 s (unbound_store_timeout_s).
//
// The rules: if the fingerprints of two peers differ, they refuse each other, and D computes the prompt. A fingerprint
// always has the tokens in a block and the KV type. It has the parallel sizes only if the layout depends on them, and
// no attribute says that (vllm/v1/kv_offload of 0.32.0: file_mapper.py, tiering/p2p/session/session.py, and
// kv_connector/v1/offloading/config.py).
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:        Name,
		Order:       connector.Together,
		OtherOrders: []connector.Order{connector.PrefillThenDecode},
		Members:     []string{connector.ParamsMember},
		Serving:     connector.Serving{ReusedInUsage: true},
		PairRules:   []attr.PairRule{attr.Same(attr.BlockSize), attr.Same(attr.KVCacheDtype)},
	}
	if c.serial {
		t.Order, t.OtherOrders[0] = t.OtherOrders[0], t.Order
	}
	return t
}

// Prefill asks P for one token, and to keep the prompt's blocks under the attempt's id.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	at, err := c.addressOf(s)
	if err != nil {
		return err
	}
	leg.Params(json.RawMessage(`{"remote_decoder":{"kv_request_id":"` + s.UUID() + `"}}`))
	if at.ranks.Local > 1 {
		leg.SetHeader("X-data-parallel-rank", strconv.Itoa(s.PrefillRank))
	}
	return nil
}

// Decode tells D the id, and the address of the rank of P that computes the prompt.
func (c *Connector) Decode(_ context.Context, s *connector.Session, _ *connector.PrefillResult,
	leg *connector.Leg) error {
	at, err := c.addressOf(s)
	if err != nil {
		return err
	}
	leg.Params(json.RawMessage(`{"remote_prefiller":{"kv_request_id":"` + s.UUID() + `","remote_host":` +
		string(connector.Quote(at.host)) +
		`,"remote_port":` + strconv.Itoa(at.port) + `}}`))
	return nil
}

// The attributes of a prefill engine.
const (
	attrHost = "p2pHost" // VLLM_P2P_SIDE_CHANNEL_HOST; default: the host of the rank's pod
	attrPort = "p2pPort" // VLLM_P2P_SIDE_CHANNEL_PORT, which is rank 0's
)

// address is where a control socket listens.
type address struct {
	host  string
	port  int // of the session's rank
	ranks attr.Ranks
}

func (c *Connector) addressOf(s *connector.Session) (address, error) {
	at, errs := c.read(s.Prefill)
	if len(errs) > 0 {
		return at, errs[0]
	}
	if at.ranks.Local > 1 && s.API == connector.APIResponses {
		// The leg cannot name the rank, so D would ask a rank that never gets the prompt (docs/protocols/vllm.md §2).
		return at, &connector.UnsupportedError{Member: "X-data-parallel-rank"}
	}
	at.port += at.ranks.Start + s.PrefillRank
	if strings.TrimSpace(s.Prefill.Attribute(attrHost)) != "" {
		return at, nil
	}
	host, err := at.ranks.Host(s.Prefill, s.PrefillRank)
	at.host = bracketed(host)
	return at, err
}

// read reads a prefill engine's attributes. The port is the base port.
func (c *Connector) read(e discovery.Endpoint) (at address, errs []error) {
	note := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	var err error
	at.port, err = attr.Port(e, attrPort, c.port)
	note(err)
	at.ranks, err = attr.RanksOf(e)
	note(err)
	if at.port+at.ranks.Start+at.ranks.Local-1 > 65535 {
		note(
			&attr.Error{Endpoint: e.ID, Attribute: attrPort,
				Problem: "leaves no ports for the other data-parallel ranks"},
		)
	}
	at.host = HostOf(e)
	if err == nil {
		_, err = at.ranks.Host(e, 0)
		note(err)
	}
	if strings.ContainsAny(at.host, " /@") || at.host == "" {
		note(&attr.Error{Endpoint: e.ID, Attribute: attrHost, Problem: "is not a host's name or address"})
	}
	return at, errs
}

// HostOf is an engine's host in the form that engines put into addresses: they join host and port by a colon, so an
// IPv6 address needs brackets.
func HostOf(e discovery.Endpoint) string {
	host := strings.TrimSpace(e.Attribute(attrHost))
	if host == "" {
		host = e.Host()
	}
	return bracketed(host)
}

func bracketed(host string) string {
	if ip, err := netip.ParseAddr(host); err == nil && ip.Is6() {
		return "[" + host + "]"
	}
	return host
}

var remedies = map[string]string{
	attrHost:         "the engine's VLLM_P2P_SIDE_CHANNEL_HOST: a name or an address, without scheme and port",
	attrPort:         "the engine's VLLM_P2P_SIDE_CHANNEL_PORT, which is rank 0's",
	attr.DPSize:      "the engine's number of data-parallel ranks",
	attr.DPSizeLocal: "how many of them are behind this URL",
	attr.DPStartRank: "the number of the first rank behind this URL",
	attr.Pods:        "the hosts of all pods of the engine, in the order of their ranks: 10.0.0.5,10.0.0.7",
}

// CheckEndpoint reports what is malformed in a prefill engine's entry.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	if !e.Role.Has(discovery.RolePrefill) {
		return nil
	}
	_, errs := c.read(e)
	return attr.Faults(errors.Join(errs...), remedies)
}
