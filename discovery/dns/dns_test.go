// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/dns"
)

// pair is a zone of one prefill and one decode engine.
var pair = []string{"prefill.test. 0 IN A 127.0.0.1", "decode.test. 0 IN A 127.0.0.2"}

func TestRulesOfSources(t *testing.T) {
	var s *server
	var n atomic.Int32
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			s = serve(t, pair...)
			return source(t, quick(s))
		},
		Change: func() error {
			s.set(append([]string{fmt.Sprintf("decode.test. 0 IN A 127.0.1.%d", n.Add(1))}, pair...)...)
			return nil
		},
		Break:  func() error { s.twistWith(failing("")); return nil },
		Repair: func() error { s.twistWith(nil); return nil },

		Timeout: 30 * time.Second,
	})
}

func TestAddressesOfNames(t *testing.T) {
	for name, c := range map[string]struct {
		zone []string
		alt  func(*dns.Options)
		want []string
	}{
		"A and AAAA, sorted, each once": {
			[]string{
				"prefill.test. 0 IN A 127.0.0.9", "prefill.test. 0 IN A 127.0.0.1", "prefill.test. 0 IN A 127.0.0.9",
				"prefill.test. 0 IN AAAA ::1",
				"decode.test. 0 IN AAAA 2001:db8::1",
			}, nil,
			[]string{"127.0.0.1:8000 prefill", "127.0.0.9:8000 prefill", "[::1]:8000 prefill",
				"[2001:db8::1]:8000 decode"},
		},
		"IPv4 alone": {
			append([]string{"prefill.test. 0 IN AAAA ::1"}, pair...), func(o *dns.Options) { o.Network = "ip4" },
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode"},
		},
		"IPv6 alone": {
			append([]string{"prefill.test. 0 IN AAAA ::1"}, pair...), func(o *dns.Options) { o.Network = "ip6" },
			[]string{"[::1]:8000 prefill"},
		},
		"one host of both roles": {
			append([]string{"prefill.test. 0 IN A 127.0.0.3", "decode.test. 0 IN A 127.0.0.3"}, pair...), nil,
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode", "127.0.0.3:8000 both"},
		},
		"an encode engine that decodes, too": {
			pair, func(o *dns.Options) { o.Encode = "decode.test" },
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode", "127.0.0.2:8000/encode encode"},
		},
		"names with a dot at the end, in other cases": {
			pair, func(o *dns.Options) { o.Prefill, o.Decode = "Prefill.Test.", "DECODE.test." },
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode"},
		},
		"aliases": {
			[]string{
				"prefill.test. 0 IN CNAME a.test.", "a.test. 0 IN CNAME B.test.", "b.test. 0 IN A 127.0.0.1",
				"decode.test. 0 IN CNAME d.test.", "d.test. 0 IN AAAA ::1",
			}, nil,
			[]string{"127.0.0.1:8000 prefill", "[::1]:8000 decode"},
		},
		"a role without engines": {
			pair[:1], nil, []string{"127.0.0.1:8000 prefill"},
		},
		"one address, written for both kinds": {
			append([]string{"prefill.test. 0 IN AAAA ::ffff:127.0.0.1"}, pair...), nil,
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode"},
		},
		"addresses that nobody has": {
			append(
				[]string{"prefill.test. 0 IN A 0.0.0.0", "prefill.test. 0 IN A 224.0.0.1",
					"prefill.test. 0 IN A 255.255.255.255", "decode.test. 0 IN AAAA fe80::1",
					"decode.test. 0 IN AAAA ::"}, pair...,
			), nil,
			[]string{"127.0.0.1:8000 prefill", "127.0.0.2:8000 decode"},
		},
		"SRV, with ports of their own": {
			[]string{
				"prefill.test. 0 IN SRV 0 10 8100 p-0.test.", "prefill.test. 0 IN SRV 5 0 8101 P-1.test.",
				"p-0.test. 0 IN A 127.0.0.1", "p-1.test. 0 IN AAAA ::1",
				"decode.test. 0 IN SRV 0 10 8200 p-0.test.", "decode.test. 0 IN SRV 0 10 8100 p-0.test.",
			}, func(o *dns.Options) { o.Port = 0 },
			[]string{"127.0.0.1:8100 both", "127.0.0.1:8200 decode", "[::1]:8101 prefill"},
		},
		"SRV: a target of both kinds is one engine; without address, no service, no port: none": {
			[]string{
				"prefill.test. 0 IN SRV 0 10 8100 p-0.test.", "p-0.test. 0 IN A 127.0.0.1", "p-0.test. 0 IN AAAA ::1",
				"decode.test. 0 IN SRV 0 10 8200 gone.test.", "decode.test. 0 IN SRV 0 0 8200 .",
				"decode.test. 0 IN SRV 0 0 0 p-0.test.",
			}, func(o *dns.Options) { o.Port = 0 },
			[]string{"127.0.0.1:8100 prefill"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := watchQuick(t, serve(t, c.zone...), c.alt)
			w.becomes(c.want...)
			assert.Empty(t, w.told())
		})
	}
}

func TestEndpointsCarryWhatOptionsSay(t *testing.T) {
	s := serve(t, "prefill.test. 0 IN AAAA ::1")
	o := quick(s)
	o.Decode, o.Scheme, o.Group, o.Zone, o.Attributes = "", "https", "g", "z",
		map[string]string{"bootstrapPort": "8998"}
	src := source(t, o)
	o.Attributes["bootstrapPort"] = "altered"
	w := watch(t, src)
	w.becomes("[::1]:8000 prefill")
	e := w.set.Load().Endpoints[0]
	assert.Equal(t, []any{"https://[::1]:8000", "g", "z", "8998", discovery.PhaseReady},
		[]any{e.URL.String(), e.Group, e.Zone, e.Attribute("bootstrapPort"), e.Phase})
}

func TestManySRVRecordsComeOverTCP(t *testing.T) {
	var zone, want []string
	for i := range 200 {
		zone = append(zone, fmt.Sprintf("prefill.test. 0 IN SRV 0 10 %d p-%03d.some.quite.long.name.test.", 8000+i, i),
			fmt.Sprintf("p-%03d.some.quite.long.name.test. 0 IN A 127.0.0.1", i))
		want = append(want, fmt.Sprintf("127.0.0.1:%d prefill", 8000+i))
	}
	s := serve(t, zone...)
	w := watchQuick(t, s, func(o *dns.Options) { o.Decode, o.Port, o.MinTTL = "", 0, time.Second })
	w.becomes(want...)
	assert.Contains(t, s.questions(), question{"prefill.test.", wire.TypeSRV, true})
}

func TestAddressesSentAlongAreNotAskedForAgain(t *testing.T) {
	s := serve(t, "prefill.test. 0 IN SRV 0 10 8100 p-0.test.")
	along := records(t, "P-0.test. 0 IN A 127.0.0.1", "other.test. 0 IN A 127.0.0.66", "p-0.test. 0 CH A 127.0.0.66")
	s.twistWith(alters(func(m *wire.Msg) { m.Extra = append(m.Extra, along...) }))
	w := watchQuick(t, s, func(o *dns.Options) { o.Decode, o.Port = "", 0 })
	w.becomes("127.0.0.1:8100 prefill")
	for _, q := range s.questions() {
		assert.Equal(t, wire.TypeSRV, q.kind)
	}
}

// An alias whose target the server does not answer for is asked for itself, and a chain without end is a failure.
func TestAliasesAcrossMessages(t *testing.T) {
	s := serve(t, append(pair, "end.test. 0 IN A 127.0.0.7")...)
	loop := atomic.Bool{}
	s.twistWith(func(_ wire.ResponseWriter, q, m *wire.Msg) bool {
		next := map[string]string{"prefill.test.": "two.test.", "two.test.": "end.test."}
		if loop.Load() {
			next["two.test."] = "prefill.test."
		}
		if to := next[q.Question[0].Name]; to != "" {
			m.Rcode = wire.RcodeSuccess
			m.Answer = records(t, q.Question[0].Name+" 0 IN CNAME "+to)
		}
		return false
	})
	w := watchQuick(t, s, nil)
	w.becomes("127.0.0.2:8000 decode", "127.0.0.7:8000 prefill")
	loop.Store(true)
	w.tells("dns: prefill: the name's aliases do not end (the last list stays)")
	assert.Len(t, w.set.Load().Endpoints, 2)
}

// If the server makes an error of any kind, the list stays, the source reports the reason, and uses the next good
// answer.
func TestFailuresKeepTheLastList(t *testing.T) {
	const noAnswer = "no answer in time"
	for name, c := range map[string]struct {
		twist twist
		want  string
	}{
		"SERVFAIL": {failing(""), "the server answered SERVFAIL"},
		"REFUSED": {alters(func(m *wire.Msg) { m.Rcode, m.Answer = wire.RcodeRefused, nil }),
			"the server answered REFUSED"},
		"an unknown code": {alters(func(m *wire.Msg) { m.Rcode = 14 }),
			"the server answered with an unknown code"},
		"silence":                 {func(wire.ResponseWriter, *wire.Msg, *wire.Msg) bool { return true }, noAnswer},
		"another id":              {alters(func(m *wire.Msg) { m.Id++ }), noAnswer},
		"a question":              {alters(func(m *wire.Msg) { m.Response = false }), noAnswer},
		"another name":            {alters(func(m *wire.Msg) { m.Question[0].Name = "evil.test." }), noAnswer},
		"another type":            {alters(func(m *wire.Msg) { m.Question[0].Qtype = wire.TypeTXT }), noAnswer},
		"another class":           {alters(func(m *wire.Msg) { m.Question[0].Qclass = wire.ClassCHAOS }), noAnswer},
		"another kind of message": {alters(func(m *wire.Msg) { m.Opcode = wire.OpcodeNotify }), noAnswer},
		"no question":             {alters(func(m *wire.Msg) { m.Question = nil }), noAnswer},
		"garbage": {func(w wire.ResponseWriter, _, _ *wire.Msg) bool {
			_, _ = w.Write([]byte(strings.Repeat("x", 900)))
			return true
		}, noAnswer},
		"a short message": {func(w wire.ResponseWriter, _, _ *wire.Msg) bool {
			_, _ = w.Write([]byte("x"))
			return true
		}, noAnswer},
		"a flood": {func(w wire.ResponseWriter, _, m *wire.Msg) bool {
			m.Id++
			for range 300 {
				_ = w.WriteMsg(m)
			}
			return true
		}, "the answer cannot be read"},
		"truncated over TCP": {func(w wire.ResponseWriter, _, m *wire.Msg) bool {
			m.Truncated = true
			_ = w.WriteMsg(m)
			return true
		}, "the answer cannot be read"},
		"a referral to other servers": {alters(func(m *wire.Msg) {
			m.Answer, m.Ns = nil, records(t, "test. 0 IN NS ns.other.")
		}), "the server refers to others"},
		"an alias, and a referral": {func(_ wire.ResponseWriter, q, m *wire.Msg) bool {
			m.Answer, m.Ns = records(t, q.Question[0].Name+" 0 IN CNAME x.other."),
				records(t, "other. 0 IN NS ns.other.")
			if q.Question[0].Name == "x.other." {
				m.Answer = nil
			}
			m.Rcode = wire.RcodeSuccess
			return false
		}, "the server refers to others"},
		"a loop of aliases": {func(_ wire.ResponseWriter, q, m *wire.Msg) bool {
			name := q.Question[0].Name
			m.Answer = records(t, name+" 0 IN CNAME x.test.", "x.test. 0 IN CNAME "+name)
			return false
		}, "the name's aliases do not end"},
		"aliases without end": {func(_ wire.ResponseWriter, q, m *wire.Msg) bool {
			m.Rcode, m.Answer = wire.RcodeSuccess, records(t, q.Question[0].Name+" 0 IN CNAME x"+q.Question[0].Name)
			return false
		}, "the name's aliases do not end"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, pair...)
			w := watchQuick(t, s, func(o *dns.Options) {
				if c.want == noAnswer {
					o.Timeout = 200 * time.Millisecond
				}
			})
			w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
			version := w.set.Load().Version
			s.twistWith(c.twist)
			w.tells(c.want + "; decode: " + c.want + " (the last list stays)")
			assert.Equal(t, version, w.set.Load().Version)
			for _, text := range w.told() {
				assert.NotContains(t, text, "127.0.0")
				assert.NotContains(t, text, ".test")
			}
			s.set("prefill.test. 0 IN A 127.0.0.5", "decode.test. 0 IN A 127.0.0.6")
			s.twistWith(nil)
			w.becomes("127.0.0.5:8000 prefill", "127.0.0.6:8000 decode")
		})
	}
}

// Records of other names, other classes and other types in an answer change nothing.
func TestForeignRecordsAreLeftAlone(t *testing.T) {
	s := serve(t, pair...)
	foreign := records(t, "evil.test. 0 IN A 127.0.0.66", "prefill.test. 0 IN AAAA ::66",
		"prefill.test. 0 CH A 127.0.0.66", "prefill.test. 0 CH CNAME evil.test.", "prefill.test. 0 IN TXT x",
		"prefill.test. 0 IN SRV 0 0 1 evil.test.")
	s.twistWith(alters(func(m *wire.Msg) {
		m.Answer = append(m.Answer, foreign...)
		m.Extra = append(m.Extra, records(t, "prefill.test. 0 IN A 127.0.0.66")...)
	}))
	w := watchQuick(t, s, func(o *dns.Options) { o.Network = "ip4" })
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	time.Sleep(50 * time.Millisecond)
	assert.Len(t, w.set.Load().Endpoints, 2)
}

// A late answer to an earlier question, or a forged one, does not keep the right one from being heard.
func TestTheRightAnswerIsHeardAmongOthers(t *testing.T) {
	s := serve(t, pair...)
	s.twistWith(func(w wire.ResponseWriter, _, m *wire.Msg) bool {
		forged := m.Copy()
		forged.Id++
		forged.Answer = records(t, "prefill.test. 0 IN A 127.0.0.66")
		if _, udp := w.RemoteAddr().(*net.UDPAddr); udp {
			_ = w.WriteMsg(forged)
			_, _ = w.Write([]byte("garbage"))
		}
		return false
	})
	w := watchQuick(t, s, nil)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	assert.Empty(t, w.told())
}

// RFC 6891, 7: a server that does not know EDNS answers FORMERR, and is asked without it.
func TestAServerWithoutEDNSIsAskedWithoutIt(t *testing.T) {
	s := serve(t, pair...)
	s.twistWith(func(w wire.ResponseWriter, q, m *wire.Msg) bool {
		if q.IsEdns0() == nil {
			return false
		}
		old := &wire.Msg{MsgHdr: wire.MsgHdr{Id: q.Id, Response: true, Rcode: wire.RcodeFormatError}}
		_ = w.WriteMsg(old)
		return true
	})
	w := watchQuick(t, s, nil)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	assert.Empty(t, w.told())
}

// However the context ends, in the middle of a question too, Watch returns at once.
func TestTheEndOfTheContextEndsAQuestion(t *testing.T) {
	s := serve(t, pair...)
	asked := make(chan struct{}, 100)
	s.twistWith(func(wire.ResponseWriter, *wire.Msg, *wire.Msg) bool {
		asked <- struct{}{}
		return true
	})
	o := quick(s)
	o.Timeout = time.Minute
	src := source(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- src.Watch(ctx, func(discovery.Snapshot) { assert.Fail(t, "published") }) }()
	<-asked
	cancel()
	select {
	case err := <-done:
		assert.NoError(t, err)
	case <-time.After(20 * time.Second):
		assert.Fail(t, "Watch goes on")
	}
}

func TestASourceIsWatchedOnceAtATime(t *testing.T) {
	src := source(t, quick(serve(t, pair...)))
	w := watch(t, src)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	require.EqualError(t, src.Watch(t.Context(), func(discovery.Snapshot) { assert.Fail(t, "published") }),
		"dns: the source is being watched already")
}

func TestWhatNewRefuses(t *testing.T) {
	good := dns.Options{Prefill: "p.example", Port: 8000}
	for want, alter := range map[string]func(o *dns.Options){
		"dns: no name is given: want Prefill, Decode or Encode": func(o *dns.Options) { o.Prefill = "" },
		"dns: Prefill is not a domain name":                     func(o *dns.Options) { o.Prefill = "http://hunter2" },
		"dns: Decode is not a domain name": func(o *dns.Options) {
			o.Decode = strings.Repeat("hunter2.", 40)
		},
		"dns: Encode is an address, not a name":   func(o *dns.Options) { o.Encode = "10.0.0.1" },
		"dns: Port is not one of 0 to 65535":      func(o *dns.Options) { o.Port = 70000 },
		"dns: Network is not one of ip, ip4, ip6": func(o *dns.Options) { o.Network = "hunter2" },
		"dns: Scheme is not http or https":        func(o *dns.Options) { o.Scheme = "hunter2" },
		"dns: Resolver is not HOST:PORT":          func(o *dns.Options) { o.Resolver = "hunter2" },
	} {
		o := good
		alter(&o)
		_, err := dns.New(&o)
		require.EqualError(t, err, want)
	}
	_, err := dns.New(nil)
	require.Error(t, err)
	for _, name := range []string{"..", "a..b", ".", ".a", "a b", "a:1", "é.example", "::1"} {
		require.Error(t, dns.CheckName(name), name)
	}
	for _, name := range []string{"a", "a.", "_http._tcp.prefill.llm.svc.cluster.local", "A-1.b"} {
		require.NoError(t, dns.CheckName(name), name)
	}
}

// Any bytes that a server may send are read without a panic, and give no more than they hold.
func FuzzAnswer(f *testing.F) {
	add := func(kind uint16, lines ...string) {
		m := new(wire.Msg).SetQuestion("prefill.test.", kind)
		m.Response = true
		m.Answer = records(f, lines...)
		m.Extra = records(f, "p.test. 1 IN A 127.0.0.1", "p.test. 1 IN AAAA ::1")
		m.Ns = records(f, "test. 1 IN SOA a. b. 1 2 3 4 5")
		p, err := m.Pack()
		require.NoError(f, err)
		f.Add(p, kind)
	}
	add(wire.TypeA, "prefill.test. 1 IN A 127.0.0.1", "prefill.test. 1 IN CNAME a.test.",
		"a.test. 1 IN CNAME prefill.test.")
	add(wire.TypeAAAA, "prefill.test. 1 IN CNAME a.test.", "a.test. 1 IN AAAA ::1")
	add(wire.TypeSRV, "prefill.test. 1 IN SRV 1 2 3 p.test.", "prefill.test. 1 IN SRV 1 2 3 .")
	add(wire.TypeA)
	f.Fuzz(func(t *testing.T, data []byte, kind uint16) {
		m := new(wire.Msg)
		if m.Unpack(data) != nil {
			return
		}
		addrs, services, alias, err := dns.Read(m, "prefill.test.", kind)
		if err != nil {
			assert.Zero(t, addrs+services)
			assert.Empty(t, alias)
			return
		}
		assert.LessOrEqual(t, addrs+services, len(m.Answer))
		if addrs+services > 0 {
			assert.Empty(t, alias)
		}
		if alias != "" {
			_, known := wire.IsDomainName(alias)
			assert.True(t, known)
		}
	})
}
