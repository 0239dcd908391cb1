// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// fleet is engines at addresses of their own, and a gateway whose set asks CoreDNS for them.
type fleet struct {
	t      *testing.T
	server *coreDNS
	*watched
	flow    *pdflow.Flow
	url     string
	port    int // of all engines
	running map[int]*enginesim.Engine
	under   sync.RWMutex // read-locked by each request
	left    sync.Map     // IDs of engines that have left
	sent    atomic.Int64
	served  atomic.Int64 // of sent, with status 200 and a whole answer
	alone   atomic.Int64 // of served, by an engine of role both
	again   atomic.Int64 // attempts that another one followed
	failed  chan string
}

// SessionStart sees each attempt. That an engine is asked that has left is a fault, even if another attempt mends it.
func (f *fleet) SessionStart(_ context.Context, s *connector.Session) {
	for _, id := range []string{s.Prefill.ID, s.Decode.ID} {
		if _, left := f.left.Load(id); left {
			f.fail("an engine was asked that has left: " + id)
		}
	}
}

func (f *fleet) SessionEnd(_ context.Context, o *pdflow.Outcome) {
	if !o.Final {
		f.again.Add(1)
	}
}

func (f *fleet) fail(why string) {
	select {
	case f.failed <- why:
	default: // there are a thousand already
	}
}

// newFleet starts a gateway over what CoreDNS says.
func newFleet(t *testing.T, server *coreDNS, port int, o *dns.Options) *fleet {
	t.Helper()
	src, err := dns.New(o)
	require.NoError(t, err)
	f := &fleet{t: t, server: server, port: port, watched: watch(t, src), running: map[int]*enginesim.Engine{},
		failed: make(chan string, 1000)}
	conn, err := nixl.New(nil)
	require.NoError(t, err)
	tr := transport.New(nil)
	flow, err := pdflow.New(conn, pick.New(f.set, pick.RoundRobin()), pdflow.WithTransport(tr),
		pdflow.WithObserver(pdflow.Observer{SessionStart: f.SessionStart, SessionEnd: f.SessionEnd}))
	require.NoError(t, err)
	f.flow = flow
	gateway := httptest.NewServer(flow)
	t.Cleanup(func() {
		gateway.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		assert.NoError(t, flow.Shutdown(ctx))
		_ = tr.Close()
	})
	f.url = gateway.URL
	return f
}

// engines starts engines at 127.0.0.HOST. As NixlConnector's, each may be used for either leg.
func (f *fleet) engines(hosts ...int) {
	f.t.Helper()
	for _, host := range hosts {
		e, err := enginesim.Start(enginesim.Config{
			KVRole: enginesim.RoleBoth, Listen: fmt.Sprintf("127.0.0.%d:%d", host, f.port),
			SideChannel:      fmt.Sprintf("127.0.0.%d:0", host),
			DefaultMaxTokens: 4, ITL: time.Millisecond, KeepRequests: -1,
		})
		require.NoError(f.t, err)
		f.t.Cleanup(func() { _ = e.Close() })
		f.running[host] = e
	}
}

// leave stops engines as a careful operator does: it removes them from the list, waits until they have no requests, and
// then closes them.
func (f *fleet) leave(hosts ...int) {
	f.t.Helper()
	f.through() // also of requests that have picked them and not begun
	ctx, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	for _, host := range hosts {
		e := f.running[host]
		id := strings.TrimPrefix(e.URL(), "http://")
		require.Eventually(f.t, func() bool { return !f.uses(id) }, 20*time.Second, 10*time.Millisecond,
			"requests go on at an engine that is to leave")
		f.left.Store(id, true)
		delete(f.running, host)
		require.NoError(f.t, e.WaitIdle(ctx))
		// The notice that a decode engine has read the blocks may still be on its way.
		require.EventuallyWithT(f.t, func(t *assert.CollectT) { assert.NoError(t, e.CheckKV()) }, 20*time.Second,
			10*time.Millisecond)
		require.NoError(f.t, e.Close())
	}
}

// through waits for the end of all requests that are under way.
func (f *fleet) through() {
	f.under.Lock()
	defer f.under.Unlock()
}

func (f *fleet) uses(id string) bool {
	for _, s := range f.flow.Sessions() {
		if s.Prefill == id || s.Decode == id {
			return true
		}
	}
	return false
}

// load sends 200 requests a second until the test stops it, and keeps what is wrong with their answers. A machine that
// is too slow for as many, for it has other work, sends fewer: none is sent while fifty are under way.
func (f *fleet) load() (stop func()) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 200}, Timeout: 30 * time.Second}
	quit := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		places := make(chan struct{}, 50)
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			case <-tick.C:
			}
			select {
			case <-quit:
				return
			case places <- struct{}{}:
				all.Go(func() {
					defer func() { <-places }()
					f.request(client, i)
				})
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(quit)
		all.Wait()
		client.CloseIdleConnections()
	})
	f.t.Cleanup(stop)
	return stop
}

func (f *fleet) request(client *http.Client, i int) {
	f.under.RLock()
	defer f.under.RUnlock()
	f.sent.Add(1)
	fail := func(why string) { f.fail(fmt.Sprintf("request %d: %s", i, why)) }
	resp, err := client.Post(f.url+"/v1/completions", "application/json",
		strings.NewReader(fmt.Sprintf(`{"prompt":"request number %d of the fleet","max_tokens":4}`, i)))
	if err != nil {
		fail(err.Error())
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	mode := resp.Header.Get("X-PD-Mode")
	if err != nil || resp.StatusCode != http.StatusOK || mode != "disaggregated" && mode != "aggregated" {
		fail(fmt.Sprintf("%v, status %d, mode %s: %s", err, resp.StatusCode, mode, body))
		return
	}
	if mode == "aggregated" {
		f.alone.Add(1)
	}
	f.served.Add(1)
}

// zone has the addresses of each name, by their last number.
type zone struct{ prefill, decode []int }

// records are a zone's A records, or SRV records of a port.
func (z zone) records(srv bool, port int) (lines []string) {
	hosts := map[int]bool{}
	for name, list := range map[string][]int{"prefill": z.prefill, "decode": z.decode} {
		for _, h := range list {
			if srv {
				lines = append(lines, fmt.Sprintf("%s 1 IN SRV 0 10 %d e-%d", name, port, h))
				hosts[h] = true
			} else {
				lines = append(lines, fmt.Sprintf("%s 1 IN A 127.0.0.%d", name, h))
			}
		}
	}
	for h := range hosts {
		lines = append(lines, fmt.Sprintf("e-%d 1 IN A 127.0.0.%d", h, h))
	}
	return lines
}

// list is what a set must say of the zone.
func (z zone) list(port int) (list []string) {
	for h := range 256 { // in the order of the addresses
		role := ""
		for _, p := range z.prefill {
			if p == h {
				role = "prefill"
			}
		}
		for _, d := range z.decode {
			if d == h {
				role = map[string]string{"": "decode", "prefill": "both"}[role]
			}
		}
		if role != "" {
			list = append(list, fmt.Sprintf("127.0.0.%d:%d %s", h, port, role))
		}
	}
	return list
}

// Engines come, go and change their roles by their records, the server is killed and comes back with others, a name
// vanishes: at 200 requests a second not one fails, since there was a ready pair at every moment.
func TestNoRequestFailsWhileRealCoreDNSChangesAndDies(t *testing.T) {
	for _, mode := range []string{"A", "SRV"} {
		t.Run(mode, func(t *testing.T) {
			_, free, err := net.SplitHostPort(freeAddress(t))
			require.NoError(t, err)
			port, err := strconv.Atoi(free)
			require.NoError(t, err)
			now := zone{prefill: []int{11}, decode: []int{21}}
			server := newCoreDNS(t, now.records(mode == "SRV", port)...)
			o := &dns.Options{Prefill: "prefill.test", Decode: "decode.test", Port: port, Resolver: server.addr,
				NotFound: 1000}
			if mode == "SRV" {
				o.Port = 0
			}
			f := newFleet(t, server, port, o)
			set := func(next zone) {
				t.Helper()
				now = next
				server.set(now.records(mode == "SRV", port)...)
			}
			seen := func() { t.Helper(); f.becomes(now.list(port)...) }
			f.engines(11, 21)
			seen()
			stop := f.load()
			began := time.Now()
			moment := func(what string, d time.Duration) {
				t.Helper()
				time.Sleep(d)
				select {
				case why := <-f.failed:
					require.Fail(t, "a request has failed", "%s: %s", what, why)
				default:
				}
				t.Logf("%5.1fs %-45s %5d served so far", time.Since(began).Seconds(), what, f.served.Load())
			}
			moment("one pair", time.Second)

			f.engines(12, 22)
			set(zone{prefill: []int{11, 12}, decode: []int{21, 22}})
			seen()
			moment("a second pair has come", time.Second)

			set(zone{prefill: []int{12}, decode: []int{22}})
			seen()
			f.leave(11, 21)
			moment("the first pair has left", time.Second)

			f.engines(13)
			set(zone{prefill: []int{12, 13}, decode: []int{22}})
			seen()
			set(zone{prefill: []int{12, 13}, decode: []int{12, 22}})
			seen()
			moment("a prefill engine has both roles", time.Second)
			set(zone{prefill: []int{13}, decode: []int{12, 22}})
			seen()
			moment("it is for decode alone now", time.Second)
			set(zone{prefill: []int{13, 22}, decode: []int{12}})
			seen()
			moment("a decode engine is for prefill at once", time.Second)

			server.kill()
			f.tells("(the last list stays)")
			moment("CoreDNS is dead", 4*time.Second)
			f.engines(14, 24)
			set(zone{prefill: []int{13, 14, 22}, decode: []int{12, 24}})
			server.start()
			seen()
			moment("CoreDNS is back, with other records", time.Second)

			now.decode = nil
			server.set(now.records(mode == "SRV", port)...)
			require.Eventually(t, func() bool {
				m, err := wire.Exchange(new(wire.Msg).SetQuestion("decode.test.", wire.TypeA), server.addr)
				return err == nil && m.Rcode == wire.RcodeNameError
			}, 30*time.Second, 20*time.Millisecond)
			moment("decode's name has vanished", 3*time.Second)
			set(zone{prefill: []int{14}, decode: []int{12, 24}})
			seen()
			f.leave(13, 22)
			moment("it is back, and two prefill engines have left", time.Second)

			require.Eventually(t, func() bool { return f.served.Load() > 1000 || len(f.failed) > 0 }, 2*time.Minute,
				10*time.Millisecond, "a busy machine needs longer for as many")
			stop()
			assert.Empty(t, f.failed)
			assert.Equal(t, f.sent.Load(), f.served.Load())
			assert.Greater(t, f.served.Load(), int64(1000))
			f.leave(12, 14, 24)
			t.Logf("%d requests in %.1f s, %d failed, %d of them served by one engine of role both, %d attempts had "+
				"another after them; told: %s",
				f.sent.Load(), time.Since(began).Seconds(), f.sent.Load()-f.served.Load(), f.alone.Load(),
				f.again.Load(), strings.Join(f.told(), " | "))
		})
	}
}
