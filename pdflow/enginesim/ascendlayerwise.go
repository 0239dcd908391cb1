// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// layerwise is one engine's side, after vllm-ascend 182b75e,
// kv_p2p/mooncake_layerwise_connector.py. None of it was recorded.
//
// The real P writes into D's memory and then tells D that it has. Here P tells D
// where its KV lies, D reads it, and the bytes count as P's.
type layerwise struct {
	*wire
	client *http.Client // D's, for callbacks
	notice net.Listener // D's kv_port

	waits sync.Mutex
	names map[string]*layerWait
	conns map[net.Conn]struct{}
}

// layerWait is a prompt that D waits for.
type layerWait struct {
	from chan place // takes one
	done chan bool  // closed, or given true once D has the KV
}

func startAscendLayerwise(h *host) (connector, error) {
	set := h.settings()
	port := set.count("kv_port", 0)
	if err := set.err(); err != nil {
		return nil, err
	}
	notice, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	w, err := startWire(h, wireOptions{writes: true})
	if err != nil {
		_ = notice.Close()
		return nil, err
	}
	c := &layerwise{
		wire: w, notice: notice, names: map[string]*layerWait{}, conns: map[net.Conn]struct{}{},
		client: newClient(), // without a timeout, as the real one
	}
	c.spawn(c.accept)
	return c, nil
}

// keeps are the settings with which Restart takes the same port again.
func (c *layerwise) keeps() map[string]string {
	return map[string]string{"kv_port": strconv.Itoa(c.noticePort())}
}

func (c *layerwise) noticePort() int {
	return c.notice.Addr().(*net.TCPAddr).Port //nolint:errcheck // it listens on TCP
}

func (c *layerwise) close() {
	_ = c.notice.Close()
	c.waits.Lock()
	for conn := range c.conns {
		_ = conn.Close()
	}
	c.conns = nil
	c.waits.Unlock()
	c.wire.close()
}

func (c *layerwise) begin(r *kvRequest) transfer {
	return &layerPush{
		c: c, request: r, produces: r.params.is("do_remote_decode"),
		waits: !r.local && r.params.is("do_remote_prefill"),
	}
}

// layerPush is one request's side.
type layerPush struct {
	noTransfer
	c               *layerwise
	request         *kvRequest
	waits, produces bool
}

func (t *layerPush) external() bool { return t.waits }

// callback is what D posts, with the keys of the real one in order.
type callback struct {
	TokenIDs        []int32   `json:"token_ids"`
	RequestID       string    `json:"request_id"`
	DoRemotePrefill bool      `json:"do_remote_prefill"`
	DoRemoteDecode  bool      `json:"do_remote_decode"`
	BlockIDs        [][]int32 `json:"remote_block_ids"`
	BlockSize       []int     `json:"remote_block_size"`
	EngineID        string    `json:"remote_engine_id"`
	Host            string    `json:"remote_host"`
	Port            int       `json:"remote_port"`
	TPSize          int       `json:"remote_tp_size"`
	PCPSize         int       `json:"remote_pcp_size"`
	DCPSize         int       `json:"remote_dcp_size"`
	CachedTokens    int       `json:"remote_cached_tokens"`
}

// load calls back and waits for P's push, for ever if none comes. If the client
// leaves meanwhile, the blocks are lost: P might still write into them.
func (t *layerPush) load(ctx context.Context, s *sequence) error {
	err := t.receive(ctx, s)
	if err != nil {
		t.c.core.lose(s)
	}
	return err
}

func (t *layerPush) receive(ctx context.Context, s *sequence) error {
	name := t.request.name
	wait := &layerWait{from: make(chan place, 1), done: make(chan bool, 1)}
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
	host, _ := t.c.side.address()
	body := encode(callback{
		TokenIDs: []int32{}, RequestID: name, DoRemoteDecode: true, BlockIDs: [][]int32{s.blocks}, BlockSize: []int{t.c.core.blockSize},
		EngineID: t.c.host.id, Host: host, Port: t.c.noticePort(), TPSize: 1, PCPSize: 1, DCPSize: 1, CachedTokens: s.computed,
	})
	if !t.request.params.is("do_virtual") {
		url := t.request.params.text("metaserver")
		t.c.spawn(func() { t.c.call(url, body) })
	}
	select {
	case from := <-wait.from:
		err := t.c.readNamed(ctx, s, from, name)
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
		r, err := http.NewRequestWithContext(c.ctx, http.MethodPost, url, bytes.NewReader(body))
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

// noticeMessage is P's word that a prompt's KV lies ready, and D's whether it was
// wanted.
type noticeMessage struct {
	Request string `json:"request,omitempty"`
	Engine  string `json:"engine,omitempty"`
	Host    string `json:"host,omitempty"`
	Port    string `json:"port,omitempty"`
	Taken   bool   `json:"taken,omitempty"`
}

func (c *layerwise) accept() {
	for {
		conn, err := c.notice.Accept()
		if err != nil {
			return
		}
		c.waits.Lock()
		over := c.conns == nil
		if !over {
			c.conns[conn] = struct{}{}
		}
		c.waits.Unlock()
		if over || !c.spawn(func() { c.noticed(conn) }) {
			_ = conn.Close()
		}
	}
}

// noticed takes one notice. P learns when D has the KV, or that nobody wants it.
func (c *layerwise) noticed(conn net.Conn) {
	defer func() {
		_ = conn.Close()
		c.waits.Lock()
		defer c.waits.Unlock()
		delete(c.conns, conn)
	}()
	var m noticeMessage
	if json.NewDecoder(conn).Decode(&m) != nil || !c.side.gate.pass() {
		return
	}
	c.waits.Lock()
	wait := c.names[m.Request]
	delete(c.names, m.Request)
	c.waits.Unlock()
	taken := false
	if wait != nil {
		wait.from <- place{id: m.Engine, host: m.Host, port: m.Port}
		taken = <-wait.done
	}
	_ = json.NewEncoder(conn).Encode(noticeMessage{Taken: taken})
}

// arrived reads what the real P reads without asking whether it is there.
func (t *layerPush) arrived(context.Context, *sequence) (string, error) {
	params := t.request.params
	if !t.produces {
		return "", nil
	}
	for _, key := range []string{"remote_cached_tokens", "remote_block_ids", "remote_block_size"} {
		if !params.given(key) {
			return "", &engineDeath{"no " + key}
		}
	}
	if _, ok := blockIDs(params["remote_block_ids"]); !ok {
		return "", &engineDeath{"remote_block_ids has no group with blocks"}
	}
	return "", nil
}

// finished pushes, whatever the reason: the layers are out before it is known. The
// answer tells nothing.
func (t *layerPush) finished(s *sequence, reason string) any {
	if !t.produces || reason != reasonLength && reason != reasonStop {
		return nil
	}
	name, to := t.request.name, remote(t.request.params)
	t.c.offer(s, name)
	t.c.spawn(func() {
		if t.c.tell(to, name) {
			return
		}
		t.c.side.forget(name) // let go, not leaked: the real P keeps nothing
	})
	return nil
}

var errNotTaken = errors.New("nobody waits for the KV")

// tell sends the notice, three times if it cannot be sent.
func (c *layerwise) tell(to place, name string) bool {
	for range 3 {
		err := c.tellOnce(to, name)
		if err == nil || errors.Is(err, errNotTaken) || sleep(c.ctx, 100*time.Millisecond) != nil {
			return err == nil
		}
	}
	return false
}

func (c *layerwise) tellOnce(to place, name string) error {
	conn, err := new(net.Dialer).DialContext(c.ctx, "tcp", net.JoinHostPort(to.host, to.port))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(c.ctx, func() { _ = conn.Close() })
	defer stop()
	host, port := c.side.address()
	if err := json.NewEncoder(conn).Encode(noticeMessage{Request: name, Engine: c.host.id, Host: host, Port: strconv.Itoa(port)}); err != nil {
		return err
	}
	var answer noticeMessage
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return err
	}
	if !answer.Taken {
		return errNotTaken
	}
	return nil
}
