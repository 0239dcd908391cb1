// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"context"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

// addressed is an endpoint whose ID says nothing of its address.
func addressed(t testing.TB, id, url string, role discovery.Role) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New(url, role)
	require.NoError(t, err)
	e.ID = id
	return e
}

func sidecarSet(t testing.TB) *discovery.Set {
	t.Helper()
	sick := addressed(t, "sick", "http://10.0.0.9:8000", prefill)
	sick.Phase = discovery.PhaseNotReady
	return newFleet(t, addressed(t, "p1", "http://10.0.0.1:8000", prefill),
		addressed(t, "p2", "http://Prefill-2.Pool:8000", prefill),
		addressed(t, "p3", "http://[fd00::3]:8000", prefill), addressed(t, "x", "http://10.0.0.4", both),
		addressed(t, "d2", "http://10.0.0.5:8000", decode), sick).Set
}

func named(values ...string) *pdflow.PickInput {
	return &pdflow.PickInput{Header: http.Header{"X-Prefiller-Host-Port": values}, Attempt: 1}
}

func localDecode(t testing.TB) discovery.Endpoint {
	t.Helper()
	return addressed(t, "local", "http://127.0.0.1:8200", decode)
}

func TestTheHeaderNamesThePrefillEngine(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	for header, want := range map[string]string{
		"10.0.0.1:8000": "p1", " 10.0.0.1:8000 ": "p1", "http://10.0.0.1:8000": "p1", "[::ffff:10.0.0.1]:8000": "p1",
		"prefill-2.pool:8000": "p2", "PREFILL-2.POOL.:8000": "p2",
		"[FD00:0::3]:8000": "p3", "10.0.0.4:80": "x", "10.0.0.1:8000,10.0.0.4:80": "p1",
		"10.0.0.9:8000, 10.0.0.4:80": "x", ",,10.0.0.1:8000": "p1",
	} {
		assert.Equal(t, want+"+local", pair(t, p, named(header)), header)
	}
	assert.Equal(t, "x+local", pair(t, p, named("10.0.0.9:8000", "10.0.0.4:80")), "in lines of their own")
}

func TestWithoutTheHeaderDecodeServesAlone(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	for _, in := range []*pdflow.PickInput{{}, named(), named(""), named(" , "), named("", "")} {
		for _, in.Single = range []bool{true, false} {
			chosen, err := p.Pick(t.Context(), in)
			require.NoError(t, err)
			assert.Equal(t, "no_header", chosen.Reason, "it has gone round the scheduler")
		}
		assert.Equal(t, "+local", pair(t, p, in))
	}
	in := named("10.0.0.1:8000")
	for _, in.Single = range []bool{true, false} {
		chosen, err := p.Pick(t.Context(), in)
		require.NoError(t, err)
		assert.Empty(t, chosen.Reason)
	}
	p = pick.FromHeader(sidecarSet(t), localDecode(t), &pick.HeaderOptions{PairOnly: true})
	for _, single := range []bool{true, false} {
		_, err := p.Pick(t.Context(), &pdflow.PickInput{Single: single})
		require.ErrorIs(t, err, pdflow.CodeInvalid)
	}
}

func TestWhatIsNotListedForPrefillIsRefused(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	for name, header := range map[string]string{
		"another host": "169.254.169.254:80", "another port of a listed host": "10.0.0.1:22",
		"a decode engine": "10.0.0.5:8000", "the local engine": "127.0.0.1:8200",
		"one of several": "10.0.0.1:8000,10.0.0.6:8000", "no port": "10.0.0.1", "no host": ":8000",
		"port 0": "10.0.0.1:0", "a port name": "10.0.0.1:http", "a port too high": "10.0.0.1:73536",
		"a path": "10.0.0.1:8000/x", "user info": "a@10.0.0.1:8000", "another scheme": "https://10.0.0.1:8000",
		"nonsense": "\x00[", "too many": strings.Repeat("10.0.0.1:8000,", 65),
		"a long host": strings.Repeat("a", 300) + ":8000",
	} {
		t.Run(name, func(t *testing.T) {
			for _, single := range []bool{false, true} {
				in := named(header)
				in.Single = single
				_, err := p.Pick(t.Context(), in)
				var e *pdflow.Error
				require.ErrorAs(t, err, &e)
				assert.Equal(t, http.StatusBadRequest, e.HTTPStatus())
				assert.Equal(t, "X-Prefiller-Host-Port", e.Param)
				assert.NotContains(t, e.Message, "10.0.0.1", "the response tells what was asked for")
			}
		})
	}
}

func TestAnEngineThatIsNamedAndNotReadyIsWaitedFor(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	_, err := p.Pick(t.Context(), named("10.0.0.9:8000"))
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	assert.NotNil(t, p.Changed())
}

func TestBeforeTheFirstListNobodyIsRefused(t *testing.T) {
	p := pick.FromHeader(discovery.NewSet(discoverytest.NewManual()), localDecode(t), nil)
	_, err := p.Pick(t.Context(), named("10.0.0.1:8000"))
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	_, err = p.Pick(t.Context(), named("10.0.0.1"))
	require.ErrorIs(t, err, pdflow.CodeInvalid)
}

func TestTheHeaderIsReadAgainstTheLatestList(t *testing.T) {
	f := newFleet(t, addressed(t, "p1", "http://10.0.0.1:8000", prefill))
	p := pick.FromHeader(f.Set, localDecode(t), nil)
	assert.Equal(t, "p1+local", pair(t, p, named("10.0.0.1:8000")))
	f.replace(addressed(t, "p2", "http://10.0.0.2:8000", prefill))
	_, err := p.Pick(t.Context(), named("10.0.0.1:8000"))
	assert.ErrorIs(t, err, pdflow.CodeInvalid)
	assert.Equal(t, "p2+local", pair(t, p, named("10.0.0.2:8000")))

	// A request that began before is not the client's fault: its pair is gone.
	in := named("10.0.0.1:8000")
	in.Attempt = 2
	_, err = p.Pick(t.Context(), in)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	in.Single = true
	assert.Equal(t, "+local", pair(t, p, in))
}

func TestTheNextAttemptTakesAnotherOfTheNamed(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	in := named("10.0.0.1:8000,10.0.0.4:80")
	in.Attempt, in.Avoid = 2, []string{"p1"}
	assert.Equal(t, "x+local", pair(t, p, in))
	in.Avoid = []string{"p1", "x"}
	assert.Equal(t, "p1+local", pair(t, p, in), "the last ones are used all the same")
}

func TestOneOfTheNamedIsSampled(t *testing.T) {
	turn := 0
	p := pick.FromHeader(sidecarSet(t), localDecode(t),
		&pick.HeaderOptions{Header: "x-my-prefill", Sample: func(int) int { return turn }})
	in := &pdflow.PickInput{Header: http.Header{"X-My-Prefill": {"10.0.0.1:8000,10.0.0.4:80"}}}
	for at, want := range map[int]string{0: "p1+local", 1: "x+local", -1: "p1+local", 7: "p1+local"} {
		turn = at
		assert.Equal(t, want, pair(t, p, in))
	}
}

func TestARequestForOneEngineGoesToTheLocalOne(t *testing.T) {
	p := pick.FromHeader(sidecarSet(t), localDecode(t), nil)
	in := named("10.0.0.1:8000")
	in.Single = true
	assert.Equal(t, "+local", pair(t, p, in))
	_, err := p.Bind(nil, pairOnly).Pick(t.Context(), in)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)
	p = pick.FromHeader(sidecarSet(t), addressed(t, "local", "http://127.0.0.1:8200", both), nil)
	assert.Equal(t, "+local", pair(t, p.Bind(nil, pairOnly), in))
}

// A scheduler may name a prefill engine whose KV the decode engine cannot use. The picker refuses it, like one that is
// not listed.
func TestAnEngineThatCannotExchangeKVIsRefused(t *testing.T) {
	at := func(id string, mods ...string) discovery.Endpoint {
		e := ep(id, prefill, mods...)
		e.URL = addressed(t, id, "http://"+id+":8000", prefill).URL
		return e
	}
	s := newFleet(
		t, at("good", "tpSize=2", "connector=NixlConnector, lmcache", "kvNetwork=ib0", "version=1", "model=m",
			"group=other"), at("silent"),
		at("tp", "tpSize=4"), at("protocol", "connector=lmcache"), at("network", "kvNetwork=eth"),
		at("version", "version=2"), at("model", "model=n")).Set
	conn := &protocol{name: "nixl", rules: []attr.PairRule{attr.Same("tpSize")}}
	here := ep("local", decode, "tpSize=2", "connector=nixl", "kvNetwork=ib0,ib1", "version=1", "model=m")
	p := pick.FromHeader(s, here, nil)
	nixl, fallback := bind(p, conn), bind(p, &plain{name: "nixl"})
	ask := func(flow pdflow.Picker, header string) (pdflow.Pick, error) {
		return flow.Pick(t.Context(), named(header))
	}
	for _, id := range []string{"good", "silent"} {
		x, err := ask(nixl, id+":8000")
		require.NoError(t, err)
		require.Equal(t, id, x.Prefill.ID, "the group is the scheduler's business")
	}
	for _, header := range []string{"tp:8000", "protocol:8000", "network:8000", "version:8000", "model:8000",
		"good:8000,tp:8000"} {
		_, err := ask(nixl, header)
		var e *pdflow.Error
		require.ErrorAs(t, err, &e, header)
		require.Equal(t, http.StatusBadRequest, e.HTTPStatus())
		require.Equal(t, "X-Prefiller-Host-Port", e.Param)
		require.Equal(t, "names an engine that cannot exchange KV with the decode engine here", e.Message)
	}
	for range 2 { // a flow and the one that it falls back to
		x, err := ask(fallback, "tp:8000")
		require.NoError(t, err)
		require.Equal(t, "tp", x.Prefill.ID, "another connector has other rules")
		_, err = ask(nixl, "tp:8000")
		require.ErrorIs(t, err, pdflow.CodeInvalid)
	}

	// What an engine tells may change between the attempts of a request: then it is as good as gone, and the client is
	// not to blame.
	in := named("tp:8000,good:8000")
	in.Attempt = 2
	require.Equal(t, "good+local", pair(t, nixl, in))
	in = named("tp:8000")
	in.Attempt = 2
	_, err := nixl.Pick(t.Context(), in)
	require.ErrorIs(t, err, pdflow.CodeNoEndpoint)

	require.Equal(t, "tp+local", pair(t, bind(pick.FromHeader(s, localDecode(t), nil), conn), named("tp:8000")),
		"a decode engine of which nothing is known takes any")
}

func TestReadingTheHeaderAllocatesNothing(t *testing.T) {
	p := bind(pick.FromHeader(sidecarSet(t), localDecode(t), nil), sameTP())
	in := named("10.0.0.1:8000")
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := p.Pick(context.Background(), in); err != nil {
			t.Error(err)
		}
	}))
}

func FuzzFromHeader(f *testing.F) {
	p := pick.FromHeader(sidecarSet(f), localDecode(f), nil)
	f.Add("10.0.0.1:8000,[fd00::3]:8000")
	f.Add("[::%eth0]:1,,http://")
	f.Fuzz(func(t *testing.T, header string) {
		x, err := p.Pick(t.Context(), named(header))
		if err == nil && x.Prefill.URL != nil {
			require.Contains(t, []string{"p1", "p2", "p3", "x"}, x.Prefill.ID)
		}
	})
}

func BenchmarkFromHeader(b *testing.B) {
	p := bind(pick.FromHeader(sidecarSet(b), localDecode(b), nil), sameTP())
	in := named("10.0.0.1:8000")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.Pick(b.Context(), in); err != nil {
			b.Fatal(err)
		}
	}
}
