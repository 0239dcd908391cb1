// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
)

// waits runs one round, and wants the time from its end to the next one to be want, or a tenth more at most.
func waits(t *testing.T, o *dns.Options, want time.Duration) {
	t.Helper()
	s := source(t, o)
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_ = s.Watch(ctx, func(discovery.Snapshot) { cancel() })  // an error is what some of the rounds have
	least, most := time.Until(s.Next()), s.Next().Sub(began) // they differ by what the round took
	assert.GreaterOrEqual(t, most, want)
	assert.Less(t, least, want+want/10+time.Millisecond, "a tenth more at most")
}

func TestTheTimeToTheNextRound(t *testing.T) {
	for name, c := range map[string]struct {
		zone []string
		min  time.Duration
		alt  func(*dns.Options)
	}{
		"the shortest TTL": {[]string{"prefill.test. 20 IN A 127.0.0.1", "decode.test. 7 IN A 127.0.0.2"},
			7 * time.Second, nil},
		"an alias's TTL counts": {
			[]string{"prefill.test. 5 IN CNAME a.test.", "a.test. 20 IN A 127.0.0.1", "decode.test. 7 IN A 127.0.0.2"},
			5 * time.Second, nil,
		},
		"no less than MinTTL": {pair, time.Second, nil},
		"no more than MaxTTL": {[]string{"prefill.test. 3600 IN A 127.0.0.1", "decode.test. 7200 IN A 127.0.0.2"},
			30 * time.Second, nil},
		"a TTL beyond 31 bits": {[]string{"prefill.test. 2147483648 IN A 127.0.0.1", "decode.test. 7 IN A 127.0.0.2"},
			time.Second, nil},
		"bounds of one's own": {
			[]string{"prefill.test. 3600 IN A 127.0.0.1", "decode.test. 3600 IN A 127.0.0.2"}, 2 * time.Minute,
			func(o *dns.Options) { o.MaxTTL = 2 * time.Minute },
		},
		"MinTTL is more than MaxTTL": {
			pair, 2 * time.Minute,
			func(o *dns.Options) { o.MinTTL = 2 * time.Minute },
		},
		"a service's TTL counts": {
			[]string{"prefill.test. 5 IN SRV 0 0 1 p.test.", "p.test. 20 IN A 127.0.0.1"}, 5 * time.Second,
			func(o *dns.Options) { o.Port, o.Decode = 0, "" },
		},
		"a target's TTL counts": {
			[]string{"prefill.test. 20 IN SRV 0 0 1 p.test.", "p.test. 6 IN A 127.0.0.1"}, 6 * time.Second,
			func(o *dns.Options) { o.Port, o.Decode = 0, "" },
		},
		"the lack of IPv6 does not": {
			[]string{"prefill.test. 20 IN A 127.0.0.1"}, 20 * time.Second, func(o *dns.Options) { o.Decode = "" },
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := quick(serve(t, c.zone...))
			o.MinTTL = 0
			if c.alt != nil {
				c.alt(o)
			}
			waits(t, o, c.min)
		})
	}
}

func TestHowLongTheLackOfRecordsHolds(t *testing.T) {
	for name, c := range map[string]struct {
		soa  string
		want time.Duration
	}{
		"as long as the zone says":              {"test. 20 IN SOA a. b. 1 2 3 4 7", 7 * time.Second},
		"no longer than the zone's own record":  {"test. 6 IN SOA a. b. 1 2 3 4 20", 6 * time.Second},
		"MinTTL where the server does not say":  {"test. 20 IN TXT x", time.Second},
		"no longer than MaxTTL, as all answers": {"test. 7200 IN SOA a. b. 1 2 3 4 7200", 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t)
			s.twistWith(alters(func(m *wire.Msg) { m.Ns = records(t, c.soa) }))
			o := quick(s)
			o.MinTTL = 0
			waits(t, o, c.want)
		})
	}
}

// Of the addresses that came with a service, the one that is to be asked for again first counts.
func TestTheTimeToLiveOfAddressesSentAlongCounts(t *testing.T) {
	s := serve(t, "prefill.test. 20 IN SRV 0 0 1 p.test.")
	s.twistWith(alters(func(m *wire.Msg) {
		m.Extra = records(t, "p.test. 15 IN A 127.0.0.1", "p.test. 6 IN A 127.0.0.2", "p.test. 15 IN A 127.0.0.3")
	}))
	o := quick(s)
	o.Port, o.Decode = 0, ""
	waits(t, o, 6*time.Second)
}

// The name is asked again when its time is over, and not before.
func TestNothingIsAskedBeforeItsTimeIsOver(t *testing.T) {
	s := serve(t, "prefill.test. 1 IN A 127.0.0.1")
	began := time.Now()
	watchQuick(t, s, func(o *dns.Options) { o.Decode, o.Network = "", "ip4" }).becomes("127.0.0.1:8000 prefill")
	time.Sleep(1500 * time.Millisecond)
	asked := len(s.questions())
	assert.LessOrEqual(t, asked, 1+int(time.Since(began)/time.Second))
	assert.Eventually(t, func() bool { return len(s.questions()) >= 2 }, 20*time.Second, 10*time.Millisecond)
}

// While the server fails it is asked ever more rarely, and after it was well as soon as at first.
func TestAServerThatFailsIsAskedEverMoreRarely(t *testing.T) {
	s := serve(t, pair...)
	o := quick(s)
	o.Decode, o.Network = "", "ip4"
	src := source(t, o)
	src.TellEvery(time.Hour) // one error, and so no pauses of the set's
	w := watch(t, src)
	w.becomes("127.0.0.1:8000 prefill")
	var mu sync.Mutex
	var asked []time.Time // twice in each round
	fails := func() {
		mu.Lock()
		asked = nil
		mu.Unlock()
		s.twistWith(alters(func(m *wire.Msg) {
			m.Rcode, m.Answer = wire.RcodeServerFailure, nil
			mu.Lock()
			defer mu.Unlock()
			asked = append(asked, time.Now())
		}))
	}
	pauseAfter := func(n int) time.Duration {
		require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(asked) > 2*n }, 20*time.Second,
			time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		return asked[2*n].Sub(asked[2*n-1])
	}
	fails()
	assert.GreaterOrEqual(t, pauseAfter(7), 600*time.Millisecond, "10 ms, doubled six times")
	s.set("prefill.test. 0 IN A 127.0.0.9")
	s.twistWith(nil)
	w.becomes("127.0.0.9:8000 prefill")
	fails()
	// 10, 20 and 40 ms, of which one may take longer on a busy machine
	assert.Less(t, min(pauseAfter(1), pauseAfter(2), pauseAfter(3)), 600*time.Millisecond)
}

// Two outages are two errors, although they are the same.
func TestTheNextOutageIsToldAgain(t *testing.T) {
	s := serve(t, pair...)
	w := watchQuick(t, s, func(o *dns.Options) { o.Network = "ip4" })
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	for i := range 2 {
		// One question alone: if several failed, a round might have a part of the outage only, and another reason.
		s.twistWith(failing("decode.test."))
		require.Eventually(t, func() bool { return len(w.told()) > i }, 30*time.Second, time.Millisecond)
		at := fmt.Sprintf("127.0.1.%d", i)
		s.twistWith(nil)
		before := len(s.questions())
		require.Eventually(t, func() bool { // a whole round that is good
			n := 0
			for _, q := range s.questions()[before:] {
				if q.name == "decode.test." {
					n++
				}
			}
			return n > 1
		}, 30*time.Second, time.Millisecond)
		s.set("prefill.test. 0 IN A "+at, pair[1])
		// one role's change is a change, whatever the other's answer is
		w.becomes("127.0.0.2:8000 decode", at+":8000 prefill")
	}
	assert.Len(t, w.told(), 2)
}

// Servers turn their answers around, and say things twice: that is no change.
func TestTheOrderOfAnswersIsNoChange(t *testing.T) {
	s := serve(t, "prefill.test. 0 IN A 127.0.0.1", "prefill.test. 0 IN A 127.0.0.2", "prefill.test. 0 IN A 127.0.0.3")
	var n atomic.Int32
	s.twistWith(alters(func(m *wire.Msg) {
		if i := n.Add(1); len(m.Answer) == 3 {
			m.Answer = append(m.Answer[i%3:], m.Answer[:i%3+i%2]...)
		}
	}))
	o := quick(s)
	o.Decode, o.Network = "", "ip4"
	ctx, cancel := context.WithCancel(t.Context())
	published := 0
	done := make(chan error)
	src := source(t, o)
	go func() { done <- src.Watch(ctx, func(discovery.Snapshot) { published++ }) }()
	require.Eventually(t, func() bool { return n.Load() > 12 }, 30*time.Second, time.Millisecond)
	cancel()
	require.NoError(t, <-done)
	assert.Equal(t, 1, published)
}

// A datagram may get lost: each question is asked twice. And the name in an answer may be written in other letters.
func TestADatagramIsLost(t *testing.T) {
	s := serve(t, pair...)
	var mu sync.Mutex
	seen := map[question]bool{}
	s.twistWith(func(_ wire.ResponseWriter, q, m *wire.Msg) bool {
		mu.Lock()
		defer mu.Unlock()
		this := question{q.Question[0].Name, q.Question[0].Qtype, false}
		lost := !seen[this]
		seen[this] = !seen[this]
		m.Question = []wire.Question{
			{Name: strings.ToUpper(q.Question[0].Name), Qtype: q.Question[0].Qtype, Qclass: wire.ClassINET},
		}
		return lost
	})
	w := watchQuick(t, s, func(o *dns.Options) { o.Timeout = 2 * time.Second }) // which a lost one costs
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	assert.Empty(t, w.told())
}

// What fits into a datagram that any network carries whole comes as one, since servers are told that it may.
func TestAnAnswerOfSomeSizeComesInOneDatagram(t *testing.T) {
	var zone, want []string
	for i := range 60 { // about 1,000 bytes
		zone = append(zone, fmt.Sprintf("prefill.test. 0 IN A 127.0.0.%d", i+1))
		want = append(want, fmt.Sprintf("127.0.0.%d:8000 prefill", i+1))
	}
	s := serve(t, zone...)
	watchQuick(t, s, func(o *dns.Options) { o.Decode = "" }).becomes(want...)
	for _, q := range s.questions() {
		assert.False(t, q.tcp)
	}
}

// A server that says FORMERR and knows EDNS means something else by it: it is not asked without.
func TestAServerWithEDNSIsNotAskedWithoutIt(t *testing.T) {
	s := serve(t, pair...)
	var without atomic.Int32
	s.twistWith(func(w wire.ResponseWriter, q, m *wire.Msg) bool {
		if _, udp := w.RemoteAddr().(*net.UDPAddr); udp && q.IsEdns0() == nil {
			without.Add(1)
		}
		m.Rcode, m.Answer = wire.RcodeFormatError, nil
		return false
	})
	w := watchQuick(t, s, nil)
	w.tells("FORMERR")
	assert.Zero(t, without.Load())
}

// An alias of a name that is not there is answered for: the name behind it is not asked for by itself.
func TestAnAliasOfNothingIsAnswered(t *testing.T) {
	s := serve(t, "prefill.test. 0 IN CNAME nowhere.test.")
	s.twistWith(alters(func(m *wire.Msg) { m.Rcode = wire.RcodeNameError }))
	watchQuick(t, s, func(o *dns.Options) { o.Decode = "" }).becomes()
	for _, q := range s.questions() {
		assert.Equal(t, "prefill.test.", q.name)
	}
}
