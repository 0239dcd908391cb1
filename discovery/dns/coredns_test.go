// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/enginesim"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// coreDNS is a real CoreDNS that serves the zone test from a file.
type coreDNS struct {
	t       *testing.T
	binary  string
	dir     string
	addr    string
	serial  int
	process *exec.Cmd
	ended   chan error
}

// newCoreDNS prepares a server over records, and starts it.
func newCoreDNS(t *testing.T, records ...string) *coreDNS {
	t.Helper()
	binary, err := filepath.Abs("../../.tools/coredns/coredns")
	require.NoError(t, err)
	if _, err := os.Stat(binary); err != nil {
		if os.Getenv("CI") == "true" {
			require.NoError(t, err, "discovery/dns/testdata/install.sh has not been run")
		}
		t.Skip("CoreDNS is not installed: run discovery/dns/testdata/install.sh")
	}
	if runtime.GOOS != "linux" {
		t.Skip("the engines need addresses of their own, and only Linux has all of 127.0.0.0/8")
	}
	c := &coreDNS{t: t, binary: binary, dir: t.TempDir(), addr: freeAddress(t)}
	_, port, err := net.SplitHostPort(c.addr)
	require.NoError(t, err)
	corefile := fmt.Sprintf("test:%s {\n  bind 127.0.0.1\n  errors\n  file %s {\n    reload 500ms\n  }\n}\n", port, filepath.Join(c.dir, "zone"))
	require.NoError(t, os.WriteFile(filepath.Join(c.dir, "Corefile"), []byte(corefile), 0o600))
	c.set(records...)
	c.start()
	t.Cleanup(c.kill)
	return c
}

// freeAddress returns one that is free for UDP and TCP.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 20 {
		pc, err := net.ListenPacket("udp", "127.0.0.1:0")
		require.NoError(t, err)
		addr := pc.LocalAddr().String()
		ln, err := net.Listen("tcp", addr)
		pc.Close()
		if err == nil {
			ln.Close()
			return addr
		}
	}
	require.Fail(t, "no free address")
	return ""
}

// set replaces the zone's records; a running server reads them within a second.
func (c *coreDNS) set(records ...string) {
	c.t.Helper()
	c.serial++
	zone := fmt.Sprintf("$ORIGIN test.\n@ 1 IN SOA ns.test. admin.test. %d 60 60 3600 1\n@ 1 IN NS ns.test.\nns 1 IN A 127.0.0.1\n%s\n", c.serial, strings.Join(records, "\n"))
	file := filepath.Join(c.dir, "zone")
	require.NoError(c.t, os.WriteFile(file+".new", []byte(zone), 0o600))
	require.NoError(c.t, os.Rename(file+".new", file))
}

func (c *coreDNS) start() {
	c.t.Helper()
	c.process = exec.Command(c.binary, "-conf", filepath.Join(c.dir, "Corefile"))
	var out strings.Builder
	c.process.Stdout, c.process.Stderr = &out, &out
	require.NoError(c.t, c.process.Start())
	c.ended = make(chan error, 1)
	go func(p *exec.Cmd, ended chan error) { ended <- p.Wait() }(c.process, c.ended)
	require.Eventually(c.t, func() bool {
		m, err := wire.Exchange(new(wire.Msg).SetQuestion("ns.test.", wire.TypeA), c.addr)
		return err == nil && len(m.Answer) == 1
	}, 10*time.Second, 20*time.Millisecond, "CoreDNS does not answer")
}

func (c *coreDNS) kill() {
	if c.process == nil {
		return
	}
	_ = c.process.Process.Kill() // it may have ended
	<-c.ended
	c.process = nil
}

// fleet is engines at addresses of their own, and a gateway whose set asks CoreDNS for them.
type fleet struct {
	t      *testing.T
	server *coreDNS
	*watched
	url    string
	port   int // of all engines
	served atomic.Int64
	failed chan string
}

// engine starts an engine at 127.0.0.HOST.
func (f *fleet) engine(host int, role string) *enginesim.Engine {
	f.t.Helper()
	e, err := enginesim.Start(enginesim.Config{
		KVRole: role, Listen: fmt.Sprintf("127.0.0.%d:%d", host, f.port), SideChannel: fmt.Sprintf("127.0.0.%d:0", host),
		DefaultMaxTokens: 4, ITL: time.Millisecond, KeepRequests: -1,
	})
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = e.Close() })
	return e
}

// leave closes engines as an operator does who waits: they are off the list, and what they have is finished.
func (f *fleet) leave(engines ...*enginesim.Engine) {
	f.t.Helper()
	time.Sleep(300 * time.Millisecond) // for requests that have picked them and not sent yet
	ctx, cancel := context.WithTimeout(f.t.Context(), 10*time.Second)
	defer cancel()
	for _, e := range engines {
		require.NoError(f.t, e.WaitIdle(ctx))
		require.NoError(f.t, e.CheckKV())
		require.NoError(f.t, e.Close())
	}
}

// load sends about 100 requests a second until the test stops it, and keeps what is wrong with their answers.
func (f *fleet) load() (stop func()) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}, Timeout: 20 * time.Second}
	quit := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-quit:
				return
			case <-tick.C:
				all.Go(func() { f.request(client, i) })
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
	resp, err := client.Post(f.url+"/v1/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"prompt":"request number %d of the fleet","max_tokens":4}`, i)))
	fail := func(why string) {
		select {
		case f.failed <- fmt.Sprintf("request %d: %s", i, why):
		default: // there are a thousand already
		}
	}
	if err != nil {
		fail(err.Error())
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK || resp.Header.Get("X-PD-Mode") != "disaggregated" {
		fail(fmt.Sprintf("%v, status %d, mode %s: %s", err, resp.StatusCode, resp.Header.Get("X-PD-Mode"), body))
		return
	}
	f.served.Add(1)
}

// newFleet starts a gateway over what CoreDNS says.
func newFleet(t *testing.T, server *coreDNS, port int, o *dns.Options) *fleet {
	t.Helper()
	src, err := dns.New(o)
	require.NoError(t, err)
	f := &fleet{t: t, server: server, port: port, watched: watch(t, src), failed: make(chan string, 1000)}
	conn, err := nixl.New(nil)
	require.NoError(t, err)
	tr := transport.New(nil)
	flow, err := pdflow.New(conn, pick.RoundRobin(f.set), pdflow.WithTransport(tr))
	require.NoError(t, err)
	gateway := httptest.NewServer(flow)
	t.Cleanup(func() {
		gateway.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		assert.NoError(t, flow.Shutdown(ctx))
		tr.Close()
	})
	f.url = gateway.URL
	return f
}

// Records change, the server is killed and comes back with others, a name vanishes: at about 100 requests a second not one
// fails, since there was a ready pair at every moment.
func TestNoRequestFailsWhileRealCoreDNSChangesAndDies(t *testing.T) {
	_, free, err := net.SplitHostPort(freeAddress(t))
	require.NoError(t, err)
	var port int
	_, err = fmt.Sscan(free, &port)
	require.NoError(t, err)
	for _, mode := range []struct {
		name    string
		port    int
		records func(prefill, decode []int) []string
	}{
		{"A", port, func(prefill, decode []int) (zone []string) {
			for name, hosts := range map[string][]int{"prefill": prefill, "decode": decode} {
				for _, h := range hosts {
					zone = append(zone, fmt.Sprintf("%s 1 IN A 127.0.0.%d", name, h))
				}
			}
			return zone
		}},
		{"SRV", 0, func(prefill, decode []int) (zone []string) {
			for name, hosts := range map[string][]int{"prefill": prefill, "decode": decode} {
				for _, h := range hosts {
					zone = append(zone, fmt.Sprintf("%s 1 IN SRV 0 10 %d e-%d", name, port, h), fmt.Sprintf("e-%d 1 IN A 127.0.0.%d", h, h))
				}
			}
			return zone
		}},
	} {
		t.Run(mode.name, func(t *testing.T) {
			server := newCoreDNS(t, mode.records([]int{11}, []int{21})...)
			f := newFleet(t, server, port, &dns.Options{Prefill: "prefill.test", Decode: "decode.test", Port: mode.port, Resolver: server.addr, NotFound: 1000})
			at := func(host int, role string) string { return fmt.Sprintf("127.0.0.%d:%d %s", host, port, role) }
			p1, d1 := f.engine(11, enginesim.RoleProducer), f.engine(21, enginesim.RoleConsumer)
			f.becomes(at(11, "prefill"), at(21, "decode"))
			stop := f.load()
			moment := func(what string) {
				t.Helper()
				time.Sleep(time.Second)
				select {
				case why := <-f.failed:
					require.Fail(t, "a request has failed", "%s: %s", what, why)
				default:
				}
				t.Logf("%s: %d requests served so far", what, f.served.Load())
			}
			moment("one pair")

			p2, d2 := f.engine(12, enginesim.RoleProducer), f.engine(22, enginesim.RoleConsumer)
			server.set(mode.records([]int{11, 12}, []int{21, 22})...)
			f.becomes(at(11, "prefill"), at(12, "prefill"), at(21, "decode"), at(22, "decode"))
			moment("a second pair has come")

			server.set(mode.records([]int{12}, []int{22})...)
			f.becomes(at(12, "prefill"), at(22, "decode"))
			f.leave(p1, d1)
			moment("the first pair has left")

			server.kill()
			f.tells("(the last list stays)")
			moment("CoreDNS is dead")
			f.engine(11, enginesim.RoleProducer)
			f.engine(21, enginesim.RoleConsumer)
			server.set(mode.records([]int{11, 12}, []int{21, 22})...)
			server.start()
			f.becomes(at(11, "prefill"), at(12, "prefill"), at(21, "decode"), at(22, "decode"))
			moment("CoreDNS is back, with other records")

			server.set(mode.records([]int{11, 12}, nil)...)
			require.Eventually(t, func() bool {
				m, err := wire.Exchange(new(wire.Msg).SetQuestion("decode.test.", wire.TypeA), server.addr)
				return err == nil && m.Rcode == wire.RcodeNameError
			}, 10*time.Second, 20*time.Millisecond)
			moment("decode's name has vanished")
			server.set(mode.records([]int{11}, []int{21, 22})...)
			f.becomes(at(11, "prefill"), at(21, "decode"), at(22, "decode"))
			f.leave(p2)
			moment("it is back, and one prefill engine has left")

			stop()
			assert.Empty(t, f.failed)
			assert.NoError(t, d2.CheckKV())
			assert.Greater(t, f.served.Load(), int64(300))
			t.Logf("%d requests, none failed; told: %s", f.served.Load(), strings.Join(f.told(), " | "))
		})
	}
}
