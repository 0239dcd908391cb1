// SPDX-License-Identifier: Apache-2.0

// Package ascendlayerwise is the connector "ascend-layerwise": vllm-ascend's MooncakeLayerwiseConnector, in which P
// pushes KV to D layer by layer.
//
// The flow asks D first and gives it the URL of a callback server that this package runs. When D has blocks for the
// prompt, it POSTs their ids and its own address to /v1/metaserver. The prefill leg carries that object unchanged as
// kv_transfer_params, and P pushes the KV straight into D's blocks. The request id connects the callback with the
// session (D sends its engine's id without the random suffix) and P's KV with D's request. So both legs carry the same
// X-Request-Id, which is made for the attempt.
//
// D's HTTP client has no timeout. It occupies one of D's 32 threads until the callback is answered, tries 3 times if
// the connection fails, and ignores the status. So this package answers a callback as soon as P has answered, and not
// only when D's text is complete. When P fails, the flow must cancel D, since the callback's status does not tell D.
//
// Facts: vllm-ascend at 182b75e (2026-08-22, between 0.22 and 0.23), vllm_ascend/distributed/kv_transfer/kv_p2p/
// mooncake_layerwise_connector.py (MooncakeLayerwiseConnectorScheduler, get_external_request_id) and examples/
// disaggregated_prefill_v1/load_balance_proxy_layerwise_server_example.py. Not run: it needs Ascend hardware.
package ascendlayerwise

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/ascendengine"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under.
const Name = "ascend-layerwise"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "MooncakeLayerwiseConnector")
}

// Connector is the connector "ascend-layerwise". Make it with [New].
type Connector struct {
	listen string
	url    string // the callback server's URL as D reaches it; "" means the listener's own address
	kvPort int

	mu     sync.RWMutex
	starts int
	server *server         // while starts is above 0
	params json.RawMessage // the decode leg's parameters, nil until the URL is known
}

// New checks the settings; nil means the defaults. It opens nothing: Start does.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	c := &Connector{}
	if err := o.read(c); err != nil {
		return nil, err
	}
	if c.url != "" {
		c.params = decodeParams(c.url)
	}
	return c, nil
}

// Traits declares the protocol. P needs the blocks that D has reserved, and D calls back once for each prompt and
// choice. If P fails, D waits for KV for ever. Even if its client leaves, D keeps its blocks until the transfer ends
// (vllm-project/vllm#46283).
//
// The rules: P's tensor-parallel size is a multiple of D's (Design_Documents/disaggregated_prefill.md, Limitations),
// and P's block size a multiple of D's (vllm-ascend 0.23.0, mooncake_layerwise_connector.py: _align_remote_block_ids).
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:         Name,
		Order:        connector.DecodeThenPrefill,
		Members:      []string{connector.ParamsMember},
		OwnRequestID: true,
		Serving:      connector.Serving{ReusedInUsage: true},
		Ending: connector.Ending{EndsByLength: true, Orphans: true, PrefillFinishes: true,
			FailureStop: ascendengine.FailureStop},
		PairRules: []attr.PairRule{ascendengine.TPRule(), attr.DecodeMultiple(attr.BlockSize)},
	}
}

// Start listens for callbacks. Connectors that name one address share its listener; each Start needs a Close.
func (c *Connector) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		s, err := acquire(ctx, c.listen)
		if err != nil {
			return err
		}
		c.server = s
		if c.url == "" { // port 0: the listener chose a free port
			c.params = decodeParams("http://" + s.address())
		}
	}
	c.starts++
	return nil
}

// Close ends what Start began. The last Close of an address closes its listener, and callbacks that still wait get 503.
func (c *Connector) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starts == 0 {
		return nil
	}
	if c.starts--; c.starts > 0 {
		return nil
	}
	s := c.server
	c.server = nil
	servers.Release(s, s.end)
	return nil
}

// HealthCheck fails while the callback listener has failed. The connector binds its address again by itself.
func (c *Connector) HealthCheck(context.Context) error {
	if s := c.running(); s != nil {
		return s.failure()
	}
	return nil // not started yet: the first request starts it
}

func (c *Connector) running() *server {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.server
}

var errNotStarted = errors.New("ascendlayerwise: the callback server was not started")

func decodeParams(url string) json.RawMessage {
	return append(
		append([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":`),
			connector.Quote(url+callbackPath)...), '}',
	)
}

// Decode sends D the URL of the callback server.
func (c *Connector) Decode(_ context.Context, s *connector.Session, _ *connector.PrefillResult,
	leg *connector.Leg) error {
	c.mu.RLock()
	params := c.params
	c.mu.RUnlock()
	if params == nil {
		return errNotStarted
	}
	leg.Params(params)
	leg.SetRequestID(s.ID)
	return nil
}

// Expect waits for D's callback. If done gets an error and P has not answered before, it answers the callback with 502;
// see [Connector.CheckPrefill].
func (c *Connector) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error),
	done func(error)) {
	ids := engineIDs(s.API, s.ID)
	if len(ids) == 0 {
		return nil, func(error) {}
	}
	srv := c.running()
	if srv == nil {
		return func(context.Context) (connector.Event, error) { return connector.Event{}, errNotStarted },
			func(error) {}
	}
	w := srv.expect(ids)
	return func(ctx context.Context) (connector.Event, error) { return w.wait(ctx, srv) },
		func(err error) { srv.settle(w, err) }
}

// Prefill asks P for one token, and to push its KV to the blocks that the callback names.
func (*Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	raw := s.Event.Body
	if len(raw) == 0 {
		return handoff.NoTransfer("prefill was described before decode asked for it")
	}
	if _, err := checkCallback(raw); err != nil {
		return handoff.NoTransfer("the callback: %v", err)
	}
	leg.Params(handoff.WithoutNulls(raw, optional[:]...))
	leg.SetRequestID(s.ID)
	return nil
}

// CheckPrefill never finds a fault: P pushes however it ends. It answers D's callback, since P has now answered. The
// flow calls done only when D's whole text is complete, which would be too late: D has only 32 threads for callbacks.
func (c *Connector) CheckPrefill(s *connector.Session, _ *connector.PrefillResult) error {
	ids := engineIDs(s.API, s.ID)
	if srv := c.running(); srv != nil && len(ids) > 0 {
		if w := srv.find(ids[0]); w != nil {
			srv.settle(w, nil)
		}
	}
	return nil
}

// CheckRequest refuses a response with tools that the engine runs itself: each of its turns would be another request
// with another callback.
func (*Connector) CheckRequest(r *connector.ClientRequest) error {
	if r.API == connector.APIResponses && hasBuiltinTool(r) {
		return &connector.UnsupportedError{Member: "tools"}
	}
	return nil
}

func hasBuiltinTool(r *connector.ClientRequest) bool {
	raw, ok := r.Field("tools")
	if !ok {
		return false
	}
	var tools []struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(raw, &tools) != nil {
		return false // the engine reports what is wrong with it
	}
	for _, t := range tools {
		if t.Type != "" && t.Type != "function" {
			return true
		}
	}
	return false
}

// CheckEndpoint checks the attributes that launch settings need: kvPort, tpSize, dpSize.
func (*Connector) CheckEndpoint(e discovery.Endpoint) error { return ascendengine.CheckEndpoint(e) }
