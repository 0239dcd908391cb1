// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
)

// server is a name server inside the test, over UDP and TCP at one port.
type server struct {
	t    testing.TB
	addr string

	mu    sync.Mutex
	zone  []wire.RR
	twist twist
	asked []question
}

// twist alters the answer m to q. true means that it has answered itself, or that there is to be no answer.
type twist func(w wire.ResponseWriter, q, m *wire.Msg) bool

// alters is a twist that changes the answer.
func alters(change func(m *wire.Msg)) twist {
	return func(_ wire.ResponseWriter, _, m *wire.Msg) bool { change(m); return false }
}

// failing is a twist by which the questions of a name get SERVFAIL; "" are those of all names.
func failing(name string) twist {
	return alters(func(m *wire.Msg) {
		if name == "" || m.Question[0].Name == name {
			m.Rcode, m.Answer = wire.RcodeServerFailure, nil
		}
	})
}

type question struct {
	name string
	kind uint16
	tcp  bool
}

// serve starts a server with the given records.
func serve(t testing.TB, records ...string) *server {
	t.Helper()
	return serveAt(t, "127.0.0.1:0", records...)
}

func serveAt(t testing.TB, addr string, records ...string) *server {
	t.Helper()
	s := &server{t: t}
	s.set(records...)
	var pc net.PacketConn
	var ln net.Listener
	for range 20 { // the port that is free for UDP may not be for TCP
		var err error
		pc, err = net.ListenPacket("udp", addr)
		require.NoError(t, err)
		if ln, err = net.Listen("tcp", pc.LocalAddr().String()); err == nil {
			break
		}
		pc.Close()
	}
	require.NotNil(t, ln)
	s.addr = pc.LocalAddr().String()
	for _, one := range []*wire.Server{{PacketConn: pc, Handler: s}, {Listener: ln, Handler: s}} {
		started := make(chan struct{})
		one.NotifyStartedFunc = func() { close(started) }
		done := make(chan error, 1)
		go func() { done <- one.ActivateAndServe() }()
		<-started
		t.Cleanup(func() {
			_ = one.Shutdown()
			<-done
		})
	}
	return s
}

func records(t testing.TB, lines ...string) []wire.RR {
	t.Helper()
	var zone []wire.RR
	for _, line := range lines {
		rr, err := wire.NewRR(line)
		require.NoError(t, err, line)
		zone = append(zone, rr)
	}
	return zone
}

// set replaces all records.
func (s *server) set(lines ...string) {
	zone := records(s.t, lines...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zone = zone
}

func (s *server) twistWith(f twist) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.twist = f
}

func (s *server) questions() []question {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]question(nil), s.asked...)
}

// ServeDNS answers with the records of the name asked for, its aliases followed; NXDOMAIN where there are none of any
// type.
func (s *server) ServeDNS(w wire.ResponseWriter, q *wire.Msg) {
	_, udp := w.RemoteAddr().(*net.UDPAddr)
	m := new(wire.Msg).SetReply(q)
	ask := q.Question[0]
	s.mu.Lock()
	s.asked = append(s.asked, question{ask.Name, ask.Qtype, !udp})
	zone, twist := s.zone, s.twist
	s.mu.Unlock()
	name, exists := ask.Name, false
	for range 5 {
		alias := ""
		for _, rr := range zone {
			if h := rr.Header(); strings.EqualFold(h.Name, name) {
				exists = true
				if h.Rrtype == ask.Qtype {
					m.Answer = append(m.Answer, rr)
				}
				if c, ok := rr.(*wire.CNAME); ok {
					m.Answer = append(m.Answer, rr)
					alias = c.Target
				}
			}
		}
		if alias == "" {
			break
		}
		name = alias
	}
	if !exists {
		m.Rcode = wire.RcodeNameError
	}
	if twist != nil && twist(w, q, m) {
		return
	}
	if o := q.IsEdns0(); o != nil {
		m.SetEdns0(1232, false)
	}
	if udp {
		size := wire.MinMsgSize
		if o := q.IsEdns0(); o != nil {
			size = int(o.UDPSize())
		}
		m.Truncate(size)
	}
	_ = w.WriteMsg(m) // the client may have gone
}

// watched is a set over one source.
type watched struct {
	t    *testing.T
	set  *discovery.Set
	mu   sync.Mutex
	errs []string
	stop func()
}

// quick is the pace of tests: a round each 10 ms while answers have TTL 0. A server that is only slow is waited for.
func quick(s *server) *dns.Options {
	return &dns.Options{
		Prefill: "prefill.test", Decode: "decode.test", Port: 8000, Resolver: s.addr,
		MinTTL: 10 * time.Millisecond, Timeout: 5 * time.Second,
	}
}

func source(t testing.TB, o *dns.Options) *dns.Source {
	t.Helper()
	s, err := dns.New(o)
	require.NoError(t, err)
	s.TellEvery(0)
	return s
}

// watchQuick watches a source at the pace of tests, with options that change may set.
func watchQuick(t *testing.T, s *server, change func(*dns.Options)) *watched {
	t.Helper()
	o := quick(s)
	if change != nil {
		change(o)
	}
	return watch(t, source(t, o))
}

// watchPair watches the engines of pair at a server, and waits for them.
func watchPair(t *testing.T) (*server, *watched) {
	t.Helper()
	s := serve(t, pair...)
	w := watchQuick(t, s, nil)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	return s, w
}

func watch(t *testing.T, s discovery.Source) *watched {
	t.Helper()
	w := &watched{t: t, set: discovery.NewSet(s)}
	w.set.OnError(func(err error) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.errs = append(w.errs, err.Error())
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.set.Run(ctx) }()
	var once sync.Once
	w.stop = func() {
		once.Do(func() {
			cancel()
			require.NoError(t, <-done)
		})
	}
	t.Cleanup(w.stop)
	return w
}

func (w *watched) told() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.errs...)
}

// list is the set as "id role", in order.
func list(s *discovery.Snapshot) []string {
	all := []string{}
	for _, e := range s.Endpoints {
		all = append(all, e.ID+" "+e.Role.String())
	}
	return all
}

// becomes waits until the set lists exactly want.
func (w *watched) becomes(want ...string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), 30*time.Second)
	defer cancel()
	err := w.set.WaitReady(ctx, func(s *discovery.Snapshot) bool {
		return s.Version > 0 && strings.Join(list(s), ",") == strings.Join(want, ",")
	})
	require.NoError(w.t, err, "want %v, have %v; told %v", want, list(w.set.Load()), w.told())
}

// tells waits for an error that contains text.
func (w *watched) tells(text string) {
	w.t.Helper()
	require.Eventually(w.t, func() bool { return strings.Contains(strings.Join(w.told(), "\n"), text) }, 30*time.Second,
		time.Millisecond, "want %q, have %v", text, w.told())
}
