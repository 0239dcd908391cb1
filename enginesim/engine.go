// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/server"
)

// Engine is one simulated engine with its HTTP server. All methods may be called concurrently.
type Engine struct {
	cfg    Config // with the ports of the first start
	faults faultBook
	log    requestLog

	control sync.Mutex // one change of life at a time

	mu   sync.Mutex
	id   string
	node *server.Node
}

// Start starts an engine. It serves when Start returns.
func Start(cfg Config) (*Engine, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg}
	e.log.limit = cfg.KeepRequests
	n, err := e.boot()
	if err != nil {
		return nil, err
	}
	e.node = n
	e.cfg.Listen = n.Addr.String()
	if c, ok := n.Conn.(interface{ SideAddress() string }); ok {
		e.cfg.SideChannel = c.SideAddress()
	}
	if p := n.KVEvents(); p != nil {
		kept := *e.cfg.KVEvents
		kept.Endpoint = p.Endpoint()
		if p.Replay() != "" {
			kept.Replay = p.Replay()
		}
		e.cfg.KVEvents = &kept
	}
	if c, ok := n.Conn.(interface{ Keeps() map[string]string }); ok {
		extra := map[string]string{}
		maps.Copy(extra, e.cfg.Extra)
		maps.Copy(extra, c.Keeps())
		e.cfg.Extra = extra
	}
	return e, nil
}

// boot starts a life of the engine.
func (e *Engine) boot() (*server.Node, error) {
	cfg := e.cfg
	e.mu.Lock()
	if e.id = cfg.EngineID; e.id == "" {
		e.id = core.NewUUID()
	}
	id := e.id
	e.mu.Unlock()
	events, err := cfg.publisher()
	if err != nil {
		return nil, err
	}
	ranks, _ := strconv.Atoi(cfg.Extra["data_parallel_size_local"]) // the connector refuses what is no number
	return server.Start(server.Config{
		Core: cfg.core(),
		API: api.Engine{Model: cfg.Model, MaxModelLen: cfg.MaxModelLen, DefaultMaxTokens: cfg.DefaultMaxTokens,
			StreamParams: cfg.StreamParams, Adapters: api.NewAdapters(cfg.Adapters), ListedToo: cfg.ListedToo,
			Kept: cfg.kept(), Ranks: ranks},
		Extra: cfg.Extra, Listen: cfg.Listen, KeepAlive: cfg.KeepAlive, ExitDelay: cfg.ExitDelay,
		HandshakeTimeout: cfg.HandshakeTimeout, APIServers: cfg.APIServers,
		APIKey: cfg.APIKey, SGLang: cfg.Connector == "sglang",
		Received: e.log.add, Strike: e.faults.strike, KVEvents: events,
		Connect: func(c *core.Core, n *server.Node) (core.Connector, error) {
			return starters()[cfg.Connector](&proto.Host{
				ID: id, Model: cfg.Model, Role: cfg.KVRole, Extra: cfg.Extra, SideChannel: cfg.SideChannel,
				Handshake: cfg.HandshakeTimeout, KeepAlive: cfg.KeepAlive, MaxModelLen: cfg.MaxModelLen, Core: c,
				Life: n,
			})
		},
	})
}

func (e *Engine) current() *server.Node {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.node
}

// URL is the engine's base address, such as "http://127.0.0.1:8100". It stays the same over Restart.
func (e *Engine) URL() string { return "http://" + e.cfg.Listen }

// SideChannel is the address of the engine's KV side channel, "127.0.0.1:5600"; "" for an engine without one. It stays
// the same over Restart.
func (e *Engine) SideChannel() string {
	if _, ok := e.current().Conn.(interface{ SideAddress() string }); !ok {
		return ""
	}
	return e.cfg.SideChannel
}

// Bootstrap is the base address of a Mooncake prefill engine's bootstrap server, "http://127.0.0.1:8998"; "" for an
// engine without one. It stays the same over Restart.
func (e *Engine) Bootstrap() string {
	if c, ok := e.current().Conn.(interface{ BootstrapURL() string }); ok {
		return c.BootstrapURL()
	}
	return ""
}

// KVEvents are the addresses, HOST:PORT, of the PUB socket of KV-cache events and of the ROUTER that replays them; ""
// for what the engine does not have. They stay the same over Restart.
func (e *Engine) KVEvents() (events, replay string) {
	p := e.current().KVEvents()
	if p == nil {
		return "", ""
	}
	return p.Endpoint(), p.Replay()
}

// DropKVEvents loses the next n batches of KV-cache events on their way to subscribers; a replay still has them.
func (e *Engine) DropKVEvents(n int) {
	if p := e.current().KVEvents(); p != nil {
		p.Drop(n)
	}
}

// DropKVConnections breaks the connections of the subscribers to KV-cache events. They may connect again.
func (e *Engine) DropKVConnections() {
	if p := e.current().KVEvents(); p != nil {
		p.DropConnections()
	}
}

// EngineID is the id that handoffs of this engine name.
func (e *Engine) EngineID() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.id
}

// LoadAdapter loads a LoRA adapter as POST /v1/load_lora_adapter does: the engine serves it as a model of that name. A
// Restart loses it, as vLLM does.
func (e *Engine) LoadAdapter(name string) { e.current().Adapters().Set(name, true) }

// UnloadAdapter unloads a LoRA adapter. The engine answers 404 to requests for it, as it does to those for any model
// that it does not have.
func (e *Engine) UnloadAdapter(name string) { e.current().Adapters().Set(name, false) }

// Dead reports whether the engine serves no more: its core died, or it was killed, terminated or closed.
func (e *Engine) Dead() bool { return e.current().Ended() != nil }

// Close ends the engine: running requests are aborted as by Terminate, and everything the engine started has ended when
// Close returns.
func (e *Engine) Close() error {
	e.Terminate()
	return nil
}

// Terminate ends the engine as SIGTERM does: requests that run end with finish_reason "abort" and, when streamed,
// "[DONE]"; then the port closes.
func (e *Engine) Terminate() {
	e.control.Lock()
	defer e.control.Unlock()
	e.current().Terminate()
}

// Kill ends the engine as SIGKILL does: its connections break, its port closes.
func (e *Engine) Kill() {
	e.control.Lock()
	defer e.control.Unlock()
	e.current().Kill()
}

// Restart kills the engine if it still runs and starts it anew on the same ports: with empty blocks, counters at zero
// and, unless Config names one, a new engine id. Scripted faults and recorded requests stay. Restart waits up to 10 s
// for a port that another program has taken meanwhile.
func (e *Engine) Restart() error {
	e.control.Lock()
	defer e.control.Unlock()
	e.current().Kill()
	var n *server.Node
	if err := server.Again(func() (err error) { n, err = e.boot(); return err }); err != nil {
		return err
	}
	e.mu.Lock()
	e.node = n
	e.mu.Unlock()
	return nil
}

// Freeze stops the engine as SIGSTOP does: connections stay, nothing answers.
func (e *Engine) Freeze() { e.current().Freeze(true) }

// Thaw lets a frozen engine go on.
func (e *Engine) Thaw() { e.current().Freeze(false) }

// Stats gives the counters since the start or the last Restart.
func (e *Engine) Stats() Stats {
	return Stats(e.current().Core.Totals())
}

// WaitIdle waits until the engine serves no request, or ctx ends.
func (e *Engine) WaitIdle(ctx context.Context) error { return e.current().WaitIdle(ctx) }

// CheckKV judges what was done with the engine's KV since its start or last Restart. The error joins one *[KVFault] per
// breach: a handoff nobody read (its lease ended, or it is pinned while no request runs), one read twice, a read of
// blocks that no lease covers or for another prompt, and, on a kv_consumer, a prompt it had to compute itself. Call it
// when all requests of both legs have been answered; nil is then the proof that each handoff was used exactly once.
func (e *Engine) CheckKV() error {
	n := e.current()
	var errs []error
	for _, b := range n.Core.Breaches(n.InFlight() == 0) {
		errs = append(errs, &KVFault{Kind: KVFaultKind(b.Kind), Engine: e.EngineID(), Request: b.Request})
	}
	return errors.Join(errs...)
}

// Receiver is where a decode engine of the connector "lmcache-pd" takes KV: what a prefill request's disagg_spec must
// name. "" for other engines.
func (e *Engine) Receiver() (host string, init, alloc int) {
	if c, ok := e.current().Conn.(interface{ Receiver() (string, int, int) }); ok {
		return c.Receiver()
	}
	return "", 0, 0
}
