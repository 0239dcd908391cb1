// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// Streams that outlive their decode engine: the client gets byte for byte what it gets of an engine that lives.

var kills = flag.Int("kills", 150, "how many streams TestKilledStreamsGoOn breaks")

// varying is what differs between two runs of one request with one id: the second in which the engine began, and what
// it happened to have in its cache.
var varying = regexp.MustCompile(`"created":\d+|,"prompt_tokens_details":\{[^}]*\}`)

func sameOf(body string) string {
	return varying.ReplaceAllStringFunc(body, func(s string) string {
		if strings.HasPrefix(s, ",") {
			return ""
		}
		return `"created":0`
	})
}

// rescueCase is a request whose stream can be rescued.
type rescueCase struct{ name, path, body string }

func rescueCases(tokens int) []rescueCase {
	completion := fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":%d,"temperature":0,"stream":true`, longPrompt,
		tokens)
	chat := fmt.Sprintf(`{"model":"tiny","messages":[{"role":"user","content":%q}],"max_completion_tokens":%d,`+
		`"temperature":0,"stream":true`, longPrompt, tokens)
	var all []rescueCase
	for more, name := range map[string]string{
		"": "plain",
		`,"stream_options":{"include_usage":true}`:                               "usage",
		`,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`: "usage in each event",
		`,"return_token_ids":true`:                                               "token ids",
		`,"stop":["never to be seen","nor \u00e9"],"min_tokens":5`:               "stop strings",
	} {
		all = append(all, rescueCase{"completions, " + name, "/v1/completions", completion + more + "}"},
			rescueCase{"chat, " + name, "/v1/chat/completions", chat + more + "}"})
	}
	return all
}

// inTurn picks the first decode engine that need not be avoided.
type inTurn struct {
	prefill discovery.Endpoint
	decode  []discovery.Endpoint
}

func (p inTurn) Pick(_ context.Context, in *pdflow.PickInput) (pdflow.Pick, error) {
	for _, d := range p.decode {
		if !in.Avoids(d.ID) {
			return pdflow.Pick{Prefill: p.prefill, Decode: d}, nil
		}
	}
	return pdflow.Pick{Prefill: p.prefill, Decode: p.decode[len(p.decode)-1]}, nil
}

// rescuing starts a prefill engine, two decode engines of which the first is asked first, and a flow that rescues.
func rescuing(t *testing.T, opts ...pdflow.Option) (x *pd, other *enginesim.Engine) {
	t.Helper()
	return rescuingWith(t, enginesim.Config{}, enginesim.Config{KVRole: enginesim.RoleConsumer}, opts...)
}

func rescuingWith(t *testing.T, prefill, decode enginesim.Config, opts ...pdflow.Option) (x *pd,
	other *enginesim.Engine) {
	t.Helper()
	x = start(t, setup{prefill: prefill, decode: atOwnPorts(t, decode)})
	other, err := enginesim.Start(atOwnPorts(t, decode))
	require.NoError(t, err)
	t.Cleanup(func() { _ = other.Close() })
	conn, err := nixl.New(nil)
	require.NoError(t, err)
	x.seen = &outcomes{}
	x.flow, err = pdflow.New(conn, pick.Func(inTurn{endpoint(t, x.p.URL(), discovery.RolePrefill), []discovery.Endpoint{
		endpoint(t, x.d.URL(), discovery.RoleDecode), endpoint(t, other.URL(), discovery.RoleDecode)}}.Pick),
		append([]pdflow.Option{pdflow.WithRescue(1),
			pdflow.WithObserver(pdflow.Observer{SessionEnd: x.seen.SessionEnd})}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.flow.Shutdown(context.Background())) })
	x.url = serve(t, x.flow)
	return x, other
}

// struck asks the first decode engine, which a fault strikes after so many events, and revives it.
func (x *pd) struck(c rescueCase, kind enginesim.FaultKind, after int) reply {
	x.t.Helper()
	x.d.Inject(enginesim.Fault{Kind: kind, Leg: enginesim.LegDecode, AfterChunks: after})
	got := post(x.t, x.url, c.path, c.body, "X-Request-Id", "same")
	x.d.ClearFaults()
	if x.d.Dead() {
		require.NoError(x.t, x.d.Restart())
	}
	return got
}

func TestARescuedStreamIsByteForByteTheUndisturbedOne(t *testing.T) {
	t.Parallel()
	x, _ := rescuing(t)
	plain := start(t, setup{})
	for _, c := range rescueCases(9) {
		want := post(t, plain.url, c.path, c.body, "X-Request-Id", "same")
		require.Equal(t, 200, want.status, want.body)
		undisturbed := post(t, x.url, c.path, c.body, "X-Request-Id", "same")
		require.Equal(t, sameOf(want.body), sameOf(undisturbed.body), "%s: rescue changes what nobody disturbs", c.name)
		for k := 1; k < strings.Count(want.body, "\n\n"); k++ { // the last is [DONE]
			for _, kind := range []enginesim.FaultKind{enginesim.FaultResetStream, enginesim.FaultKill,
				enginesim.FaultTerminate, enginesim.FaultDeath, enginesim.FaultEnding} {
				got := x.struck(c, kind, k)
				require.NoError(t, got.err, "%s, fault %d after event %d", c.name, kind, k)
				require.Equal(t, sameOf(want.body), sameOf(got.body), "%s, fault %d after event %d", c.name, kind, k)
			}
		}
	}
}

func texts(s string) string {
	return strings.Join(regexp.MustCompile(`"(text|content)":"[^"]*"`).FindAllString(s, -1), "")
}

func TestKilledStreamsGoOn(t *testing.T) {
	t.Parallel()
	const tokens = 40
	x, _ := rescuing(t)
	cases := rescueCases(tokens)
	wants := make([]string, len(cases))
	for i := range *kills {
		c := cases[i%len(cases)]
		if wants[i%len(cases)] == "" {
			wants[i%len(cases)] = sameOf(post(t, x.url, c.path, c.body, "X-Request-Id", "same").body)
		}
		k := 1 + rand.IntN(tokens)
		got := x.struck(c, enginesim.FaultKill, k)
		require.NoError(t, got.err, "%s, killed after event %d", c.name, k)
		if wants[i%len(cases)] != sameOf(got.body) {
			t.Fatalf("%s, killed after event %d:\n%s\n%s", c.name, k, texts(wants[i%len(cases)]),
				texts(sameOf(got.body)))
		}
	}
	require.NoError(t, x.flow.Shutdown(t.Context()))
	resumed := 0
	for _, o := range x.seen.list() {
		if o.Resumed > 0 {
			resumed++
		}
	}
	t.Logf("%d streams whose engine was killed: %d went on at another pair, all byte for byte", *kills, resumed)
}
