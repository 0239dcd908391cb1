// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/zmq"
	"github.com/pdkit/pdkit/pdflow/modelserver"
)

// kvWords returns what /debug/pd says of the engines' KV, in the order of the list.
func (p *program) kvWords() (words []string) {
	p.t.Helper()
	var page struct {
		Models []struct {
			Endpoints []struct{ KVEvents string }
		}
	}
	require.NoError(p.t, json.Unmarshal([]byte(p.page("/debug/pd")), &page))
	for _, e := range page.Models[0].Endpoints {
		words = append(words, e.KVEvents)
	}
	return words
}

func (p *program) knowsKV(words ...string) {
	p.t.Helper()
	eventually(p.t, func() bool { return assert.ObjectsAreEqual(words, p.kvWords()) }, words)
}

// publishing is a pair whose engines publish their events.
func publishing(t *testing.T) (p, d *enginesim.Engine) {
	t.Helper()
	return simPair(t, enginesim.Config{KVEvents: &enginesim.KVEvents{}},
		enginesim.Config{Listen: "127.0.0.1:" + unusedPort(t), SideChannel: "127.0.0.1:" + unusedPort(t),
			KVEvents: &enginesim.KVEvents{Endpoint: "127.0.0.1:" + unusedPort(t),
				Replay: "127.0.0.1:" + unusedPort(t)}})
}

func TestTheGatewayFollowsTheKVOfItsEngines(t *testing.T) {
	t.Parallel()
	p, d := publishing(t)
	g := start(t, gatewayYAML("")+simYAML("  kvEvents: {mode: ask, tokens: engines, tokensTimeout: 1s}\n", p, d))
	g.knowsKV("exact", "exact")
	status, _, _ := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":8}`, strings.Repeat("abcd", 100)))
	require.Equal(t, 200, status)
	g.shows(`pd_kv_events_batches_total{`)
	g.shows(`pd_kv_events_lag_seconds{`)
	g.shows(`pd_kv_events_prompts_total{`)
	eventually(t, func() bool {
		page := g.page("/metrics")
		return strings.Contains(page, `pd_state="exact"`) && strings.Contains(page, `pd_outcome="whole"`)
	})
	d.Kill()
	began := time.Now()
	g.knowsKV("exact", "unknown")
	t.Log("unknown after", time.Since(began))
	g.shows(`pd_kv_events_connections_lost_total{`)
	require.NoError(t, d.Restart())
	g.knowsKV("exact", "exact")
}

func TestNobodyFollowsTheKVUnlessAsked(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string]string{"": "", "  kvEvents: {mode: off}\n": "",
		"  kvEvents: {mode: entries}\n": "unknown"} {
		p, d := publishing(t)
		g := start(t, gatewayYAML("")+simYAML(spec, p, d))
		time.Sleep(50 * time.Millisecond)
		assert.Equal(t, []string{want, want}, g.kvWords())
	}
}

func TestEntriesSayWhereTheirEnginesPublish(t *testing.T) {
	t.Parallel()
	p, d := publishing(t)
	entryOf := func(e *enginesim.Engine, role string) string {
		events, replay := e.KVEvents()
		return entry(e.URL(), role,
			map[string]string{"kvEvents": "tcp://" + events, "kvEventsReplay": "tcp://" + replay})
	}
	g := start(t, gatewayYAML("")+serverYAML("tiny", nixlConnector+"  kvEvents: {mode: entries}\n",
		entryOf(p, "prefill"), entryOf(d, "decode")))
	g.knowsKV("exact", "exact")
}

// Names of adapters tell how a prompt is looked up, so a model that has others needs another pool.
func TestAdaptersArePartOfWhatFollowsEvents(t *testing.T) {
	key := func(mode, adapters string) string {
		m, err := modelserver.Read([]byte(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer",` +
			`"spec":{"model":"m","kvEvents":{"mode":"` + mode + `"},"adapters":` + adapters + `}}`))
		require.NoError(t, err)
		return poolKey(&modelServer{ModelServer: m})
	}
	for mode, same := range map[string]bool{"off": true, "entries": false, "ask": false} {
		assert.Equal(t, same, key(mode, `["one"]`) == key(mode, `["other"]`), mode)
		assert.NotEqual(t, key(mode, `["one"]`), key(mode, `"auto"`), mode)
	}
}

// A later request goes to the engines that hold the beginning of its prompt, whatever the turn is.
func TestPickKVSendsAPromptToWhoHoldsIt(t *testing.T) {
	t.Parallel()
	var engines []*enginesim.Engine
	for range 3 {
		p, d := publishing(t)
		engines = append(engines, p, d)
	}
	g := start(t, gatewayYAML("")+simYAML("  kvEvents: {mode: ask, tokens: engines, tokensTimeout: 10s}\n", engines...),
		"-pick", "kv")
	exact := []string{"exact", "exact", "exact", "exact", "exact", "exact"}
	g.knowsKV(exact...)
	prompt := strings.Repeat("a long conversation ", 40)
	held := engines[2] // one that the gateway has sent nothing
	status, _, _ := do(t, "POST", held.URL()+"/v1/completions", fmt.Sprintf(
		`{"model":"tiny","prompt":%q,"max_tokens":1,`+
			`"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}`, prompt))
	require.Equal(t, 200, status)
	batches := regexp.MustCompile(`pd_kv_events_batches_total\{[^}]*\} [1-9]`)
	eventually(t, func() bool { return batches.MatchString(g.page("/metrics")) })
	for turn := range 4 { // each goes there, also the first, of which the gateway itself has seen nothing
		seen := len(held.Requests())
		status, _, _ := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":%q,"max_tokens":4}`, prompt+fmt.Sprint(turn)))
		require.Equal(t, 200, status)
		posted := 0
		for _, r := range held.Requests()[seen:] {
			if r.Path == "/v1/completions" {
				posted++
			}
		}
		assert.Equal(t, 1, posted, "turn %d", turn)
	}
}

// An engine's load stream tells of others' requests long before the engine is asked again. These engines' metrics say
// that nobody is there.
func TestPicksGoByTheLoadThatEnginesPublish(t *testing.T) {
	for _, inspect := range []string{"5s", "50ms"} { // asked rarely, or more often than an idle engine tells its load
		t.Run(inspect, func(t *testing.T) {
			t.Parallel()
			testPicksByLoadStreams(t, inspect)
		})
	}
}

func testPicksByLoadStreams(t *testing.T, inspect string) {
	var engines []*enginesim.Engine
	var tellers []*zmq.Listener
	var entries []string
	p, d := simPair(t, enginesim.Config{}, enginesim.Config{})
	_, other := simPair(t, enginesim.Config{}, enginesim.Config{})
	for _, e := range []*enginesim.Engine{d, other} {
		pub, err := zmq.ListenPUB("127.0.0.1:0", 100)
		require.NoError(t, err)
		t.Cleanup(pub.Close)
		engines, tellers = append(engines, e), append(tellers, pub)
		entries = append(entries, entry(e.URL(), "decode", map[string]string{"loadEvents": "tcp://" + pub.Addr()}))
	}
	g := start(t, gatewayYAML("")+serverYAML("tiny", nixlConnector+"  kvEvents: {mode: entries}\n",
		append(entries, entry(p.URL(), "prefill", nil))...), "-pick", "least-load", "-inspect", inspect)
	running := func() (n []int) {
		state, _ := g.live()
		for _, e := range state.Models[0].Endpoints[:2] {
			if e.Engine != nil {
				n = append(n, e.Engine.Running)
			}
		}
		return n
	}
	for busy, loads := range [][]int{{50, 0}, {0, 50}} {
		told := func() bool {
			for i, n := range loads {
				tellers[i].Publish([]byte("load"), make([]byte, 8),
					[]byte("\x96\xa8LoadStat"+string(rune(n))+"\x00\x00\x00\xc0"))
			}
			return assert.ObjectsAreEqual(loads, running())
		}
		for tries := 1; ; tries++ { // a machine that stands still for 3 s makes the streams old
			eventually(t, told)
			before := engines[busy].Stats().Requests
			for range 6 {
				time.Sleep(200 * time.Millisecond)
				status, _, answer := g.complete(`{"model":"tiny","prompt":"hi","max_tokens":2}`)
				require.Equal(t, 200, status, answer)
				told()
			}
			if engines[busy].Stats().Requests == before {
				break
			}
			require.Less(t, tries, 5, loads)
		}
	}
	for _, pub := range tellers {
		pub.Close()
	}
	eventually(t, func() bool { return assert.ObjectsAreEqual([]int{0, 0}, running()) }, "what the metrics say")
	assert.Contains(t, g.log.String(), "an engine's load stream")
}

// TensorRT-LLM keeps its events until the gateway takes them. A prompt goes to who holds it, and its client is told how
// much of it was there.
func TestPickKVFollowsTensorRTLLM(t *testing.T) {
	t.Parallel()
	kept := enginesim.Config{Connector: "trtllm", Extra: map[string]string{"event_buffer_max_size": "1000"}}
	var engines []*enginesim.Engine
	var entries []string
	for range 2 {
		p, d := simPair(t, kept, kept)
		for i, e := range []*enginesim.Engine{p, d} {
			engines = append(engines, e)
			entries = append(entries, entry(e.URL(), []string{"prefill", "decode"}[i],
				map[string]string{"kvEvents": e.URL() + "/kv_cache_events"}))
		}
	}
	g := start(t, gatewayYAML("")+serverYAML("tiny", "  kvConnector: {type: trtllm}\n  kvEvents: {mode: entries}\n",
		entries...), "-pick", "kv")
	g.knowsKV("exact", "exact", "exact", "exact")
	prompt := strings.Trim(strings.Repeat("7,8,9,", 120), ",")
	held := engines[2]
	status, _, _ := do(t, "POST", held.URL()+"/v1/completions", `{"model":"tiny","prompt":[`+prompt+`],"max_tokens":1}`)
	require.Equal(t, 200, status)
	eventually(t, func() bool { return sum(g.page("/metrics"), "pd_kv_events_batches_total") > len(engines) })
	for turn := range 4 {
		status, _, body := g.complete(fmt.Sprintf(`{"model":"tiny","prompt":[%s,%d],"max_tokens":4}`, prompt, turn))
		require.Equal(t, 200, status)
		assert.EqualValues(t, 352, gjson.Get(body, "usage.prompt_tokens_details.cached_tokens").Int(), body)
	}
	assert.Zero(t, posted(engines[0], "/v1/completions"))
	// Another reader takes events away. The log says so, and what to do.
	fresh := func(first int) {
		status, _, _ := do(t, "POST", held.URL()+"/v1/completions",
			fmt.Sprintf(`{"model":"tiny","prompt":[%d,%s],"max_tokens":1}`, first, prompt))
		require.Equal(t, 200, status)
	}
	for first, taken := 10, "[]"; taken == "[]"; first++ {
		fresh(first)
		_, _, taken = do(t, "POST", held.URL()+"/kv_cache_events", "")
	}
	fresh(1) // the next event shows it
	g.knowsKV("exact", "exact", "incomplete", "exact")
	g.logs(1, "let one gateway alone read them")
}
