// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/connector/p2pnccl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/internal/sharedtest"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// fleet is a flow whose engines are those that have announced themselves.
type fleet struct {
	t      *testing.T
	python string
	config enginesim.Config
	source *registration.Source
	set    *discovery.Set
	url    string
	alone  *enginesim.Engine // says what right responses are
	under  sync.RWMutex      // read-locked by each request
	left   sync.Map          // IDs of engines that are off the list, at which nobody is asked
}

// SessionStart sees each attempt. That an engine is asked that has left is a fault, even if another attempt mends it.
func (f *fleet) SessionStart(_ context.Context, s *connector.Session) {
	for _, id := range []string{s.Prefill.ID, s.Decode.ID} {
		_, left := f.left.Load(id)
		assert.False(f.t, left, "an engine was asked that has left")
	}
}

func newFleet(t *testing.T, kv connector.KVConnector, sim enginesim.Config) *fleet {
	t.Helper()
	f := &fleet{t: t, python: sharedtest.Python(t), config: sim}
	f.config.ITL = 2 * time.Millisecond // so that requests are under way whenever something happens
	f.source = start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: 3 * time.Second})
	f.set = watched(t, f.source)
	var err error
	// One that keeps connections: after a pause of uvicorn's 5 s a request might meet one that is just being closed.
	f.alone, err = enginesim.Start(enginesim.Config{KeepAlive: time.Hour})
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.alone.Close() })
	tr := transport.New(nil)
	flow, err := pdflow.New(kv, pick.New(f.set, pick.RoundRobin()), pdflow.WithTransport(tr),
		pdflow.WithObserver(pdflow.Observer{SessionStart: f.SessionStart}),
		pdflow.WithRetry(config.Retry{MaxAttempts: 3, BackoffBase: time.Millisecond}))
	require.NoError(t, err)
	server := httptest.NewServer(flow)
	f.url = server.URL
	t.Cleanup(func() {
		server.Close()
		ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		assert.NoError(t, flow.Shutdown(ctx), "a request was left in flight")
		_ = tr.Close()
	})
	return f
}

// member is an engine with the process that announces it.
type member struct {
	*enginesim.Engine
	*sender
	id   string
	side string // where other engines reach it
}

// join starts an engine, and its announcements. It waits until it is on the list.
func (f *fleet) join(role string) *member {
	f.t.Helper()
	return f.joinAt(role, "", "")
}

// joinAt is join at addresses, of which "" is any.
func (f *fleet) joinAt(role, listen, side string) *member {
	f.t.Helper()
	// Not at ports that the system gives to connections, too: one might have the port when an engine comes back to it.
	for _, address := range []*string{&listen, &side} {
		if *address == "" {
			port, err := freeport.One()
			require.NoError(f.t, err)
			*address = "127.0.0.1:" + port
		}
	}
	config := f.config
	config.Listen, config.SideChannel = listen, side
	config.KVRole = map[string]string{"P": enginesim.RoleProducer, "D": enginesim.RoleConsumer}[role]
	e, err := enginesim.Start(config)
	for i := 0; errors.Is(err, syscall.EADDRINUSE) && i < 500; i++ {
		// A process that another test starts has all sockets of this one until it has become another program: also
		// the listener of an engine that has just ended.
		time.Sleep(10 * time.Millisecond)
		e, err = enginesim.Start(config)
	}
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = e.Close() })
	m := &member{Engine: e, id: strings.TrimPrefix(e.URL(), "http://"), side: e.SideChannel()}
	f.left.Delete(m.id)
	host, port, err := net.SplitHostPort(e.SideChannel())
	require.NoError(f.t, err)
	if config.Connector == p2pnccl.Name {
		m.sender = announce(f.t, f.python, "p2pnccl.py",
			p2pWant(f.source.Addr(), obj{"type": role, "http_address": m.id, "zmq_address": e.SideChannel()}))
	} else {
		mode := map[string]string{"true": "READ", "false": "WRITE"}[config.Extra["read_mode"]]
		m.sender = announce(f.t, f.python, "moriio.py", obj{"proxy": f.source.Addr(), "every": 0.1, "message": obj{
			"type": role, "http_address": m.id, "zmq_address": "host:" + host + ",handshake:" + port + ",notify:" +
				port,
			"dp_size": 1, "tp_size": 1, "transfer_mode": mode,
		}})
	}
	f.listed(m, true)
	return m
}

// listed waits until a member is on the list, or is not.
func (f *fleet) listed(m *member, want bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(f.t, f.set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		for _, e := range s.Endpoints {
			if e.ID == m.id {
				return want
			}
		}
		return !want
	}))
}

// silent waits until a member has left the list, and has nobody ask it any more.
func (f *fleet) silent(m *member) {
	f.t.Helper()
	f.listed(m, false)
	f.under.Lock() // whoever has picked it before is through
	defer f.under.Unlock()
	f.left.Store(m.id, true)
}

// leave ends a member in order: it is announced no more, drains, is forgotten, finishes what it has, and ends.
func (f *fleet) leave(m *member) {
	f.t.Helper()
	m.stop()
	f.silent(m)
	ctx, cancel := context.WithTimeout(f.t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(f.t, m.WaitIdle(ctx))
	f.clean(m)
	require.NoError(f.t, m.Close())
}

// clean wants a member's KV to be right. The notice that a decode engine has it may still be on its way.
func (f *fleet) clean(m *member) {
	f.t.Helper()
	assert.EventuallyWithT(f.t, func(t *assert.CollectT) { assert.NoError(t, m.CheckKV()) }, 20*time.Second,
		10*time.Millisecond)
}

// crash ends a member as the loss of its machine does, between two requests: what is under way on it is lost by these
// protocols, in which D waits for a P that is gone. It stays on the list until its announcements are missed.
func (f *fleet) crash(m *member) {
	f.under.Lock()
	defer f.under.Unlock()
	m.Kill()
	m.kill()
}

// serves waits until a member has finished requests.
func (f *fleet) serves(m *member) {
	f.t.Helper()
	before := m.Stats().Finished
	require.Eventually(f.t, func() bool { return m.Stats().Finished >= before+3 }, 20*time.Second, 5*time.Millisecond,
		"a member gets no requests")
}

// traffic sends requests from a few clients until what it returns is called, which returns how many there were. Each
// must be answered, and rightly.
func (f *fleet) traffic(clients int) (stop func() int64) {
	var n, failed atomic.Int64
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}, Timeout: 30 * time.Second}
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil && failed.Load() < 5 {
				body := obj{"prompt": strings.Repeat("prompt "+strconv.FormatInt(n.Add(1), 10)+" ", 20),
					"max_tokens": 8, "temperature": 0}
				f.under.RLock()
				got, err := complete(client, f.url, body)
				f.under.RUnlock()
				want, wrong := complete(client, f.alone.URL(), body)
				if !assert.NoError(f.t, err) || !assert.NoError(f.t, wrong) || !assert.Equal(f.t, want, got) {
					failed.Add(1)
				}
			}
		})
	}
	stop = sync.OnceValue(func() int64 {
		cancel()
		wg.Wait()
		client.CloseIdleConnections()
		return n.Load()
	})
	f.t.Cleanup(func() { stop() })
	return stop
}

// complete returns what an engine says.
func complete(client *http.Client, url string, body obj) (string, error) {
	raw, _ := json.Marshal(body)
	resp, err := client.Post(url+"/v1/completions", "application/json", bytes.NewReader(raw))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	out, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	var a struct{ Choices []struct{ Text string } }
	if err := json.Unmarshal(out, &a); err != nil || resp.StatusCode != http.StatusOK || len(a.Choices) != 1 {
		return "", &failure{resp.StatusCode, string(out)}
	}
	return a.Choices[0].Text, nil
}

type failure struct {
	status int
	body   string
}

func (f *failure) Error() string { return strconv.Itoa(f.status) + ": " + f.body }

// kinds are the connectors whose engines announce themselves, and how those are started.
func kinds(t *testing.T) map[string]kind {
	t.Helper()
	p2p, err := p2pnccl.New(nil)
	require.NoError(t, err)
	write, err := moriio.New(nil)
	require.NoError(t, err)
	read, err := moriio.New(&moriio.Options{Mode: moriio.ModeRead})
	require.NoError(t, err)
	return map[string]kind{
		"p2pnccl": {
			p2p, enginesim.Config{Connector: p2pnccl.Name,
				Extra: map[string]string{"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}},
		},
		"moriio, write": {
			write, enginesim.Config{Connector: moriio.Name, Extra: map[string]string{"read_mode": "false"}},
		},
		"moriio, read": {
			read, enginesim.Config{Connector: moriio.Name, Extra: map[string]string{"read_mode": "true"}},
		},
	}
}

type kind struct {
	connector connector.KVConnector
	config    enginesim.Config
}

// Engines come, leave and crash while requests run; no request fails that a ready pair could serve, and each is
// answered as by an engine alone, so the addresses that were announced are those by which engines find each other's KV.
func TestEnginesComeAndGoWhileRequestsRun(t *testing.T) {
	t.Parallel()
	for name, k := range kinds(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // each waits most of the time
			f := newFleet(t, k.connector, k.config)
			p1, d1 := f.join("P"), f.join("D")
			stop := f.traffic(4)
			f.serves(d1)

			p2, d2 := f.join("P"), f.join("D")
			f.serves(d2)
			f.leave(d1)
			f.leave(p1)
			f.serves(d2)

			p3, d3 := f.join("P"), f.join("D")
			f.serves(d3)
			f.crash(p2)
			f.serves(d3)
			f.silent(p2)
			f.crash(d2)
			f.serves(d3)
			f.silent(d2)
			f.serves(d3)
			assert.Greater(t, stop(), int64(20))
			f.clean(d3)
			_ = p3
		})
	}
}

// Engines come back with the other role, or at another address, and fall silent without ending, while requests run.
func TestEnginesComeBackAsOthersWhileRequestsRun(t *testing.T) {
	t.Parallel()
	for name, k := range kinds(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFleet(t, k.connector, k.config)
			f.join("P")
			f.join("D")
			p, d := f.join("P"), f.join("D")
			stop := f.traffic(4)
			f.serves(p)
			f.serves(d)

			// The roles are changed: each is started again at its addresses as what the other one was.
			f.leave(p)
			f.leave(d)
			d2, p2 := f.joinAt("D", p.id, p.side), f.joinAt("P", d.id, d.side)
			f.serves(d2)
			f.serves(p2)

			// One is lost, and comes back at another HTTP address: the old one is left at once, not when its pings are
			// missed.
			f.crash(p2)
			p3 := f.joinAt("P", "", p2.side)
			for _, e := range f.set.Load().Endpoints {
				assert.False(t, e.ID == p2.id && e.Phase != discovery.PhaseDraining, "the old address is used still")
			}
			f.silent(p2)
			f.serves(p3)

			// One is not heard any more, though its connection stands: it leaves, and is asked no more until it is
			// heard again.
			require.NoError(t, d2.signal(syscall.SIGSTOP))
			f.silent(d2)
			require.NoError(t, d2.WaitIdle(t.Context()))
			before := d2.Stats().Finished
			f.serves(p3)
			assert.Equal(t, before, d2.Stats().Finished)
			f.left.Delete(d2.id)
			require.NoError(t, d2.signal(syscall.SIGCONT))
			f.listed(d2, true)
			f.serves(d2)
			assert.Greater(t, stop(), int64(20))
			for _, m := range []*member{d2, p3} {
				f.clean(m)
			}
		})
	}
}
