// SPDX-License-Identifier: Apache-2.0

package lmcachepd_test

import (
	"context"
	"io"
	"log"
	"maps"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/enginesim"
	simtest "github.com/pdkit/pdkit/enginesim/enginesimtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lmcachePair is a sender and a receiver, and a proxy's PULL socket.
type lmcachePair struct {
	*simtest.Scene
	notices chan string // request ids
}

func newLMCachePair(t *testing.T, extra map[string]string) *lmcachePair {
	ctx, cancel := context.WithCancel(context.Background())
	pull := zmq4.NewPull(ctx, zmq4.WithLogger(log.New(io.Discard, "", 0)))
	require.NoError(t, pull.Listen("tcp://127.0.0.1:0"))
	host, port, err := net.SplitHostPort(pull.Addr().String())
	require.NoError(t, err)
	x := &lmcachePair{notices: make(chan string, 16)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			m, err := pull.Recv()
			if ctx.Err() != nil {
				return
			}
			var n map[string]string
			if err != nil || msgpack.Unmarshal(m.Bytes(), &n) != nil || n["type"] != "ProxyNotif" {
				continue
			}
			x.notices <- n["req_id"]
		}
	}()
	t.Cleanup(func() { cancel(); _ = pull.Close(); <-ended })
	x.Scene = simtest.New(t, func(p, d *enginesim.Config) {
		settings := map[string]string{"pd_proxy_host": host, "pd_proxy_port": port, "hash_seed": "0",
			"chunk_size": "64"}
		maps.Copy(settings, extra)
		p.Connector, p.Extra = "lmcache-pd", settings
		d.Connector, d.Extra = "lmcache-pd", settings
	}, simtest.OwnPorts(t, "pd_peer_init_port", "pd_peer_alloc_port"))
	return x
}

// spec is D's receiver as a proxy names it.
func (x *lmcachePair) spec() simtest.Obj {
	host, init, alloc := x.D.Receiver()
	return simtest.Obj{"req_id": "r-1", "receiver_host": host, "receiver_init_port": []int{init},
		"receiver_alloc_port": []int{alloc}}
}

func (x *lmcachePair) prefill(body, params simtest.Obj) simtest.Response {
	x.T.Helper()
	return x.Ask(x.P, simtest.With(body, simtest.Obj{"max_tokens": 1, "kv_transfer_params": params}))
}

func (x *lmcachePair) noNotice() {
	x.T.Helper()
	select {
	case id := <-x.notices:
		x.T.Errorf("a notice of %q", id)
	case <-time.After(150 * time.Millisecond):
	}
}

func TestLMCachePDPushesThenTells(t *testing.T) {
	x := newLMCachePair(t, nil)
	body := simtest.Completion("one")
	a := x.prefill(body, simtest.Obj{"disagg_spec": x.spec()})
	require.Equal(t, 200, a.Status, a.Body)
	assert.Equal(t, "null", a.Get("kv_transfer_params").Raw, "no first token unless it is asked for")
	assert.Equal(t, "r-1", <-x.notices)
	got := x.Ask(x.D, body)
	x.Right(body, got)
	assert.EqualValues(t, 239, x.D.Stats().ExternalKVTransfer, "all but the last token, partial chunk included")
	assert.EqualValues(t, 8*simtest.Block*16, x.P.Stats().BytesTransferred, "the sender writes")
	assert.NoError(t, x.D.CheckKV())

	x.Ask(x.D, simtest.With(body, simtest.Obj{"cache_salt": "no local hit"}))
	assert.EqualValues(t, 239, x.D.Stats().ExternalKVTransfer, "a chunk that was read is gone")
}

func TestLMCachePDGivesTheFirstToken(t *testing.T) {
	x := newLMCachePair(t, map[string]string{"skip_last_n_tokens": "1"})
	body := simtest.With(simtest.Completion("one"), simtest.Obj{"return_token_ids": true})
	a := x.prefill(body, simtest.Obj{"ret_first_tok": true, "disagg_spec": x.spec()})
	<-x.notices
	first := a.Get("choices.0.token_ids.0").Int()
	require.Equal(t, first, a.Get("kv_transfer_params.first_tok").Int())
	ids := append(a.Get("choices.0.prompt_token_ids").Array(), a.Get("choices.0.token_ids.0"))
	tokens := make([]int64, len(ids))
	for i, id := range ids {
		tokens[i] = id.Int()
	}
	got := x.Ask(x.D, simtest.Obj{"prompt": tokens, "max_tokens": 23, "temperature": 0})
	require.Equal(t, 200, got.Status, got.Body)
	assert.Equal(t, x.Alone(simtest.Completion("one")), a.Text()+got.Text())
	assert.EqualValues(t, 240, x.D.Stats().ExternalKVTransfer)
	assert.EqualValues(t, 1, x.D.Stats().LocalCompute, "the first token's own KV")
}

// What a wrong proxy gets from the real engine.
func TestLMCachePDOfAWrongProxy(t *testing.T) {
	for rule, change := range map[string]func(spec simtest.Obj){
		"a bare port where a list is wanted": simtest.Set("receiver_init_port", 8300),
		"no ports":                           simtest.Set("receiver_alloc_port", []int{}),
		"ports that are exchanged": func(spec simtest.Obj) {
			spec["receiver_init_port"] = spec["receiver_alloc_port"]
		},
		"a receiver that is not there": simtest.Set("receiver_init_port", []int{1}),
	} {
		t.Run(rule, func(t *testing.T) {
			x := newLMCachePair(t, nil)
			spec := x.spec()
			change(spec)
			a := x.prefill(simtest.Completion("one"), simtest.Obj{"disagg_spec": spec})
			require.Equal(t, 200, a.Status, "P answers all the same")
			x.noNotice()
			got := x.Ask(x.D, simtest.Completion("one"))
			x.Right(simtest.Completion("one"), got)
			assert.Zero(t, x.D.Stats().ExternalKVTransfer)
		})
	}
	for rule, params := range map[string]func(spec simtest.Obj) simtest.Obj{
		"no disagg_spec: the engine dies": func(simtest.Obj) simtest.Obj { return nil },
		"a member is missing: the engine dies": func(spec simtest.Obj) simtest.Obj {
			delete(spec, "receiver_host")
			return simtest.Obj{"disagg_spec": spec}
		},
	} {
		t.Run(rule, func(t *testing.T) {
			x := newLMCachePair(t, nil)
			x.Kills(x.P, x.prefill(simtest.Completion("one"), params(x.spec())))
		})
	}
}

// A decode that comes before the data finds the chunks, whose memory holds nothing yet: 200, with another text.
func TestLMCachePDDecodeBeforeTheNoticeAnswersWrongly(t *testing.T) {
	x := newLMCachePair(t, map[string]string{"push_delay": "3s"})
	body := simtest.Completion("one")
	require.Equal(t, 200, x.prefill(body, simtest.Obj{"disagg_spec": x.spec()}).Status)
	right, tries := x.Alone(body), 0
	simtest.WaitFor(t, "D finds the chunks", func() bool {
		tries++ // with another salt each time, so that D's own cache cannot answer
		early := x.Ask(x.D, simtest.With(body, simtest.Obj{"cache_salt": strconv.Itoa(tries)}))
		require.Equal(t, 200, early.Status)
		return early.Text() != right
	})
	assert.Equal(t, "r-1", <-x.notices)
}

func TestLMCachePDWithoutNotices(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"notices switched off":                     {"pd_skip_proxy_notification": "true"},
		"a prompt shorter than a chunk, discarded": {"discard_partial_chunks": "true", "chunk_size": "256"},
		"no room at the receiver":                  {"pd_buffer_size": strconv.Itoa(7 * simtest.Block * 16)},
	} {
		t.Run(rule, func(t *testing.T) {
			x := newLMCachePair(t, extra)
			require.Equal(t, 200, x.prefill(simtest.Completion("one"), simtest.Obj{"disagg_spec": x.spec()}).Status)
			x.noNotice()
		})
	}
}

func TestLMCachePDReceiverKeepsItsPorts(t *testing.T) {
	x := newLMCachePair(t, nil)
	before := x.spec()
	require.NoError(t, x.D.Restart())
	assert.Equal(t, before, x.spec())
	host, init, alloc := x.P.Receiver()
	assert.Empty(t, host, "a sender receives nothing")
	assert.Zero(t, init+alloc)
}

func TestLMCachePDSettings(t *testing.T) {
	for rule, extra := range map[string]map[string]string{
		"a sender without a proxy":   nil,
		"a skip of none":             {"pd_skip_proxy_notification": "true", "skip_last_n_tokens": "-1"},
		"a receiver's port of none":  {"pd_skip_proxy_notification": "true", "pd_peer_init_port": "x"},
		"a buffer of none":           {"pd_skip_proxy_notification": "true", "pd_buffer_size": "x"},
		"a chunk that is not blocks": {"pd_skip_proxy_notification": "true", "chunk_size": "1"},
	} {
		_, err := enginesim.Start(enginesim.Config{Connector: "lmcache-pd", Extra: extra})
		assert.Error(t, err, rule)
	}
}
