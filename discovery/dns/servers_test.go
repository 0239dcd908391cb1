// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery/dns"
	"github.com/pdkit/pdkit/enginesim/freeport"
)

func TestTheSystemsResolver(t *testing.T) {
	s := serve(t, "prefill.ns.svc.test. 0 IN A 127.0.0.1", "decode.ns.svc.test. 0 IN A 127.0.0.2",
		"decode. 0 IN A 127.0.0.66")
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	host, port, err := net.SplitHostPort(s.addr)
	require.NoError(t, err)
	o := quick(s)
	o.Resolver, o.Prefill, o.Decode = "", "prefill.ns", "decode"
	src := source(t, o)
	src.UseConf(conf, port)
	w := watch(t, src)
	w.tells("dns: prefill: the system names no server to ask; decode: the system names no server to ask (there is no " +
		"list yet)")
	// The first server is dead: nobody has this address of loopback.
	require.NoError(t, os.WriteFile(conf, []byte("nameserver 127.99.99.99\nnameserver "+host+
		"\nsearch other.test ns.svc.test svc.test\noptions ndots:5\n"), 0o600))
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	// A name that cannot be answered for is not looked for further on: that would be somebody else's.
	s.twistWith(failing("decode.ns.svc.test."))
	w.tells("dns: decode: the server answered SERVFAIL (the last list stays)")
	assert.Equal(t, []string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode"}, list(w.set.Load()))
}

// If one of the system's servers cannot tell, whatever error it returns, the next one is asked.
func TestAnotherServerIsAskedWhenOneDoesNotKnow(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has all of 127.0.0.0/8")
	}
	first := serve(t)
	host, port, err := net.SplitHostPort(first.addr)
	require.NoError(t, err)
	serveAt(t, net.JoinHostPort("127.0.0.2", port), pair...)
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	require.NoError(t, os.WriteFile(conf, []byte("nameserver "+host+"\nnameserver 127.0.0.2\n"), 0o600))
	for what, twist := range map[string]func(m *wire.Msg){
		"SERVFAIL": func(m *wire.Msg) { m.Rcode = wire.RcodeServerFailure },
		"REFUSED":  func(m *wire.Msg) { m.Rcode = wire.RcodeRefused },
		"a referral": func(m *wire.Msg) {
			m.Rcode, m.Ns = wire.RcodeSuccess, records(t, "test. 0 IN NS ns.other.")
		},
	} {
		t.Run(what, func(t *testing.T) {
			first.twistWith(alters(twist))
			o := quick(first)
			o.Resolver = ""
			src := source(t, o)
			src.UseConf(conf, port)
			w := watch(t, src)
			w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
			assert.Empty(t, w.told())
		})
	}
}

func TestAServerThatIsNotThere(t *testing.T) {
	port, err := freeport.One()
	require.NoError(t, err)
	w := watch(t, source(t, &dns.Options{Prefill: "p.test", Port: 1, Resolver: "127.0.0.1:" + port,
		MinTTL: time.Millisecond}))
	w.tells("dns: prefill: the server refuses connections (there is no list yet)")
}
