// SPDX-License-Identifier: Apache-2.0

// Package ascendlayerwise is the connector "ascend-layerwise": vllm-ascend's MooncakeLayerwiseConnector, in which P pushes KV to D layer
// by layer.
//
// D is asked first, with the URL of a callback server that this package runs. Once D has blocks for the prompt it POSTs their ids and
// its own address to /v1/metaserver; that object, as it stands, is what the prefill leg carries as kv_transfer_params, and P pushes
// the KV straight into D's blocks. Three things match by the request id: the callback (D sends its engine's id without the random suffix),
// and P's KV at D. So both legs carry one X-Request-Id, made per attempt.
//
// D's HTTP client has no timeout, keeps one of its 32 threads until the answer, tries 3 times if the connection fails, and ignores the
// status. So a callback is answered as soon as P has answered, and not only when D's text is through; and when P fails, D must be
// cancelled, since no answer tells it.
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

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/config"
	"github.com/pdkit/pdkit/connector/internal/ascendengine"
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
	url    string // of the callback server as D reaches it; "" is the listener's own address
	kvPort int

	mu     sync.RWMutex
	starts int
	server *server         // while starts is above 0
	params json.RawMessage // the decode leg's, nil until the URL is known
}

// New checks the settings. nil means defaults. Nothing is opened: that is Start's part.
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

// Traits declares the protocol. P needs the blocks that D has set aside, and there is one callback per prompt and
// answer. A D whose P failed waits for KV for ever, and keeps its blocks until the transfer ends even if its client
// leaves (vllm-project/vllm#46283).
//
// The rules: P's tensor-parallel size is a multiple of D's (Design_Documents/disaggregated_prefill.md, Limitations),
// and D's block size one of P's (vllm-ascend 0.23.0, mooncake_layerwise_connector.py: _align_remote_block_ids).
func (*Connector) Traits() connector.Traits {
	return connector.Traits{
		Name:         Name,
		Order:        connector.DecodeThenPrefill,
		Members:      []string{connector.ParamsMember},
		EndsByLength: true,
		OwnRequestID: true,
		Orphans:      true,
		PairRules:    []connector.PairRule{ascendengine.TPRule(), attr.DecodeMultiple(attr.BlockSize)},
	}
}

// Name returns "ascend-layerwise".
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
		if c.url == "" { // the port was to be any free one
			c.params = decodeParams("http://" + s.address())
		}
	}
	c.starts++
	return nil
}

// Close ends what Start began. The last Close of an address ends its listener; callbacks that still wait are answered 503.
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

// HealthCheck fails if the callback server has stopped by itself.
func (c *Connector) HealthCheck(context.Context) error {
	if s := c.running(); s != nil {
		return s.failure()
	}
	return nil // not started yet: the first request does that
}

func (c *Connector) running() *server {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.server
}

var errNotStarted = errors.New("ascendlayerwise: the callback server was not started")

func decodeParams(url string) json.RawMessage {
	return append(append([]byte(`{"do_remote_decode":false,"do_remote_prefill":true,"metaserver":`), connector.Quote(url+callbackPath)...), '}')
}

// Decode sends D the URL of the callback server.
func (c *Connector) Decode(_ context.Context, s *connector.Session, _ *connector.PrefillResult, leg *connector.Leg) error {
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

// Expect waits for D's callback. done answers it with 502 if there is an error and P has not answered before; see [Connector.CheckPrefill].
func (c *Connector) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error), done func(error)) {
	ids := engineIDs(s.API, s.ID)
	if len(ids) == 0 {
		return nil, func(error) {}
	}
	srv := c.running()
	if srv == nil {
		return func(context.Context) (connector.Event, error) { return connector.Event{}, errNotStarted }, func(error) {}
	}
	w := srv.expect(ids)
	return func(ctx context.Context) (connector.Event, error) { return w.wait(ctx, srv) }, func(err error) { srv.settle(w, err) }
}

// Prefill asks P for one token, and to push its KV where the callback says.
func (*Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	raw := s.Event().Body
	if len(raw) == 0 {
		return connector.NoTransfer("prefill was described before decode asked for it")
	}
	if _, err := checkCallback(raw); err != nil {
		return connector.NoTransfer("the callback: %v", err)
	}
	leg.Normalize()
	leg.EndByLength()
	leg.Params(raw)
	leg.SetRequestID(s.ID)
	return nil
}

// CheckPrefill finds no fault: P pushes whatever way it ends. It answers D's callback, since P has answered; done, which the flow calls
// when D's whole text is through, would be too late for D, which has 32 threads for callbacks.
func (c *Connector) CheckPrefill(s *connector.Session, _ *connector.PrefillResult) error {
	ids := engineIDs(s.API, s.ID)
	if srv := c.running(); srv != nil && len(ids) > 0 {
		if w := srv.find(ids[0]); w != nil {
			srv.settle(w, nil)
		}
	}
	return nil
}

// CheckRequest knows that each turn of a response with tools that the engine runs itself would be a request, and a
// callback, of its own.
func (*Connector) CheckRequest(r *connector.Request) error {
	if r.API == connector.APIResponses && hasBuiltinTool(r) {
		return &connector.UnsupportedError{Member: "tools"}
	}
	return nil
}

func hasBuiltinTool(r *connector.Request) bool {
	raw, ok := r.Field("tools")
	if !ok {
		return false
	}
	var tools []struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(raw, &tools) != nil {
		return false // the engine will say what is wrong with it
	}
	for _, t := range tools {
		if t.Type != "" && t.Type != "function" {
			return true
		}
	}
	return false
}
