// SPDX-License-Identifier: Apache-2.0

package dns_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	wire "github.com/miekg/dns"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/dns"
)

// One role's failure leaves its list and does not keep the other's from changing.
func TestRolesFailByThemselves(t *testing.T) {
	s, w := watchPair(t)
	s.twistWith(failing("decode.test."))
	s.set("prefill.test. 0 IN A 127.0.0.5")
	w.becomes("127.0.0.2:8000 decode", "127.0.0.5:8000 prefill")
	w.tells("dns: decode: the server answered SERVFAIL (the last list stays)")
}

// Half an answer, IPv4 without IPv6, is not taken for the whole.
func TestAKindOfAddressThatFailsFailsTheName(t *testing.T) {
	s := serve(t, append(pair, "prefill.test. 0 IN AAAA ::1")...)
	w := watchQuick(t, s, nil)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode", "[::1]:8000 prefill")
	s.twistWith(alters(func(m *wire.Msg) {
		if m.Question[0].Qtype == wire.TypeAAAA {
			m.Rcode, m.Answer = wire.RcodeServerFailure, nil
		}
	}))
	w.tells("SERVFAIL")
	assert.Len(t, w.set.Load().Endpoints, 3)
}

// Nor is one of two services: a target that cannot be answered for fails the name.
func TestATargetThatFailsFailsTheName(t *testing.T) {
	s := serve(t, "prefill.test. 0 IN SRV 0 0 1 a.test.", "prefill.test. 0 IN SRV 0 0 1 b.test.",
		"a.test. 0 IN A 127.0.0.1", "b.test. 0 IN A 127.0.0.2")
	w := watchQuick(t, s, func(o *dns.Options) { o.Port, o.Decode = 0, "" })
	w.becomes("127.0.0.1:1 prefill", "127.0.0.2:1 prefill")
	s.twistWith(failing("b.test."))
	w.tells("SERVFAIL")
	assert.Len(t, w.set.Load().Endpoints, 2)
}

// Before the first list each role must have been answered for: prefill engines alone are half a list.
func TestNoListIsHalf(t *testing.T) {
	s := serve(t, pair...)
	s.twistWith(failing("decode.test."))
	w := watchQuick(t, s, nil)
	w.tells("dns: decode: the server answered SERVFAIL (there is no list yet)")
	assert.Zero(t, w.set.Load().Version)
	s.twistWith(nil)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	assert.EqualValues(t, 1, w.set.Load().Version, "both roles came as one")
}

// Both ways of saying that a name is not there, NXDOMAIN and no records, are believed when they have been said often
// enough.
func TestANameThatIsGoneIsToleratedSomeTimes(t *testing.T) {
	for name, zone := range map[string][]string{
		"NXDOMAIN":   {pair[0]},
		"no records": {pair[0], "decode.test. 0 IN TXT x"},
	} {
		for tolerated, rounds := range map[int]int32{0: 4, 1: 2, 5: 6, -1: 1} {
			t.Run(fmt.Sprint(name, " ", tolerated), func(t *testing.T) {
				s := serve(t, pair...)
				o := quick(s)
				o.NotFound, o.Network = tolerated, "ip4"
				src := source(t, o)
				src.TellEvery(time.Hour) // one error, and so no pauses of the set's
				var gone, atTheEnd atomic.Int32
				w := watch(t, discovery.SourceFunc(func(ctx context.Context, publish func(discovery.Snapshot)) error {
					return src.Watch(ctx, func(snap discovery.Snapshot) {
						if len(snap.Endpoints) == 1 {
							atTheEnd.CompareAndSwap(0, gone.Load()) // before the next round
						}
						publish(snap)
					})
				}))
				w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
				s.twistWith(alters(func(m *wire.Msg) {
					if m.Question[0].Name == "decode.test." && len(m.Answer) == 0 {
						gone.Add(1)
					}
				}))
				s.set(zone...)
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				require.NoError(t, w.set.WaitReady(ctx, func(snap *discovery.Snapshot) bool {
					return len(snap.Endpoints) < 2
				}))
				assert.Equal(t, rounds, atTheEnd.Load(), "rounds without the name")
				assert.Equal(t, []string{"127.0.0.1:8000 prefill"}, list(w.set.Load()))
				if tolerated >= 0 {
					w.tells("dns: decode: the name has no records (the last list stays)")
				}
				s.set(pair...)
				w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
			})
		}
	}
}

func TestANameThatComesBackInTimeWasNeverGone(t *testing.T) {
	s := serve(t, pair...)
	o := quick(s)
	o.NotFound = 2
	src := source(t, o)
	src.TellEvery(time.Hour) // one error, and so no pauses of the set's
	w := watch(t, src)
	w.becomes("127.0.0.1:8000 prefill", "127.0.0.2:8000 decode")
	version := w.set.Load().Version
	var n atomic.Int32
	s.twistWith(alters(func(m *wire.Msg) {
		if n.Add(1)%12 < 4 { // one round of three: each asks four questions
			m.Rcode, m.Answer = wire.RcodeNameError, nil
		}
	}))
	require.Eventually(t, func() bool { return n.Load() > 60 }, 30*time.Second, time.Millisecond)
	assert.Equal(t, version, w.set.Load().Version)
}

func TestAnOutageIsToldOnce(t *testing.T) {
	s := serve(t, pair...)
	// one question: no round has a part of the outage only, and another reason
	w := watchQuick(t, s, func(o *dns.Options) { o.Decode, o.Network = "", "ip4" })
	w.becomes("127.0.0.1:8000 prefill")
	s.twistWith(failing(""))
	w.tells("SERVFAIL")
	time.Sleep(300 * time.Millisecond) // some rounds more
	assert.Len(t, w.told(), 1)
}
