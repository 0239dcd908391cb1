// SPDX-License-Identifier: Apache-2.0

// Package lmcachepd is the connector "lmcache-pd": vLLM's LMCacheConnectorV1 with enable_pd, in which P pushes the
// prompt's KV into D's memory and then notifies the gateway.
//
// The prefill leg names D's receiver (disagg_spec: host, one init port and one alloc port for each tensor-parallel
// rank) and an id of the session. When all chunks are written, each sending rank of P pushes one message over ZeroMQ to
// the gateway: a msgpack map {"type": "ProxyNotif", "req_id": ID}. Only then the flow asks D. D registers a chunk when
// it reserves memory for it, before the chunk's bytes have come, so a D that is asked too early answers 200 with the
// memory's old content. Nothing reports a push that failed, so the wait has a limit, [Options.NotifyTimeout].
//
// D gets the client's own body and finds the chunks by the prompt's tokens. With [Options.RetFirstToken] P's token is
// used as LMCache's own proxy uses it: D continues after it, and pdkit puts its text before D's.
//
// Facts: LMCache 0.3 to 0.5: examples/disagg_prefill/disagg_proxy_server.py at 00482afc,
// lmcache/v1/storage_backend/pd_backend.py at b532e04a and 07e07869, lmcache/integration/vllm/vllm_v1_adapter.py
// (DisaggSpec, skip_last_n_tokens). README.md beside this file has the engines' settings.
package lmcachepd

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/handoff"
	"github.com/pdkit/pdkit/connector/internal/lmcacheconf"
	"github.com/pdkit/pdkit/discovery"
)

// Name is the name the connector is registered under. A configuration may also use the engine's class name
// LMCacheConnectorV1 with enable_pd; package lmcache resolves it.
const Name = "lmcache-pd"

// Defaults of the settings.
const (
	DefaultListen  = "127.0.0.1:8500" // LMCache's own proxy has the same
	DefaultTimeout = 10 * time.Second
)

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		own, engine := lmcacheconf.Split(raw)
		o.Engine = engine
		if err := config.Decode(own, &o); err != nil {
			return nil, err
		}
		return New(&o)
	})
}

// Connector is the connector "lmcache-pd". The flow starts it before the first session and closes it after the last.
type Connector struct {
	options Options
	engine  lmcacheconf.Config
	listen  string
	timeout time.Duration

	mu        sync.Mutex
	listener  *listener // nil unless started
	receivers map[receiverKey]*receiver
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	engine, err := o.check()
	if err != nil {
		return nil, err
	}
	c := &Connector{options: *o, engine: engine, listen: DefaultListen, timeout: DefaultTimeout}
	if o.NotifyListen != "" {
		c.listen = o.NotifyListen
	}
	if o.NotifyTimeout != nil {
		c.timeout = time.Duration(*o.NotifyTimeout)
	}
	return c, nil
}

// EngineConfig are LMCache's own settings, as [Options] has them.
type EngineConfig = lmcacheconf.Config

// Settings returns the settings that the connector was made of, and LMCache's own among them.
func (c *Connector) Settings() (Options, EngineConfig) { return c.options, c.engine }

// Traits declares the protocol. The flow may ask D after the notices have come. D drops each chunk after reading it. If
// the first token is P's, P's response holds it.
//
// The rules: P's rank n sends to D's rank n, under keys that hold the KV type, and each rank sends a notice
// (pd_backend.py of LMCache 0.5.6: batched_submit_put_task; lmcache/utils.py: CacheEngineKey). By default the gateway
// waits for one notice for each rank of D, so P must have as many ranks. If the number of notices is set, other ranks
// send, as with MLA, and the sizes may differ.
//
// A request without disagg_spec ends a sender with LMCache's default backend, which reads receiver_init_port of what is
// not there (pd_backend_async.py of 0.5.6: batched_submit_put_task; measured with vLLM 0.32.0). The synchronous backend
// (pd_backend.py) sends nothing for it and goes on, and only there an engine can be sender and receiver at once.
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:      Name,
		Members:   []string{connector.ParamsMember},
		PairRules: []attr.PairRule{attr.Same(attr.KVCacheDtype)},

		Serving: connector.Serving{PrefillPairOnly: c.engine.Text("pd_backend_mode") != "sync",
			ReusedInUsage: true},
	}
	if c.options.Notifications == 0 {
		t.PairRules = append(t.PairRules, attr.Same(attr.TPSize))
	}
	if c.options.RetFirstToken {
		t.Handoff.Member = connector.ParamsMember
		t.APIs = []connector.API{connector.APIChat, connector.APICompletions}
	}
	if len(c.options.initPorts) == 0 {
		t.Attributes = append(
			t.Attributes, attr.Required{Name: "receiverInitPorts", Role: discovery.RoleDecode, Remedy: remedy},
		)
	}
	if len(c.options.allocPorts) == 0 {
		t.Attributes = append(
			t.Attributes, attr.Required{Name: "receiverAllocPorts", Role: discovery.RoleDecode, Remedy: remedy},
		)
	}
	return t
}

// Start listens for notices, together with all connectors of this process that have the same address. The error says
// that this process cannot listen there. A second Start does nothing.
func (c *Connector) Start(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.listener != nil {
		return nil
	}
	l, err := acquire(ctx, c.listen)
	if err != nil {
		return err
	}
	c.listener = l
	return nil
}

// Close stops listening, unless another connector still does at the same address.
func (c *Connector) Close() error {
	c.mu.Lock()
	l := c.listener
	c.listener = nil
	c.mu.Unlock()
	if l != nil {
		l.release()
	}
	return nil
}

func (c *Connector) started() *listener {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.listener
}

// Addr returns the address at which the connector listens for notices, or "" before Start. With port 0 it has the
// actual port.
func (c *Connector) Addr() string {
	if l := c.started(); l != nil {
		return l.Listener.Addr().String()
	}
	return ""
}

// Notices counts what came to the connector's address, for all connectors that share it. It is zero before Start.
func (c *Connector) Notices() Notices {
	if l := c.started(); l != nil {
		return l.counted()
	}
	return Notices{}
}

var errNotStarted = errors.New("lmcachepd: nobody listens for notices: the connector was not started")

// HealthCheck reports whether the connector can receive notices.
func (c *Connector) HealthCheck(context.Context) error {
	l := c.started()
	if l == nil {
		return errNotStarted
	}
	return l.health()
}

var errNoNotice = errors.New("lmcachepd: the notices did not come in time")

// Expect waits for this session's notices, by which P's ranks say that D has the KV. The session is registered before
// the prefill leg, since the first notice may come before P's response. The error says that the notices did not come
// within the limit, which counts from P's response.
func (c *Connector) Expect(s *connector.Session) (wait func(context.Context) (connector.Event, error),
	done func(error)) {
	l := c.started()
	if l == nil {
		return func(context.Context) (connector.Event, error) { return connector.Event{}, errNotStarted },
			func(error) {}
	}
	w := l.expect(s.ID, c.notifications(s.Decode))
	wait = func(ctx context.Context) (connector.Event, error) {
		timer := time.NewTimer(c.timeout)
		defer timer.Stop()
		select {
		case <-w.came:
			return w.event, nil
		case <-timer.C:
			return connector.Event{}, errNoNotice
		case <-l.Done():
			return connector.Event{}, errClosed
		case <-ctx.Done():
			return connector.Event{}, context.Cause(ctx)
		}
	}
	return wait, func(error) { l.forget(s.ID) }
}

// notifications is the number of notices that P sends for one prompt: one for each rank of D, since P has as many,
// unless the settings have a number.
func (c *Connector) notifications(d discovery.Endpoint) int {
	if c.options.Notifications > 0 {
		return c.options.Notifications
	}
	if r, err := c.receiver(d); err == nil {
		return len(r.init)
	}
	return 1 // Prefill fails because of the same attribute
}

// Prefill asks P for one token, and tells it where to push the prompt's KV.
func (c *Connector) Prefill(_ context.Context, s *connector.Session, leg *connector.Leg) error {
	r, err := c.receiver(s.Decode)
	if err != nil {
		return err
	}
	params := make([]byte, 0, 256)
	params = append(params, '{')
	if c.options.RetFirstToken {
		params = append(params, `"ret_first_tok":true,`...)
		firstTokenLeg(s.Request, leg)
	}
	params = append(params, `"disagg_spec":{"req_id":"`...)
	params = append(params, s.ID...) // hexadecimal digits
	leg.Params(append(params, r.json...))
	return nil
}

// appendPorts writes a list, also for one port: an engine indexes the list by its rank.
func appendPorts(b []byte, ports []int) []byte {
	b = append(b, '[')
	for i, p := range ports {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(p), 10)
	}
	return append(b, ']')
}

// Decode leaves the client's request as it is, or makes it continue after P's token. In that case the error is
// [connector.ErrNoTransfer] if P's response does not hold the token.
func (c *Connector) Decode(_ context.Context, s *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	if !c.options.RetFirstToken {
		return nil
	}
	a, err := readResponse(s.Request.API, p)
	if err != nil {
		return err
	}
	if isLast(s.Request, p) && !json.Valid(p.Body) { // Final would have sent it to the client: nothing is left for D
		return handoff.NoTransfer("the response is not one JSON object")
	}
	return a.continueIn(s.Request, leg)
}

// receiver is where D receives KV.
type receiver struct {
	host        string
	init, alloc []int  // one port for each tensor-parallel rank
	json        string // the same, from the id in disagg_spec to the end of kv_transfer_params
}

// receiverKey is everything on which a receiver depends.
type receiverKey struct{ host, own, init, alloc string }

// maxReceivers bounds the cache of receivers. Engines come and go, and only a few exist at a time.
const maxReceivers = 1024

// Receiver returns where a decode engine receives KV: its host, and two ports for each tensor-parallel rank. The error
// is a *[attr.Error].
func (c *Connector) Receiver(d discovery.Endpoint) (host string, initPorts, allocPorts []int, err error) {
	r, err := c.receiver(d)
	if err != nil {
		return "", nil, nil, err
	}
	return r.host, r.init, r.alloc, nil
}

// receiver reads an engine's attributes, and caches the result.
func (c *Connector) receiver(d discovery.Endpoint) (*receiver, error) {
	key := receiverKey{d.Host(), d.Attribute("receiverHost"), d.Attribute("receiverInitPorts"),
		d.Attribute("receiverAllocPorts")}
	c.mu.Lock()
	r := c.receivers[key]
	c.mu.Unlock()
	if r != nil {
		return r, nil
	}
	r, err := c.readReceiver(d)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.receivers == nil || len(c.receivers) >= maxReceivers {
		c.receivers = map[receiverKey]*receiver{}
	}
	c.receivers[key] = r
	return r, nil
}

func (c *Connector) readReceiver(d discovery.Endpoint) (*receiver, error) {
	r := &receiver{host: strings.TrimSpace(d.Attribute("receiverHost"))}
	if r.host == "" {
		r.host = d.Host()
	}
	// P makes tcp://HOST:PORT of the host.
	if strings.ContainsFunc(r.host, func(c rune) bool { return c <= ' ' || strings.ContainsRune("/@", c) }) {
		return nil, &attr.Error{Endpoint: d.ID, Attribute: "receiverHost",
			Problem: "is not a host's name or address"}
	}
	var err error
	if r.init, err = ports(d, "receiverInitPorts", c.options.initPorts); err != nil {
		return nil, err
	}
	if r.alloc, err = ports(d, "receiverAllocPorts", c.options.allocPorts); err != nil {
		return nil, err
	}
	if len(r.init) != len(r.alloc) {
		return nil, &attr.Error{Endpoint: d.ID, Attribute: "receiverAllocPorts",
			Problem: "has not as many ports as receiverInitPorts"}
	}
	if r.host == "" {
		return nil, &attr.Error{Endpoint: d.ID, Attribute: "receiverHost",
			Problem: "is missing, and the endpoint has no host"}
	}
	b := append([]byte(`","receiver_host":`), connector.Quote(r.host)...)
	b = appendPorts(append(b, `,"receiver_init_port":`...), r.init)
	b = appendPorts(append(b, `,"receiver_alloc_port":`...), r.alloc)
	r.json = string(append(b, "}}"...))
	return r, nil
}

// ports reads an attribute. If it is missing, the ports are those that the engines' settings have for all receivers.
func ports(d discovery.Endpoint, name string, def []int) ([]int, error) {
	list, err := attr.Ints(d, name, 1, 65535)
	if err != nil {
		return nil, err
	}
	if len(list) == 0 {
		list = def
	}
	if len(list) == 0 {
		return nil, &attr.Error{Endpoint: d.ID, Attribute: name, Problem: "is missing"}
	}
	return list, nil
}

// CheckRequest refuses requests that need the first token to be D's own, if it is P's.
func (c *Connector) CheckRequest(r *connector.ClientRequest) error {
	if c.options.RetFirstToken {
		if member := unsupportedWithFirstToken(r); member != "" {
			return &connector.UnsupportedError{Member: member}
		}
	}
	return nil
}

const remedy = "the engine's pd_peer_init_port and pd_peer_alloc_port, one port for each tensor-parallel rank, " +
	"separated by commas"

// CheckEndpoint requires the receiver's ports of every decode engine.
func (c *Connector) CheckEndpoint(e discovery.Endpoint) error {
	if !e.Role.Has(discovery.RoleDecode) {
		return nil
	}
	_, err := c.receiver(e)
	if bad, ok := errors.AsType[*attr.Error](err); ok {
		return &config.FieldError{Path: "attributes." + bad.Attribute, Problem: bad.Problem, Remedy: remedy}
	}
	return err
}
