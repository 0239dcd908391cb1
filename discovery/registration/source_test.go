// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/registration"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim/freeport"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type obj = map[string]any

func start(t testing.TB, o registration.Options) *registration.Source {
	t.Helper()
	s, err := registration.New(&o)
	require.NoError(t, err)
	require.NoError(t, s.Start(t.Context()))
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return s
}

// engine is a DEALER socket that shares no code with the source.
func engine(t testing.TB, address string) (send func(obj), closeIt func()) {
	t.Helper()
	dealer, err := zmq.Dial(context.Background(), "DEALER", address, "")
	require.NoError(t, err)
	closed := false
	closeIt = func() {
		if !closed {
			closed = true
			_ = dealer.Close()
		}
	}
	t.Cleanup(closeIt)
	return func(message obj) {
		t.Helper()
		raw, err := msgpack.Marshal(message)
		require.NoError(t, err)
		require.NoError(t, dealer.Send(raw))
	}, closeIt
}

func p2p(role string, n int) obj {
	return obj{"type": role, "http_address": "10.0.1." + strconv.Itoa(n) + ":20001", "zmq_address": "10.0.1." +
		strconv.Itoa(n) + ":21001"}
}

func idOf(n int) string { return "10.0.1." + strconv.Itoa(n) + ":20001" }

// watched runs a set over sources.
func watched(t testing.TB, sources ...discovery.Source) *discovery.Set {
	t.Helper()
	set := discovery.NewSet(sources...)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return set
}

// recorded is watched, with all that the set lists.
func recorded(t testing.TB, source discovery.Source) (*discovery.Set, *history) {
	t.Helper()
	h := &history{}
	var set atomic.Pointer[discovery.Set]
	running := make(chan struct{})
	set.Store(watched(t, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
		<-running
		return source.Watch(ctx, func(snap discovery.Snapshot) {
			publish(snap)
			h.mu.Lock()
			defer h.mu.Unlock()
			h.lists = append(h.lists, phases(set.Load().Load()))
		})
	})))
	close(running)
	return set.Load(), h
}

// history is what a set has listed, in its order. A state that lasts for a second only, as the farewell does, is in it
// also where nobody had the time to look.
type history struct {
	mu    sync.Mutex
	lists []map[string]string
	from  int // after the last state that was waited for
}

// until waits until want has been the set's list since the last such wait.
func (h *history) until(t testing.TB, want map[string]string) {
	t.Helper()
	require.Eventually(t, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for i, list := range h.lists[h.from:] {
			if assert.ObjectsAreEqual(want, list) {
				h.from += i + 1
				return true
			}
		}
		return false
	}, 30*time.Second, time.Millisecond, "want %v", want)
}

// phases are a list as id=role/phase.
func phases(s *discovery.Snapshot) map[string]string {
	list := map[string]string{}
	for _, e := range s.Endpoints {
		list[e.ID] = e.Role.String() + "/" + e.Phase.String()
	}
	return list
}

// until waits until the set's list, as id=role/phase, is want.
func until(t testing.TB, set *discovery.Set, want map[string]string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var got map[string]string
	err := set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		got = phases(s)
		return assert.ObjectsAreEqual(want, got)
	})
	require.NoError(t, err, "want %v, last saw %v", want, got)
}

// always looks at each endpoint of all lists that a source publishes until stop.
func always(t testing.TB, source discovery.Source, look func(discovery.Endpoint)) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		_ = source.Watch(ctx, func(snap discovery.Snapshot) {
			for _, e := range snap.Endpoints {
				look(e)
			}
		})
	}()
	return func() { cancel(); <-watching }
}

// call uses the HTTP side without a connection.
func call(t testing.TB, h http.Handler, method, path string, body any, header ...string) (int, obj) {
	t.Helper()
	var in io.Reader = http.NoBody
	switch b := body.(type) {
	case nil:
	case string:
		in = bytes.NewReader([]byte(b))
	default:
		raw, err := json.Marshal(b)
		require.NoError(t, err)
		in = bytes.NewReader(raw)
	}
	r := httptest.NewRequestWithContext(t.Context(), method, path, in)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	var response obj
	if w.Body.Len() > 0 {
		assert.Equal(t, "application/json", w.Header().Get("Content-Type"))
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &response), "%s", w.Body)
	}
	return w.Code, response
}

func TestRulesOfSourcesByZeroMQ(t *testing.T) {
	var s *registration.Source
	var send func(obj)
	var closeIt func()
	n := 0
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			s = start(t, registration.Options{Listen: "127.0.0.1:0"})
			n = 1
			send, closeIt = engine(t, s.Addr())
			send(p2p("P", 1))
			require.Eventually(t, func() bool { return s.Counts().Pings == 1 }, 20*time.Second, time.Millisecond)
			return s
		},
		Change: func() error { n++; send(p2p("D", n)); return nil },
		Break: func() error { // an engine's connection is lost, and what comes in its place is nonsense
			closeIt()
			conn, err := net.Dial("tcp", s.Addr())
			if err != nil {
				return err
			}
			defer conn.Close()
			_, err = conn.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
			return err
		},
		Repair: func() error { send, closeIt = engine(t, s.Addr()); return nil },
		Remove: func() (string, error) { // the engine comes back with another HTTP port
			moved := p2p("P", 1)
			moved["http_address"] = "10.0.1.1:20009"
			send(moved)
			return idOf(1), nil
		},
		Timeout: 30 * time.Second,
	})
}

func TestRulesOfSourcesByHTTP(t *testing.T) {
	var s *registration.Source
	n := 0
	register := func() error {
		n++
		code, _ := call(t, s.Handler(), http.MethodPost, "/v1/endpoints",
			obj{"id": "e" + strconv.Itoa(n), "url": fmt.Sprintf("http://10.0.0.%d:8000", n), "role": "both"})
		if code != http.StatusCreated {
			return fmt.Errorf("status %d", code)
		}
		return nil
	}
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			var err error
			s, err = registration.New(&registration.Options{HTTP: "127.0.0.1:0"})
			require.NoError(t, err)
			n = 0
			require.NoError(t, s.Start(t.Context()))
			t.Cleanup(func() { _ = s.Close() })
			require.NoError(t, register())
			return s
		},
		Change: register,
		Break:  func() error { return s.Close() },
		Repair: func() error { return s.Start(t.Context()) },
		Remove: func() (string, error) {
			code, _ := call(t, s.Handler(), http.MethodDelete, "/v1/endpoints/e1", nil)
			if code != http.StatusNoContent {
				return "", fmt.Errorf("status %d", code)
			}
			return "e1", nil
		},
		Timeout: 30 * time.Second,
	})
}

// A set shows the static engines first, and the announced ones beside them.
func TestBesideOtherSources(t *testing.T) {
	s := start(t, registration.Options{Listen: "127.0.0.1:0", HTTP: "127.0.0.1:0"})
	fixed, err := discovery.New("http://10.0.1.1:20001", discovery.RoleBoth)
	require.NoError(t, err)
	list, err := static.New(fixed)
	require.NoError(t, err)
	set := watched(t, list, s)
	until(t, set, map[string]string{idOf(1): "both/ready"})
	send, _ := engine(t, s.Addr())
	send(p2p("P", 1))
	send(p2p("D", 2))
	until(t, set, map[string]string{idOf(1): "both/ready", idOf(2): "decode/ready"})
	code, _ := call(t, s.Handler(), http.MethodPost, "/v1/endpoints",
		obj{"id": "x", "url": "http://10.0.0.9:1", "role": "encode"})
	assert.Equal(t, http.StatusCreated, code)
	until(t, set, map[string]string{idOf(1): "both/ready", idOf(2): "decode/ready", "x": "encode/ready"})
}

func TestAnEngineChangesItsRoleAndItsAddress(t *testing.T) {
	s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: time.Hour})
	set, h := recorded(t, s)
	send, _ := engine(t, s.Addr())
	send(p2p("P", 1))
	until(t, set, map[string]string{idOf(1): "prefill/ready"})
	send(p2p("D", 1))
	until(t, set, map[string]string{idOf(1): "decode/ready"})
	moved := p2p("D", 1)
	moved["http_address"] = "10.0.1.1:20009"
	send(moved)
	h.until(t, map[string]string{idOf(1): "decode/draining", "10.0.1.1:20009": "decode/ready"})
	until(t, set, map[string]string{"10.0.1.1:20009": "decode/ready"})
	moved["http_address"] = "10.0.1.1:20010"
	send(moved)
	h.until(t, map[string]string{"10.0.1.1:20009": "decode/draining", "10.0.1.1:20010": "decode/ready"})
}

func TestAnEngineThatFallsSilentDrainsAndLeaves(t *testing.T) {
	t.Parallel()
	s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: 4 * time.Second})
	set, h := recorded(t, s)
	send, _ := engine(t, s.Addr())
	send(p2p("P", 1))
	stop := pings(t, s.Addr(), p2p("D", 2))
	until(t, set, map[string]string{idOf(1): "prefill/ready", idOf(2): "decode/ready"})
	steady := always(t, s, func(e discovery.Endpoint) {
		assert.False(t, e.ID == idOf(2) && e.Phase != discovery.PhaseReady, "an engine that is heard does not waver")
	})
	h.until(t, map[string]string{idOf(1): "prefill/draining", idOf(2): "decode/ready"})
	until(t, set, map[string]string{idOf(2): "decode/ready"})
	steady()
	stop()
	send(p2p("P", 1))
	until(t, set, map[string]string{idOf(1): "prefill/ready", idOf(2): "decode/ready"})
}

// A faulty peer does not stop the source, and the messages of other peers are still read.
func TestBadPeersHarmNobody(t *testing.T) {
	s := start(t, registration.Options{Listen: "127.0.0.1:0"})
	set := watched(t, s)
	dial := func(say string) {
		conn, err := net.Dial("tcp", s.Addr())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, say)
		require.NoError(t, err)
	}
	greeting := "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x00NULL" + string(make([]byte, 48))
	ready := "\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
	huge := "\x02" + string(binary.BigEndian.AppendUint64(nil, 1<<62))
	dial("")                                      // says nothing
	dial(greeting[:20])                           // stops in the middle
	dial("GET / HTTP/1.1\r\n\r\n")                // another protocol
	dial(greeting + ready + huge)                 // a message of 4 exabytes
	dial(greeting + "\x06" + huge[1:])            // a handshake of as much
	dial(greeting + ready + "\x00\x03abc")        // no msgpack
	dial(greeting + ready + "\x01\x01a\x00\x01a") // two frames
	require.Eventually(t, func() bool { c := s.Counts(); return c.Refused == 3 && c.Malformed == 2 }, 20*time.Second,
		time.Millisecond, "%+v", s.Counts())

	began := time.Now()
	flood, _ := engine(t, s.Addr())
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() { // one connection that speaks for ever new engines, as fast as it can
		defer close(ended)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				flood(obj{"type": "P", "http_address": fmt.Sprintf("10.9.%d.%d:1", i>>8&255, i&255)})
			}
			if i > 2000 { // what is sent waits in buffers from here on
				<-stop
				return
			}
		}
	}()
	send, _ := engine(t, s.Addr())
	send(obj{"type": "HELLO"})
	send(p2p("D", 1))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, set.WaitReady(ctx, func(snap *discovery.Snapshot) bool {
		found := false
		for _, e := range snap.Endpoints {
			found = found || e.ID == idOf(1)
		}
		return found
	}))
	close(stop)
	<-ended
	assert.LessOrEqual(t, len(set.Load().Endpoints), 65, "one connection speaks for 64 engines at most")
	read, seconds := s.Counts().Pings+s.Counts().Surplus, int64(time.Since(began)/time.Second)
	assert.LessOrEqual(t, read, (seconds+1)*256+1, "256 messages a second are read of it")
	assert.EqualValues(t, 1, s.Counts().Hellos)
}

func TestTheNumberOfEnginesIsBounded(t *testing.T) {
	s := start(t, registration.Options{Listen: "127.0.0.1:0", MaxEndpoints: 2})
	send, _ := engine(t, s.Addr())
	for n := range 3 {
		send(p2p("P", n))
	}
	require.Eventually(t, func() bool { return s.Counts().Surplus == 1 }, 20*time.Second, time.Millisecond)
	code, response := call(t, s.Handler(), http.MethodPost, "/v1/endpoints",
		obj{"url": "http://10.0.0.9:1", "role": "both"})
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Equal(t, "too_many_endpoints", response["error"].(obj)["code"])
	send(p2p("D", 1))
	require.Eventually(t, func() bool { return s.Counts().Pings == 3 }, 20*time.Second, time.Millisecond,
		"those that are there go on")
	for range 2 {
		code, _ = call(t, s.Handler(), http.MethodPost, "/v1/endpoints",
			obj{"id": idOf(1), "url": "http://" + idOf(1), "role": "both"})
		assert.Equal(t, http.StatusOK, code, "by HTTP, too")
	}
}

func TestStartAndClose(t *testing.T) {
	port, err := freeport.Find(2)
	require.NoError(t, err)
	s, err := registration.New(&registration.Options{Listen: "127.0.0.1:" + strconv.Itoa(port),
		HTTP: "127.0.0.1:" + strconv.Itoa(port+1)})
	require.NoError(t, err)
	assert.Empty(t, s.Addr()+s.HTTPAddr())
	require.NoError(t, s.Close(), "before any start")
	ctx, cancel := context.WithCancel(t.Context())
	require.NoError(t, s.Start(ctx))
	zmq, api := s.Addr(), s.HTTPAddr()
	require.NoError(t, s.Start(ctx), "starting twice is starting once")
	assert.Equal(t, zmq, s.Addr())
	resp, err := http.Get("http://" + api + "/v1/endpoints")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	http.DefaultClient.CloseIdleConnections()

	cancel() // ends both
	for _, address := range []string{zmq, api} {
		require.Eventually(t, func() bool {
			ln, err := net.Listen("tcp", address)
			if err == nil {
				_ = ln.Close()
			}
			return err == nil
		}, 20*time.Second, time.Millisecond)
	}
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Start(ctx), context.Canceled)
	require.NoError(t, s.Start(t.Context()), "and it may be started again")
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
}

func TestAnAddressThatIsTakenIsToldByStart(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	taken := ln.Addr().String()
	for _, o := range []registration.Options{{Listen: taken, HTTP: "127.0.0.1:0"},
		{Listen: "127.0.0.1:0", HTTP: taken}} {
		s, err := registration.New(&o)
		require.NoError(t, err)
		require.Error(t, s.Start(t.Context()))
		assert.Empty(t, s.Addr()+s.HTTPAddr(), "then nothing is open")
	}
}

func TestWhatNewRefuses(t *testing.T) {
	for rule, o := range map[string]registration.Options{
		"no port":         {Listen: "127.0.0.1"},
		"a port too much": {HTTP: "127.0.0.1:70000"},
		"one for both":    {Listen: "127.0.0.1:1", HTTP: "127.0.0.1:1"},
		"expiry below 0":  {Expiry: -1},
		"too short":       {Lease: time.Millisecond},
		"too long":        {Lease: 2 * time.Hour},
		"fewer than none": {MaxEndpoints: -1},
	} {
		_, err := registration.New(&o)
		assert.Error(t, err, rule)
	}
	_, err := registration.New(nil)
	assert.NoError(t, err)
}
