// SPDX-License-Identifier: Apache-2.0

// Package ascendlayerwise is vllm-ascend's MooncakeLayerwiseConnector. D calls a proxy back, and P writes.
//
// It reads kv_port of Config.Extra: where D takes P's notices, any free port by default.
package ascendlayerwise

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// layerwise is one engine's side, after vllm-ascend 182b75e, kv_p2p/mooncake_layerwise_connector.py. None of it was
// recorded.
//
// The real P writes into D's memory and then tells D that it has. Here P tells D where its KV lies, D reads it, and the
// bytes count as P's.
type layerwise struct {
	*proto.Wire
	client *http.Client      // D's, for callbacks
	notice *proto.PipeServer // D's kv_port

	waits sync.Mutex
	names map[string]*layerWait
}

// layerWait is a prompt that D waits for.
type layerWait struct {
	from chan proto.Place // takes one
	done chan bool        // closed, or given true once D has the KV
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	port := set.Count("kv_port", 0)
	if err := set.Err(); err != nil {
		return nil, err
	}
	notice, err := proto.ListenPipes(h.Beside(port))
	if err != nil {
		return nil, err
	}
	w, err := proto.StartWire(set, proto.Options{Writes: true})
	if err != nil {
		notice.Close()
		return nil, err
	}
	c := &layerwise{
		Wire: w, notice: notice, names: map[string]*layerWait{},
		client: proto.NewClient(), // without a timeout, as the real one
	}
	notice.Serve(c.noticed)
	return c, nil
}

// Keeps are the settings with which Restart takes the same port again.
func (c *layerwise) Keeps() map[string]string {
	return map[string]string{"kv_port": strconv.Itoa(c.noticePort())}
}

func (c *layerwise) noticePort() int {
	_, port := c.notice.Address()
	return port
}

func (c *layerwise) Close() {
	c.Wire.Close() // first: notices wait for its gate
	c.notice.Close()
}

func (c *layerwise) Begin(r *core.Generation) core.Transfer { return &layerPush{proto.LegsOf(r), c} }

// layerPush is one request's side.
type layerPush struct {
	proto.Legs
	c *layerwise
}

// Load calls back and waits for P's push, forever if none comes. If the client leaves meanwhile, the blocks are lost: P
// might still write into them.
func (t *layerPush) Load(ctx context.Context, s *core.Sequence) error {
	err := t.receive(ctx, s)
	if err != nil {
		t.c.Core.Lose(s)
	}
	return err
}

func (t *layerPush) receive(ctx context.Context, s *core.Sequence) error {
	name := t.Request.Name
	wait := &layerWait{from: make(chan proto.Place, 1), done: make(chan bool, 1)}
	defer close(wait.done)
	t.c.waits.Lock()
	t.c.names[name] = wait
	t.c.waits.Unlock()
	defer func() {
		t.c.waits.Lock()
		defer t.c.waits.Unlock()
		if t.c.names[name] == wait {
			delete(t.c.names, name)
		}
	}()
	host, _ := t.c.Side.Address()
	body := python.Encode(python.Object{ // the keys of the real one, in order
		"token_ids", []int32{}, "request_id", name, "do_remote_prefill", false, "do_remote_decode", true,
		"remote_block_ids", [][]int32{s.Blocks}, "remote_block_size", []int{t.c.Core.BlockSize},
		"remote_engine_id", t.c.Host.ID, "remote_host", host, "remote_port", t.c.noticePort(),
		"remote_tp_size", 1, "remote_pcp_size", 1, "remote_dcp_size", 1, "remote_cached_tokens", s.Computed})
	if !t.Request.Params.Is("do_virtual") {
		url := t.Request.Params.Text("metaserver")
		t.c.Spawn(func() { t.c.call(url, body) })
	}
	select {
	case from := <-wait.from:
		err := t.c.ReadNamed(ctx, s, from, name)
		if err == nil {
			wait.done <- true
		}
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// call posts a callback, three times if it cannot be sent; the status is not read.
func (c *layerwise) call(url string, body []byte) {
	for range 3 {
		r, err := http.NewRequestWithContext(c.Ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			return
		}
		r.Header.Set("Content-Type", "application/json")
		resp, err := c.client.Do(r)
		if err == nil {
			_ = resp.Body.Close()
			return
		}
	}
}

// noticeMessage is P's word that a prompt's KV lies ready, and D's whether it was wanted.
type noticeMessage struct {
	Request string `json:"request,omitempty"`
	Engine  string `json:"engine,omitempty"`
	Host    string `json:"host,omitempty"`
	Port    string `json:"port,omitempty"`
	Taken   bool   `json:"taken,omitempty"`
}

// noticed takes one notice. P learns when D has the KV, or that nobody wants it.
func (c *layerwise) noticed(pipe *core.Pipe) {
	var m noticeMessage
	f, err := pipe.Recv()
	if err != nil || json.Unmarshal(f.Data, &m) != nil || !c.Side.Gate.Pass() {
		return
	}
	c.waits.Lock()
	wait := c.names[m.Request]
	delete(c.names, m.Request)
	c.waits.Unlock()
	taken := false
	if wait != nil {
		wait.from <- proto.Place{ID: m.Engine, Host: m.Host, Port: m.Port}
		taken = <-wait.done
	}
	_ = pipe.Send(core.Frame{Kind: core.FrameReleased, Data: python.Encode(noticeMessage{Taken: taken})})
}

// Arrived reads what the real P reads without asking whether it is there.
func (t *layerPush) Arrived(context.Context, *core.Sequence) (string, error) {
	params := t.Request.Params
	if !t.Produces {
		return "", nil
	}
	for _, key := range []string{"remote_cached_tokens", "remote_block_ids", "remote_block_size"} {
		if !params.Given(key) {
			return "", &core.Death{Why: "no " + key}
		}
	}
	if _, ok := proto.BlockIDs(params["remote_block_ids"]); !ok {
		return "", &core.Death{Why: "remote_block_ids has no group with blocks"}
	}
	return "", nil
}

// Finished pushes, whatever the reason: the layers are out before it is known. The response tells nothing.
func (t *layerPush) Finished(s *core.Sequence, reason string) any {
	if !t.Produces || !proto.Ended(reason) {
		return nil
	}
	name, to := t.Request.Name, proto.Remote(t.Request.Params)
	t.c.Offer(s, name)
	t.c.Spawn(func() {
		if t.c.tell(to, name) {
			return
		}
		t.c.Side.Forget(name) // let go, not leaked: the real P keeps nothing
	})
	return nil
}

var errNotTaken = errors.New("nobody waits for the KV")

// tell sends the notice, three times if it cannot be sent.
func (c *layerwise) tell(to proto.Place, name string) bool {
	for range 3 {
		err := c.tellOnce(to, name)
		if err == nil || errors.Is(err, errNotTaken) || core.Sleep(c.Ctx, 100*time.Millisecond) != nil {
			return err == nil
		}
	}
	return false
}

func (c *layerwise) tellOnce(to proto.Place, name string) error {
	pipe, err := proto.Dial(c.Ctx, to.Host, to.Port)
	if err != nil {
		return err
	}
	defer pipe.Close()
	defer context.AfterFunc(c.Ctx, func() { _ = pipe.Close() })()
	host, port := c.Side.Address()
	m := noticeMessage{Request: name, Engine: c.Host.ID, Host: host, Port: strconv.Itoa(port)}
	if err := pipe.Send(core.Frame{Kind: core.FrameAsk, Data: python.Encode(m)}); err != nil {
		return err
	}
	f, err := pipe.Recv()
	if err == nil {
		err = json.Unmarshal(f.Data, &m)
	}
	if err == nil && !m.Taken {
		err = errNotTaken
	}
	return err
}
