// SPDX-License-Identifier: Apache-2.0

// Package lmcachepd is LMCacheConnectorV1 with enable_pd.
package lmcachepd

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/proto/lmcache"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

// lmcachePD is LMCache's transfer from engine to engine. A kv_producer is the sender: when a prompt is computed, it
// asks the receiver that the request's disagg_spec names for room, writes the chunks there, and tells the proxy. A
// kv_consumer is the receiver: it looks for chunks of each prompt in its buffer, and drops those that it has read. It
// follows lmcache/v1/storage_backend/pd_backend.py at b532e04a and 07e07869 and
// lmcache/integration/vllm/vllm_v1_adapter.py (LMCache 0.3 to 0.5). The two engines' own messages are enginesim's; the
// notice is LMCache's, over ZeroMQ.
//
// Config.Extra: pd_peer_init_port and pd_peer_alloc_port of a receiver (default: any), pd_proxy_host and pd_proxy_port
// of a sender, pd_skip_proxy_notification, pd_buffer_size (bytes, default 1 GiB), chunk_size (tokens, default 256, a
// multiple of BlockSize), hash_seed (PYTHONHASHSEED), skip_last_n_tokens (0), discard_partial_chunks (false);
// push_delay (how long writing takes, as a Go duration, 0).
type lmcachePD struct {
	core.NoConnector
	host   *proto.Host
	seed   core.TokenKey
	chunk  int // tokens
	skip   int
	whole  bool // partial chunks are discarded
	delay  time.Duration
	buffer *receiveBuffer // of a receiver

	notifies bool // the proxy is told

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	c := &lmcachePD{
		host: h, chunk: lmcache.ChunkBlocks(h, set) * h.Core.BlockSize, skip: set.Count("skip_last_n_tokens", 0),
		seed:  core.KeyOf(core.Tokenise(lmcache.HashSeed(h))),
		whole: h.Extra["discard_partial_chunks"] == "true", delay: set.Duration("push_delay"),
		notifies: h.Extra["pd_skip_proxy_notification"] != "true",
	}
	room := set.Count("pd_buffer_size", 1<<30)
	if err := set.Err(); err != nil {
		return nil, err
	}
	if h.Role != proto.RoleConsumer && c.notifies && h.Extra["pd_proxy_port"] == "" {
		return nil, errors.New("a sender needs pd_proxy_host and pd_proxy_port, or pd_skip_proxy_notification")
	}
	if h.Role != proto.RoleProducer {
		var err error
		if c.buffer, err = openReceiver(h, room); err != nil {
			return nil, err
		}
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Receiver is where a decode engine takes KV: what a prefill request's disagg_spec must name.
func (c *lmcachePD) Receiver() (host string, init, alloc int) {
	if c.buffer == nil {
		return "", 0, 0
	}
	return c.buffer.address()
}

// Keeps lets Restart take the receiver's ports again.
func (c *lmcachePD) Keeps() map[string]string {
	if c.buffer == nil {
		return nil
	}
	_, init, alloc := c.buffer.address()
	return map[string]string{"pd_peer_init_port": strconv.Itoa(init), "pd_peer_alloc_port": strconv.Itoa(alloc)}
}

// disaggSpec is where a sender pushes to. Ports are one per rank of the engine, and this one has one rank.
type disaggSpec struct {
	ReqID     *string         `json:"req_id"`
	Host      *string         `json:"receiver_host"`
	InitPort  json.RawMessage `json:"receiver_init_port"`
	AllocPort json.RawMessage `json:"receiver_alloc_port"`
}

func (c *lmcachePD) Begin(r *core.Generation) core.Transfer {
	t := &pushed{lmcachePD: c, local: r.Local, firstToken: r.Params.Has("ret_first_tok")}
	if c.host.Role != proto.RoleConsumer {
		t.spec = new(disaggSpec)
		t.bad = !r.Params.Read("disagg_spec", t.spec) || t.spec.ReqID == nil || t.spec.Host == nil ||
			t.spec.InitPort == nil || t.spec.AllocPort == nil
	}
	return t
}

func (c *lmcachePD) Freeze(frozen bool) {
	if c.buffer != nil {
		c.buffer.freeze(frozen)
	}
}

func (c *lmcachePD) Close() {
	c.cancel()
	if c.buffer != nil {
		c.buffer.close()
	}
	c.wg.Wait()
}

// chunks gives the keys of a prompt's chunks and the token that each ends before. The last one may be partial.
func (c *lmcachePD) chunks(tokens []int32) (keys []core.TokenKey, ends []int) {
	key := c.seed
	for at := 0; at < len(tokens); {
		end := min(at+c.chunk, len(tokens))
		if c.whole && end-at < c.chunk {
			break
		}
		key = key.Extend(tokens[at:end])
		keys, ends = append(keys, key), append(ends, end)
		at = end
	}
	return keys, ends
}

// pushed is one request's side of the transfer.
type pushed struct {
	core.NoTransfer
	*lmcachePD
	local      bool
	firstToken bool
	spec       *disaggSpec // of a sender
	bad        bool

	keys  []core.TokenKey // of a receiver: the chunks found
	found int             // tokens
}

// Arrived lets a sender die of a request without disagg_spec, and of one without the members that its scheduler reads:
// LMCache's default backend looks for receiver_init_port in whatever is there (pd_backend_async.py of 0.5.6:
// batched_submit_put_task; measured with vLLM 0.32.0: "NoneType ... receiver_init_port", EngineDead).
func (t *pushed) Arrived(context.Context, *core.Sequence) (string, error) {
	if t.bad {
		return "", &core.Death{Why: "disagg_spec is not there, lacks a member, or has one of another type"}
	}
	return "", nil
}

func (t *pushed) External() bool { return !t.local && t.buffer != nil }

func (t *pushed) Promised(s *core.Sequence) int {
	keys, ends := t.chunks(s.Tokens[:max(s.Prompt-t.skip, 0)])
	n := t.buffer.has(keys)
	if t.keys = keys[:n]; n > 0 {
		t.found = min(ends[n-1], s.Prompt-1)
	}
	return t.found
}

func (t *pushed) Load(_ context.Context, s *core.Sequence) error {
	var contents [][]byte
	for _, key := range t.keys {
		blocks, ok := t.buffer.take(key)
		if !ok {
			return &core.LoadError{Failures: 1, Err: proto.ErrGone}
		}
		contents = append(contents, blocks...)
	}
	size := t.host.Core.BlockSize
	t.host.Core.Fill(s, contents[s.Computed/size:core.BlocksFor(t.found, size)], t.found)
	return nil
}

// Prefilled pushes the prompt to its receiver, beside the response.
func (t *pushed) Prefilled(_ context.Context, s *core.Sequence) {
	if t.spec == nil {
		return
	}
	keys, ends := t.chunks(s.Tokens[:s.Prompt])
	if len(keys) == 0 {
		return // nothing to write, and so nothing to tell (docs/protocols/lmcache.md §3)
	}
	blocks := t.host.Core.Read(s.Blocks[:core.BlocksFor(ends[len(ends)-1], t.host.Core.BlockSize)])
	t.wg.Go(func() {
		if t.push(keys, ends, blocks) == nil && t.notifies {
			_ = t.notify(*t.spec.ReqID)
		}
	})
}

// firstPort is a rank's port. LMCache indexes a list; a bare number fails there.
func firstPort(raw json.RawMessage) (string, error) {
	var ports []int
	if err := json.Unmarshal(raw, &ports); err != nil {
		return "", err
	}
	if len(ports) == 0 {
		return "", proto.ErrNoAddress
	}
	return strconv.Itoa(ports[0]), nil
}

// push writes chunks into the receiver's buffer.
func (t *pushed) push(keys []core.TokenKey, ends []int, blocks [][]byte) error {
	initPort, err := firstPort(t.spec.InitPort)
	if err != nil {
		return err
	}
	allocPort, err := firstPort(t.spec.AllocPort)
	if err != nil {
		return err
	}
	if err := t.shakeHands(initPort); err != nil {
		return err
	}
	pipe, err := t.dial(allocPort)
	if err != nil {
		return err
	}
	defer pipe.Close()
	defer context.AfterFunc(t.ctx, func() { _ = pipe.Close() })()
	data, err := json.Marshal(allocMessage{Request: *t.spec.ReqID, Keys: keys, Ends: ends})
	if err != nil {
		return err
	}
	if err := pipe.Send(core.Frame{Kind: core.FrameAsk, Data: data}); err != nil {
		return err
	}
	if f, err := pipe.Recv(); err != nil || f.Kind != core.FrameReleased {
		return errors.Join(errNoRoom, err)
	}
	if err := core.Sleep(t.ctx, t.delay); err != nil {
		return err
	}
	begun := time.Now()
	for i, block := range blocks {
		if err := pipe.Send(core.Frame{Kind: core.FrameBlock, Index: uint32(i), Count: uint32(len(blocks)),
			Data: block}); err != nil {
			return err
		}
	}
	if f, err := pipe.Recv(); err != nil || f.Kind != core.FrameReleased {
		return errors.Join(proto.ErrPeerGone, err)
	}
	t.host.Core.Stats.Transferred(len(blocks)*t.host.Core.BlockBytes, len(blocks), time.Since(begun))
	return nil
}

func (t *pushed) dial(port string) (*core.Pipe, error) {
	ctx, stop := context.WithTimeout(t.ctx, t.host.Handshake)
	defer stop()
	return proto.Dial(ctx, *t.spec.Host, port)
}

// shakeHands greets the receiver at its init port.
func (t *pushed) shakeHands(port string) error {
	pipe, err := t.dial(port)
	if err != nil {
		return err
	}
	defer pipe.Close()
	defer context.AfterFunc(t.ctx, func() { _ = pipe.Close() })()
	_, err = proto.Greet(pipe, t.host.Hello())
	return err
}

// notify pushes LMCache's message to the proxy. As with libzmq, it is kept until somebody listens there.
func (c *lmcachePD) notify(request string) error {
	data, err := msgpack.Marshal(map[string]string{"type": "ProxyNotif", "req_id": request})
	if err != nil {
		return err
	}
	address := net.JoinHostPort(c.host.Extra["pd_proxy_host"], c.host.Extra["pd_proxy_port"])
	for {
		push, err := zmq.Dial(c.ctx, "PUSH", address, "")
		if err == nil {
			defer push.Close()
			return push.Send(data)
		}
		// ZeroMQ's sockets connect for as long as they are open.
		if core.Sleep(c.ctx, 20*time.Millisecond) != nil {
			return err
		}
	}
}

// Finished gives out the first token, if it was asked for.
func (t *pushed) Finished(s *core.Sequence, _ string) any {
	if !t.firstToken || len(s.Output) == 0 {
		return nil
	}
	return map[string]any{"first_tok": s.Output[0]}
}
