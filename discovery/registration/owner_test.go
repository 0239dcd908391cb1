// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
)

// pings announces an engine over and over on a connection of its own.
func pings(t testing.TB, address string, message obj) (stop func()) {
	t.Helper()
	send, closeIt := engine(t, address)
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			send(message)
			select {
			case <-time.After(20 * time.Millisecond):
			case <-quit:
				return
			}
		}
	}()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			close(quit)
			<-ended
			closeIt()
		}
	}
	t.Cleanup(stop)
	return stop
}

// Nobody is asked for a name at the ZeroMQ side, but whoever announces an engine first is the one who speaks for it, as
// long as he does.
func TestOnePeerCannotSpeakForTheEngineOfAnother(t *testing.T) {
	const id = "10.0.1.1:20001"
	for rule, intruder := range map[string]obj{
		"change its role":              {"type": "D", "http_address": id, "zmq_address": "10.0.1.1:21001"},
		"lead other engines elsewhere": {"type": "P", "http_address": id, "zmq_address": "10.6.6.6:21001"},
		"take its name, and so let it leave": {"type": "P", "http_address": "10.6.6.6:20001",
			"zmq_address": "10.0.1.1:21001"},
	} {
		t.Run(rule, func(t *testing.T) {
			s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: time.Minute})
			set := watched(t, s)
			pings(t, s.Addr(), p2p("P", 1))
			until(t, set, map[string]string{id: "prefill/ready"})
			unchanged := always(t, s, func(e discovery.Endpoint) {
				if e.ID == id {
					assert.Equal(t, "prefill/ready 10.0.1.1:21001", e.Role.String()+"/"+e.Phase.String()+" "+
						e.Attribute("zmqAddress"))
				}
			})
			send, _ := engine(t, s.Addr())
			send(p2p("P", 1)) // who repeats what is known has no more right for it
			for range 5 {
				send(intruder)
			}
			require.Eventually(t, func() bool { return s.Counts().Held == 5 }, 20*time.Second, time.Millisecond, "%+v",
				s.Counts())
			unchanged()
			until(t, set, map[string]string{id: "prefill/ready"})
		})
	}
}

// An engine that comes back, in another shape, comes by another connection: the first one has ended, or is not heard
// any more.
func TestWhoComesBackSpeaksForItself(t *testing.T) {
	t.Parallel()
	for rule, c := range map[string]struct {
		ends, keeps bool
	}{
		"its connection has ended":                        {ends: true},
		"nobody told of its end":                          {},
		"nobody told of its end, and it was never away":   {keeps: true},
		"it was never away, and its connection has ended": {ends: true, keeps: true},
	} {
		t.Run(rule, func(t *testing.T) {
			t.Parallel()
			expiry := 3 * time.Second
			long := expiry + expiry/2
			if c.ends {
				expiry = time.Minute // it is not waited for
			}
			s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: expiry})
			set := watched(t, s)
			send, closeIt := engine(t, s.Addr())
			send(p2p("P", 1))
			until(t, set, map[string]string{idOf(1): "prefill/ready"})
			if c.ends {
				closeIt()
			}
			again, _ := engine(t, s.Addr())
			if c.keeps {
				intruder, _ := engine(t, s.Addr())
				for began := time.Now(); time.Since(began) < long; time.Sleep(20 * time.Millisecond) {
					again(p2p("P", 1))
					require.Len(t, set.Load().Endpoints, 1)
					require.Equal(t, discovery.PhaseReady, set.Load().Endpoints[0].Phase,
						"what another connection says, too, keeps it")
				}
				intruder(p2p("D", 1))
				require.Eventually(t, func() bool {
					again(p2p("P", 1)) // who falls silent for the expiry loses its right
					return s.Counts().Held == 1
				}, 30*time.Second, 20*time.Millisecond, "it speaks for the engine now, and nobody else")
			}
			require.Eventually(t, func() bool {
				again(p2p("D", 1))
				e := set.Load().Endpoints
				return len(e) == 1 && e[0].Role == discovery.RoleDecode
			}, 30*time.Second, 20*time.Millisecond)
		})
	}
}

// One connection speaks for 64 engines at once; those that have left are not counted.
func TestARelayMaySpeakForOthersInTheirTurn(t *testing.T) {
	t.Parallel()
	s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: 4 * time.Second})
	set := watched(t, s)
	send, _ := engine(t, s.Addr())
	count := func(n int) func(*discovery.Snapshot) bool {
		return func(snap *discovery.Snapshot) bool { return len(snap.Endpoints) == n }
	}
	for i := range 65 {
		send(p2p("P", i))
	}
	require.NoError(t, set.WaitReady(t.Context(), count(64)))
	require.NoError(t, set.WaitReady(t.Context(), count(0)))
	assert.EqualValues(t, 1, s.Counts().Surplus)
	for i := range 64 {
		send(p2p("P", 100+i))
	}
	require.NoError(t, set.WaitReady(t.Context(), count(64)))
	assert.EqualValues(t, 1, s.Counts().Surplus)
}
