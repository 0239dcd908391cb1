// SPDX-License-Identifier: Apache-2.0

package pick_test

import (
	"fmt"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestLoadCountsUntilDone(t *testing.T) {
	for _, policy := range []pick.Policy{pick.LeastLoad(), pick.TwoChoices()} {
		p := pick.New(newFleet(t, many(2, 2)...).Set, policy)
		long := mustPick(t, p, &pdflow.PickInput{Request: request(t, strings.Repeat("long ", 2000), 9000)})
		for range 20 { // of small ones: all go to the others, whose load never comes near
			x := mustPick(t, p, &pdflow.PickInput{Request: request(t, "x", 10)})
			require.NotEqual(t, long.Prefill.ID, x.Prefill.ID, policy.String())
			require.NotEqual(t, long.Decode.ID, x.Decode.ID, policy.String())
		}
		long.Done(&pdflow.Outcome{})
		long.Done(&pdflow.Outcome{}) // a mistake that must not count twice
		seen := map[string]bool{}
		for range 20 {
			seen[mustPick(t, p, &pdflow.PickInput{Request: request(t, "x", 10)}).Decode.ID] = true
		}
		require.True(t, seen[long.Decode.ID], "what is done is no load")
	}
}

func TestTheTokenLimitIsLoadWhereverItsAPIKeepsIt(t *testing.T) {
	for body, api := range map[string]connector.API{
		`{"messages":[],"max_completion_tokens":9000}`:            connector.APIChat,
		`{"messages":[],"max_tokens":9000.0}`:                     connector.APIMessages,
		`{"input":"x","max_output_tokens":9000}`:                  connector.APIResponses,
		`{"token_ids":[1],"sampling_params":{"max_tokens":9000}}`: connector.APIGenerate,
		`{"text":"x","sampling_params":{"max_new_tokens":9000}}`:  connector.APISGLang,
	} {
		r, err := connector.ParseRequest(api, []byte(body))
		require.NoError(t, err)
		p := pick.New(newFleet(t, many(1, 2)...).Set, pick.LeastLoad())
		busy := mustPick(t, p, &pdflow.PickInput{Request: r}).Decode.ID
		for range 30 { // 30 × 256 tokens
			require.NotEqual(t, busy, mustPick(t, p, &pdflow.PickInput{}).Decode.ID, body)
		}
	}
}

func TestLoadOutlivesASnapshot(t *testing.T) {
	f := newFleet(t, many(2, 2)...)
	p := pick.New(f.Set, pick.LeastLoad())
	long := mustPick(t, p, &pdflow.PickInput{Request: request(t, "x", 30_000)})
	f.replace(append(many(2, 2), ep("d9", decode))...)
	for range 20 {
		require.NotEqual(t, long.Decode.ID, mustPick(t, p, input(t, 1)).Decode.ID)
	}
	f.replace(ep("p0", prefill), ep("d9", decode))
	mustPick(t, p, input(t, 1))
	long.Done(&pdflow.Outcome{}) // of an engine that is gone: nothing happens
	f.replace(many(2, 2)...)
	seen := map[string]bool{}
	for range 20 {
		seen[mustPick(t, p, input(t, 1)).Decode.ID] = true
	}
	require.Len(t, seen, 2)
}

func TestTwoChoicesAreNearlyEven(t *testing.T) {
	p := pick.New(newFleet(t, many(50, 50)...).Set, pick.TwoChoices(), pick.WithSeed(3))
	n := map[string]int{}
	for range 5000 {
		x := mustPick(t, p, &pdflow.PickInput{})
		n[x.Prefill.ID]++
		n[x.Decode.ID]++
	}
	for id, k := range n {
		require.InDelta(t, 100, k, 6, id)
	}
}

func TestASessionStaysWithItsPair(t *testing.T) {
	f := newFleet(t, many(5, 5)...)
	p := pick.New(f.Set, pick.SessionAffinity(""), pick.WithSeed(1))
	of := func(s int) string {
		x := mustPick(t, p, &pdflow.PickInput{Header: http.Header{"X-Session-Id": {"s" + strconv.Itoa(s)}}})
		x.Done(&pdflow.Outcome{})
		return x.Prefill.ID + "+" + x.Decode.ID
	}
	home, used := map[int]string{}, map[string]bool{}
	for s := range 100 {
		home[s] = of(s)
		used[home[s]] = true
	}
	require.Greater(t, len(used), 12, "sessions spread over the pairs")
	for s := range 100 {
		require.Equal(t, home[s], of(s))
	}
	f.replace(append(many(5, 4), ep("p9", prefill))...) // d4 leaves, p9 comes
	moved := 0
	for s := range 100 {
		now := of(s)
		if !strings.HasSuffix(home[s], "+d4") {
			require.Equal(t, home[s][strings.Index(home[s], "+"):], now[strings.Index(now, "+"):],
				"only the sessions of an engine that left move")
		}
		if home[s][:2] != now[:2] {
			require.Equal(t, "p9", now[:2], "sessions move to an engine that came, and to no other")
			moved++
		}
	}
	require.InDelta(t, 100/6, moved, 15)
}

func TestALoadedHomeLendsItsSessionsOut(t *testing.T) {
	p := pick.New(newFleet(t, many(4, 4)...).Set, pick.SessionAffinity("x-user"), pick.WithBound(1.25, 1000))
	n := map[string]int{}
	for range 400 {
		n[mustPick(t, p, &pdflow.PickInput{Header: http.Header{"X-User": {"one"}}}).Decode.ID]++
	}
	for id, k := range n {
		require.LessOrEqual(t, k, 100*5/4+6, id)
	}
}

func TestAPromptGoesWhereItsBeginningIs(t *testing.T) {
	p := pick.New(newFleet(t, many(8, 8)...).Set, pick.PrefixAffinity())
	ask := func(body string) string {
		r, err := connector.ParseRequest(connector.APIChat, []byte(body))
		require.NoError(t, err)
		x := mustPick(t, p, &pdflow.PickInput{Request: r})
		x.Done(&pdflow.Outcome{})
		return x.Prefill.ID
	}
	text := func(i int) string { return strings.Repeat(fmt.Sprintf("document %d ", i), 100) }
	homes := map[string]bool{}
	for i := range 40 {
		first := ask(fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, text(i)))
		homes[first] = true
		for turn := range 3 {
			require.Equal(
				t, first, ask(
					fmt.Sprintf(`{"temperature":%d,"messages":[{"role":"user","content":%q},{"role":"user",`+
						`"content":"turn %d"}],"model":"m"}`, turn, text(i), turn),
				),
				"the same prompt in another order of members")
		}
	}
	require.Len(t, homes, 8, "prompts spread")
	models := map[string]bool{}
	for i := range 30 {
		models[ask(fmt.Sprintf(`{"model":"m%d","messages":[{"role":"user","content":%q}]}`, i, text(0)))] = true
	}
	require.Greater(t, len(models), 3, "another model's KV is of no use")
}

func TestALongerBeginningInCommonWins(t *testing.T) {
	p := pick.New(newFleet(t, many(6, 1)...).Set, pick.PrefixAffinity(), pick.WithBound(1, 0))
	system := strings.Repeat("You are terse. ", 100)
	ask := func(rest string) pdflow.Pick {
		return mustPick(t, p, &pdflow.PickInput{Request: request(t, system+rest, 1)})
	}
	a := ask(strings.Repeat("alpha ", 100)) // loaded: b, with the same system prompt, goes elsewhere
	b := ask(strings.Repeat("beta ", 100))
	require.NotEqual(t, a.Prefill.ID, b.Prefill.ID)
	a.Done(&pdflow.Outcome{})
	b.Done(&pdflow.Outcome{})
	for range 10 {
		x := ask(strings.Repeat("alpha ", 100))
		x.Done(&pdflow.Outcome{})
		y := ask(strings.Repeat("beta ", 100))
		y.Done(&pdflow.Outcome{})
		require.Equal(t, a.Prefill.ID+b.Prefill.ID, x.Prefill.ID+y.Prefill.ID)
	}
}

func TestAPopularBeginningIsSharedOut(t *testing.T) {
	p := pick.New(newFleet(t, many(4, 4)...).Set, pick.PrefixAffinity(), pick.WithBound(1.25, 2000))
	n := map[string]int{}
	for range 400 {
		n[mustPick(t, p, &pdflow.PickInput{Request: request(t, strings.Repeat("the same ", 200), 1)}).Prefill.ID]++
	}
	require.Len(t, n, 4)
	for id, k := range n {
		require.LessOrEqual(t, k, 100*5/4+10, id)
	}
}

func TestWhatIsRememberedOfPromptsIsBounded(t *testing.T) {
	p := pick.New(newFleet(t, many(4, 4)...).Set, pick.PrefixAffinity(), pick.WithPrefixMemory(1<<16, 64))
	use := func(from, n int) {
		for i := range n {
			mustPick(t, p, &pdflow.PickInput{Request: request(t, strings.Repeat(strconv.Itoa(from+i)+" ", 2000), 1)}).
				Done(&pdflow.Outcome{})
		}
	}
	use(0, 200)
	before := heap()
	use(1000, 3000)
	require.Less(t, int64(heap())-int64(before), int64(1<<20))
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestZonesServeThemselvesUntilTheyAreFull(t *testing.T) {
	eps := append(many(2, 2, "zone=a"), ep("pb", prefill, "zone=b"), ep("db", decode, "zone=b"),
		ep("dc", decode, "zone=c"))
	p := pick.New(newFleet(t, eps...).Set, pick.ZoneFirst("a"))
	for range 50 {
		x := mustPick(t, p, &pdflow.PickInput{})
		x.Done(&pdflow.Outcome{})
		require.Equal(t, "aa", x.Prefill.Zone+x.Decode.Zone)
	}
	all := map[string]bool{}
	for range 400 { // nobody is done
		all[mustPick(t, p, input(t, 1)).Decode.Zone] = true
	}
	require.Len(t, all, 3, "other zones help a full one")

	p = pick.New(newFleet(t, eps...).Set, pick.ZoneFirst(""))
	for range 100 {
		x := mustPick(t, p, &pdflow.PickInput{})
		x.Done(&pdflow.Outcome{})
		if x.Decode.Zone != "c" { // which has no prefill engine
			require.Equal(t, x.Decode.Zone, x.Prefill.Zone)
		}
	}
	p = pick.New(newFleet(t, eps...).Set, pick.ZoneFirst("nowhere"))
	require.NotEmpty(t, pair(t, p, input(t, 1)))
}

func TestWeightsAreKept(t *testing.T) {
	p := pick.New(
		newFleet(t, ep("p1", prefill, "weight=1"), ep("p3", prefill, "weight=3"), ep("d1", decode, "weight=10"),
			ep("d2", decode, "weight=30"), ep("d3", decode, "weight=0"),
			ep("d4", decode), ep("d5", decode, "weight=none")).Set, pick.Weighted(), pick.WithSeed(1))
	n := map[string]int{}
	for range 24_000 {
		x := mustPick(t, p, &pdflow.PickInput{})
		n[x.Decode.ID]++
		n[x.Prefill.ID]++
	}
	require.InDelta(t, 6000, n["p1"], 400)
	require.InDelta(t, 18_000, n["p3"], 400)
	require.InDelta(t, 1000, n["d1"], 120)
	require.InDelta(t, 3000, n["d2"], 220)
	require.InDelta(t, 10_000, n["d4"], 400, "100 without a weight")
	require.InDelta(t, 10_000, n["d5"], 400, "100 for what is no weight")
	require.Zero(t, n["d3"])
	x := mustPick(t, p, &pdflow.PickInput{Avoid: []string{"d1", "d2", "d4", "d5"}})
	require.Equal(t, "d3", x.Decode.ID, "an engine of weight 0 serves when no other can")
}

func TestRoundRobinGoesFromEngineToEngineBeforeTheNextRank(t *testing.T) {
	p := pick.New(newFleet(t, many(3, 1, "dpSize=4")...).Set, pick.RoundRobin())
	last := ""
	for range 24 {
		x := mustPick(t, p, &pdflow.PickInput{})
		require.NotEqual(t, last, x.Prefill.ID)
		last = x.Prefill.ID
	}
}

// Round robin skips an engine that cannot serve now (role both, and it is the decode engine itself; or a cooldown). The
// others still get their share, and the skipped engine gets its own again afterwards.
func TestRoundRobinSkipsNoEngineForEver(t *testing.T) {
	p := pick.New(newFleet(t, ep("p", prefill), ep("d", decode), ep("x", both)).Set, pick.RoundRobin())
	prefills := map[string]int{}
	for range 24 {
		prefills[mustPick(t, p, &pdflow.PickInput{}).Prefill.ID]++
	}
	require.InDelta(t, prefills["p"], prefills["x"], 2)

	p = pick.New(newFleet(t, many(3, 1)...).Set, pick.RoundRobin())
	first := mustPick(t, p, &pdflow.PickInput{})
	prefills = map[string]int{}
	for range 24 {
		prefills[mustPick(t, p, &pdflow.PickInput{Avoid: []string{first.Prefill.ID}}).Prefill.ID]++
	}
	require.Len(t, prefills, 2)
	for id, n := range prefills {
		require.Equal(t, 12, n, id)
	}
}

func TestPairsThatHaveMetMeetAgain(t *testing.T) {
	f := newFleet(t, many(40, 4)...)
	p := pick.New(f.Set, pick.Sticky())
	partners := func() map[string]bool {
		pairs := map[string]bool{}
		for i := range 1000 {
			x := mustPick(t, p, input(t, i))
			x.Done(&pdflow.Outcome{})
			pairs[x.Prefill.ID+"+"+x.Decode.ID] = true
		}
		return pairs
	}
	first := partners()
	require.LessOrEqual(t, len(first), 16, "four partners each, of 160 pairs")
	f.replace(append(many(40, 4), ep("p-new", prefill))...)
	require.Equal(t, first, partners(), "they meet again after a snapshot")
}

// A pick allocates nothing, however many connectors share the picker, and whether or not they have models of their own.
func TestAllocations(t *testing.T) {
	conns := []connector.KVConnector{sameTP(), &plain{name: "a"}, plain{name: "by value"}, wrapper{sameTP()}}
	eachPolicy(t, func(t *testing.T, policy pick.Policy) {
		for n := 1; n <= len(conns); n++ {
			for _, opts := range [][]pick.Option{nil, {pick.ByModel()}} {
				p := pick.New(
					newFleet(t, append(many(20, 20, "dpSize=2", "tpSize=2"), ep("other", prefill, "model=other"))...).
						Set, policy, opts...,
				)
				var flows []pdflow.Picker
				for _, c := range conns[:n] {
					flows = append(flows, bind(p, c))
				}
				in, out, turn := input(t, 1), &pdflow.Outcome{}, 0
				run := func() {
					turn++
					mustPick(t, flows[turn%n], in).Done(out)
				}
				for range 100 {
					run()
				}
				got := testing.AllocsPerRun(200, run)
				if raceDetector {
					t.Logf("not held under the race detector, where pools drop what they get: %v", got)
					continue
				}
				require.Zero(t, got, "%d connectors", n)
			}
		}
	})
}
