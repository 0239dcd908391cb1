// SPDX-License-Identifier: Apache-2.0

package decide_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/pdkit/pdkit/connector/all" // all connectors

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/check"
	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// needed are the settings of the connectors that require some.
var needed = map[string]string{
	"multi":            `{"connectors":[{"type":"nixl"},{"type":"sharedstorage"}]}`,
	"ascend-layerwise": `{"callbackListen":"127.0.0.1:8900","callbackURL":"http://127.0.0.1:8900"}`,
}

// full has each attribute that any connector wants of an engine's entry.
const full = "engineID=e zmqAddress=10.0.0.1:21001 sideChannelHost=10.0.0.1 sideChannelPort=5600 bootstrapPort=8998 " +
	"p2pHost=10.0.0.1 p2pPort=7777 notifyPort=61005 handshakePort=6301 store=a"

// own are attributes that only one connector's engines may have.
var own = map[string]string{
	"lmcache-pd": "receiverHost=10.0.0.1 receiverInitPorts=8300 receiverAllocPorts=8400",
	"moriio":     "zmqAddress=host:10.0.0.1,handshake:6301,notify:61005 mode=write",
}

// eager are policies that want one engine to serve, whatever they are told.
func eager() map[string]decide.Policy {
	forced := func(d decide.Decision) decide.Policy {
		return decide.Func(func(_ *decide.Input, out *decide.Decision) { *out = d })
	}
	return map[string]decide.Policy{"never": decide.Never(), "threshold": decide.Threshold(1e9, 1e9),
		"predicted":     decide.Predicted(decide.PredictedOptions{}),
		"decode alone":  forced(decide.Decision{Action: decide.DecodeAlone, Decode: 0}),
		"any alone":     forced(decide.Decision{Action: decide.DecodeAlone, Prefill: decide.Any, Decode: decide.Any}),
		"prefill alone": forced(decide.Decision{Action: decide.PrefillAlone, Prefill: 0}),
		"no such":       forced(decide.Decision{Action: decide.Split, Prefill: 99, Decode: 99}),
		"refuse":        forced(decide.Decision{Action: decide.Refuse})}
}

// What an engine says of a request that this picker has sent is nobody else's, whether decode engines get it while the
// prefill runs or after it, and also where the prefill runs on after the attempt has ended.
func TestOwnRequestsAreNotTakenForOthers(t *testing.T) {
	for typ, there := range map[string]int{"nixl": 0, "mooncake": 1} { // at the decode engine before prefill has ended
		conn, err := connector.Open(config.Spec{Type: typ})
		require.NoError(t, err)
		now, running := time.Now(), there
		policy := &spy{Policy: decide.Always()}
		p := around(t, newSet(t, engines(1, full)...), policy, &decide.Options{Now: func() time.Time { return now },
			Load: func(id string) inspect.Load {
				if id != "d0" {
					return inspect.Load{At: now, Running: 1}
				}
				return inspect.Load{At: now, Running: running}
			}}).Bind(conn, conn.Traits().Serving)
		in := &pdflow.PickInput{Request: completion(t, text(396))}
		first := mustPick(t, p, in)
		now = now.Add(time.Second)
		mustPick(t, p, in).Done(&pdflow.Outcome{})
		assert.Zero(t, policy.last().Decode[0].Running, typ)
		first.Done(&pdflow.Outcome{PrefillRuns: true})
		now, running = now.Add(time.Second), 1 // one of others has come
		mustPick(t, p, in).Done(&pdflow.Outcome{})
		assert.Equal(t, 1, policy.last().Decode[0].Running, typ)
		first.PrefillDone(&pdflow.LegOutcome{})
	}
}

// A policy decides within what a connector allows, whatever it wants: of all connectors there are.
func TestWhatAConnectorForbidsStaysForbidden(t *testing.T) {
	alone, pairs := map[string]int{}, map[string]bool{}
	for _, typ := range names.Connectors() {
		if typ == "relay" { // it takes no part in requests
			continue
		}
		spec := config.Spec{Type: typ}
		if needed[typ] != "" {
			spec.Config = json.RawMessage(needed[typ])
		}
		conn, err := connector.Open(spec)
		require.NoError(t, err, typ)
		serving, rules := conn.Traits().Serving, check.Of(conn)
		told := full + " " + own[typ]
		eps := engines(2, told)
		if !serving.PrefillPairOnly {
			eps = append(eps, engine("b0", discovery.RoleBoth, told), engine("b1", discovery.RoleBoth, told))
		}
		set := newSet(t, eps...)
		for _, inner := range []pick.Policy{pick.TwoChoices(), pick.PrefixAffinity()} {
			undecided := pick.New(set, inner).Bind(conn, serving)
			for name, policy := range eager() {
				for _, o := range [][]pick.Option{{pick.WithCandidates()}, nil} {
					p, err := decide.New(pick.New(set, inner, o...), policy, &decide.Options{Engine: h100s})
					require.NoError(t, err)
					bound := p.Bind(conn, serving)
					for _, in := range []*pdflow.PickInput{{}, {Encode: 1}, {Single: true},
						{Attempt: 2, Avoid: []string{"d0"}}, {Decode: "d1"}, {Prefill: "p1"}} {
						in.Request = completion(t, text(100))
						x, err := bound.Pick(t.Context(), in)
						at := []any{"%s, %s, %+v: %s+%s %v", typ, name, in, x.Prefill.ID, x.Decode.ID, err}
						if err != nil { // the same as without decisions
							_, other := undecided.Pick(t.Context(), in)
							require.Error(t, other, at...)
							continue
						}
						switch {
						case x.Prefill.URL != nil:
							require.NoError(t, rules.CheckPair(x.Prefill, x.Decode), at...)
							require.False(t, in.Single, at...)
						case serving.PairOnly:
							require.Equal(t, discovery.RoleBoth, x.Decode.Role, at...)
						case serving.PrefillPairOnly:
							require.Equal(t, discovery.RoleDecode, x.Decode.Role, at...)
						}
						require.NotEqual(t, "changed", x.Reason, at...) // what is decided can be picked
						plain, err := undecided.Pick(t.Context(), in)
						require.NoError(t, err, at...)
						plain.Done(&pdflow.Outcome{})
						pairs[typ] = pairs[typ] || x.Prefill.URL != nil
						if x.Prefill.URL == nil && plain.Prefill.URL != nil {
							alone[typ]++
							require.Zero(t, in.Encode, at...)
							require.Contains(t, []string{"", x.Decode.ID}, in.Decode, at...)
							require.Contains(t, []string{"", x.Decode.ID}, in.Prefill, at...)
						}
						x.Done(&pdflow.Outcome{})
					}
					require.NoError(t, p.Close())
				}
			}
		}
	}
	for _, typ := range names.Connectors() {
		if typ != "relay" {
			assert.True(t, pairs[typ], "%s: there are pairs", typ)
			assert.Positive(t, alone[typ], "%s: some engine may serve alone", typ)
		}
	}
}
