// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim/freeport"
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
	corefile := fmt.Sprintf("test:%s {\n  bind 127.0.0.1\n  errors\n  file %s {\n    reload 500ms\n  }\n}\n", port,
		filepath.Join(c.dir, "zone"))
	require.NoError(t, os.WriteFile(filepath.Join(c.dir, "Corefile"), []byte(corefile), 0o600))
	c.set(records...)
	c.start()
	t.Cleanup(c.kill)
	return c
}

// freeAddress returns one that is free for UDP and TCP, and stays so while CoreDNS is dead.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 20 {
		port, err := freeport.One()
		require.NoError(t, err)
		addr := net.JoinHostPort("127.0.0.1", port)
		if pc, err := net.ListenPacket("udp", addr); err == nil {
			_ = pc.Close()
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
	zone := fmt.Sprintf("$ORIGIN test.\n@ 1 IN SOA ns.test. admin.test. %d 60 60 3600 1\n@ 1 IN NS ns.test.\nns 1 IN "+
		"A 127.0.0.1\n%s\n", c.serial, strings.Join(records, "\n"))
	file := filepath.Join(c.dir, "zone")
	require.NoError(c.t, os.WriteFile(file+".new", []byte(zone), 0o600))
	require.NoError(c.t, os.Rename(file+".new", file))
}

func (c *coreDNS) start() {
	c.t.Helper()
	c.process = exec.Command(c.binary, "-conf", filepath.Join(c.dir, "Corefile"))
	log, err := os.Create(filepath.Join(c.dir, "log"))
	require.NoError(c.t, err)
	defer log.Close()
	c.process.Stdout, c.process.Stderr = log, log
	require.NoError(c.t, c.process.Start())
	c.ended = make(chan error, 1)
	go func(p *exec.Cmd, ended chan error) { ended <- p.Wait() }(c.process, c.ended)
	answers := func() bool {
		m, err := wire.Exchange(new(wire.Msg).SetQuestion("ns.test.", wire.TypeA), c.addr)
		return err == nil && len(m.Answer) == 1
	}
	for end := time.Now().Add(30 * time.Second); !answers(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			out, _ := os.ReadFile(log.Name())
			require.Fail(c.t, "CoreDNS does not answer", "%s", out)
		}
	}
}

func (c *coreDNS) kill() {
	if c.process == nil {
		return
	}
	_ = c.process.Process.Kill() // it may have ended
	<-c.ended
	c.process = nil
}
