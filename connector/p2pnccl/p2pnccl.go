// SPDX-License-Identifier: Apache-2.0

// Package p2pnccl is the connector "p2pnccl": vLLM's legacy P2pNcclConnector, in which P writes the prompt's KV to D
// over NCCL, and both engines learn the other's address from the request id.
//
// Both legs carry the same X-Request-Id:
//
//	___prefill_addr_<P's ZeroMQ address>___decode_addr_<D's>_<32 hex digits>
//
// P parses D's address from it, D parses P's, and it names every tensor (<id>#<layer>). There are no
// kv_transfer_params. The addresses are not the HTTP ones. They are the engine's IP and kv_port (each rank adds its
// number): the endpoint attribute zmqAddress.
//
// P runs first. D waits for the tensors of every prompt that is longer than one token, so it cannot serve alone, and it
// must not get a request whose prefill failed. Since vLLM 0.14 engines add a random suffix to the id. Then nothing
// matches, unless both engines run with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1. vLLM removed the connector after 0.22.
//
// Facts: vllm/distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py and p2p_nccl_engine.py before their
// removal (vllm#44854, 2026-06-08), docs/design/p2p_nccl_connector.md of the same tree; #33947 and #34415 for the
// suffix. It needs CUDA; golden cases only.
package p2pnccl

import (
	"context"
	"encoding/json"
	"net"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "p2pnccl"

// Address is the endpoint attribute that holds an engine's ZeroMQ address, "10.0.1.2:21001" or "[fd00::2]:21001".
const Address = "zmqAddress"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "P2pNcclConnector")
}

// Connector is the connector "p2pnccl". The zero value is ready.
type Connector struct{ opts Options }

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	return &Connector{opts: *o}, nil
}

// Traits declares the protocol. P pushes into D's buffer, and D must not wait for a P that refuses the request, so P
// runs first. D waits for the KV of every request and gives it out once. A decode leg whose prefill failed waits for
// tensors that never come.
//
// The rules: rank n of one engine talks to rank n of the other, whose port is n higher, and expects there the same
// layers that it has itself (p2p_nccl_connector.py: start_load_kv, save_kv_layer).
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:         Name,
		OwnRequestID: true,
		Serving:      connector.Serving{PairOnly: true, ReusedInUsage: true},
		Ending:       connector.Ending{Orphans: true},
		PairRules:    []attr.PairRule{attr.Same(attr.TPSize), attr.Same(attr.PPSize)},
		Attributes:   []attr.Required{{Name: Address, Role: discovery.RoleBoth, Remedy: remedies[Address]}},
	}
}

// Prefill asks P for one token, with both addresses in the id.
func (*Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	id, err := requestID(s)
	if err != nil {
		return err
	}
	leg.SetRequestID(id)
	return nil
}

// Decode sends the client's own request under the same id. D samples the first token itself.
func (*Connector) Decode(_ context.Context, s *connector.Session, _ *connector.PrefillResult,
	leg *connector.Leg) error {
	id, err := requestID(s)
	if err != nil {
		return err
	}
	leg.SetRequestID(id)
	return nil
}

// Rewrite replaces the id with the engines' addresses in responses by the client's id.
func (*Connector) Rewrite(s *connector.Session, _ func() *connector.PrefillResult) func([]byte) ([]byte, error) {
	id, err := requestID(s)
	if err != nil {
		return nil // no leg was sent
	}
	return handoff.HideID(s, id)
}

// requestID is the id of both legs of a session, and of no other session.
func requestID(s *connector.Session) (string, error) {
	p, err := AddressOf(s.Prefill)
	if err != nil {
		return "", err
	}
	d, err := AddressOf(s.Decode)
	if err != nil {
		return "", err
	}
	return "___prefill_addr_" + p + "___decode_addr_" + d + "_" + s.ID, nil
}

// AddressOf reads an engine's ZeroMQ address. It must be one host and one port: both engines parse the address out of
// the id with a regular expression, and anything else would mislead or crash the other engine.
func AddressOf(e discovery.Endpoint) (string, error) {
	text, err := attr.Text(e, Address)
	if err != nil {
		return "", err
	}
	host, port, err := net.SplitHostPort(text)
	n, notNumber := strconv.Atoi(port)
	if err != nil || notNumber != nil || n < 1 || n > 65535 || host == "" || strings.Contains(host, "___") ||
		strings.ContainsFunc(host, notHost) {
		return "", &attr.Error{Endpoint: e.ID, Attribute: Address, Problem: "is not HOST:PORT"}
	}
	return net.JoinHostPort(host, port), nil
}

// notHost reports whether a character cannot be in a name or an address. Such a character must not reach a header.
func notHost(r rune) bool {
	return r != '.' && r != '-' && r != '_' && r != ':' && r != '%' && (r < '0' || r > '9') && (r < 'a' || r > 'z') &&
		(r < 'A' || r > 'Z')
}

// CheckEndpoint requires an address for the engines of both legs. An engine of the role both takes part in neither.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error {
	if e.Role != discovery.RolePrefill && e.Role != discovery.RoleDecode {
		return nil
	}
	_, err := AddressOf(e)
	return attr.Faults(err, remedies)
}

var remedies = map[string]string{Address: `write the engine's IP and kv_port: zmqAddress: "10.0.1.2:21001"`}
