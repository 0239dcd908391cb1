// SPDX-License-Identifier: Apache-2.0

package kvevents_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/kvevents"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow/kvindex"
	"github.com/pdkit/pdkit/transport"
)

// fleet follows one engine.
type fleet struct {
	t     *testing.T
	index *kvindex.Index
	id    string
	sub   *kvevents.Subscriber

	mu   sync.Mutex
	told []string // by Observe
}

// follow reads the events of the engine at a URL. quick shortens the limits of time.
func follow(t *testing.T, url string, quick bool) *fleet {
	t.Helper()
	e, err := discovery.New(url, discovery.RoleDecode)
	require.NoError(t, err)
	e.Model, e.Attributes = "tiny", map[string]string{"kvEvents": strings.Replace(url, "127.0.0.1", "*", 1) +
		"/kv_cache_events"}
	client := &http.Transport{}
	f := &fleet{t: t, index: kvindex.New(), id: e.ID}
	f.sub, err = kvevents.New(f.index.Sink(), &kvevents.Options{
		Poll: transport.WithHeader(client, func() http.Header { return http.Header{"Authorization": {"Bearer x"}} }),
		Observe: func(_ kvevents.Source, err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.told = append(f.told, fmt.Sprint(err))
		}})
	require.NoError(t, err)
	if quick {
		kvevents.Quicken(f.sub)
	}
	set, err := static.NewSet(e)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = set.Run(ctx) })
	running.Go(func() { assert.NoError(t, f.sub.Run(ctx, set)) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		client.CloseIdleConnections()
		assert.Zero(t, f.sub.Counts().Streams)
	})
	return f
}

func (f *fleet) wants(state kvindex.State) (took time.Duration) {
	f.t.Helper()
	began := time.Now()
	require.Eventually(f.t, func() bool { return f.index.State(f.id).State == state }, 20*time.Second,
		time.Millisecond, "%v", f.index.State(f.id))
	return time.Since(began)
}

func (f *fleet) holds(tokens []uint32, n int) {
	f.t.Helper()
	held := 0
	require.Eventually(f.t, func() bool {
		held = 0
		for _, hit := range f.index.Match(&kvindex.Query{Model: "tiny", Tokens: append(slices.Clone(tokens), 1)}, nil) {
			held = max(held, hit.Device)
		}
		return held == n
	}, 20*time.Second, 2*time.Millisecond, "%d", n)
}

func (f *fleet) observed(text string) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.ContainsFunc(f.told, func(told string) bool { return strings.Contains(told, text) })
	}, 20*time.Second, 2*time.Millisecond, text)
}

// keeper is a server that keeps events until they are taken.
type keeper struct {
	*httptest.Server

	mu     sync.Mutex
	next   map[int]int // by rank
	list   []string
	stuck  chan struct{} // a response waits for it
	answer string        // in place of events
	status int
}

func newKeeper(t *testing.T) *keeper {
	k := &keeper{next: map[int]int{}}
	k.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "POST /kv_cache_events Bearer x", r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization"))
		k.mu.Lock()
		stuck, list, answer, status := k.stuck, k.list, k.answer, k.status
		k.list = nil
		k.mu.Unlock()
		if stuck != nil {
			select {
			case <-stuck:
			case <-r.Context().Done():
				return
			}
		}
		if answer == "" {
			answer = "[" + strings.Join(list, ",") + "]"
		}
		w.WriteHeader(max(status, 200))
		_, _ = io.WriteString(w, answer)
	}))
	t.Cleanup(k.Close)
	return k
}

func (k *keeper) set(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
}

// keeps adds an event of a rank.
func (k *keeper) keeps(rank int, data string) {
	k.set(func() {
		k.list = append(k.list, fmt.Sprintf(`{"event_id":%d,"attention_dp_rank":%d,"window_size":9,"data":%s}`,
			k.next[rank], rank, data))
		k.next[rank]++
	})
}

const created = `{"type":"created","num_blocks_per_cache_level":[9,0]}`

// chain is a stored event of blocks of four tokens, which follow each other from a prompt's first on.
func chain(blocks int) (stored string, tokens []uint32) {
	var list []any
	for i := range blocks {
		var ids []any
		for j := range 4 {
			tokens = append(tokens, uint32(10*i+j))
			ids = append(ids, map[string]any{"token_id": tokens[4*i+j], "token_extra_id": 0})
		}
		list = append(list, map[string]any{"block_hash": uint64(1<<63) + uint64(i), "tokens": ids, "cache_level": 0})
	}
	b, _ := json.Marshal(map[string]any{"type": "stored", "parent_hash": nil, "blocks": list})
	return string(b), tokens
}

func TestEventsThatAnEngineKeepsAreTaken(t *testing.T) {
	k := newKeeper(t)
	stored, tokens := chain(3)
	k.keeps(0, created)
	k.keeps(1, created)
	k.keeps(1, stored)
	k.set(func() { k.list = append(k.list, `{}`, `{"event_id":-1}`) })
	f := follow(t, k.URL, true)
	f.wants(kvindex.Exact)
	f.holds(tokens, 12)
	hits := f.index.Match(&kvindex.Query{Model: "tiny", Tokens: append(tokens, 1)}, nil)
	assert.Equal(t, []kvindex.Hit{{Engine: f.id, Rank: 1, Device: 12, Tokens: 12, Exact: true}}, hits)
	assert.EqualValues(t, 2, f.sub.Counts().Malformed)
	f.observed("<nil>")
}

// Who takes events takes them from all others. Nothing brings them back.
func TestASecondReaderIsTold(t *testing.T) {
	k := newKeeper(t)
	k.keeps(0, created)
	f := follow(t, k.URL, true)
	f.wants(kvindex.Exact)
	k.set(func() { k.next[0]++ }) // somebody else has taken one
	stored, tokens := chain(2)
	k.keeps(0, stored)
	f.wants(kvindex.Incomplete)
	f.holds(tokens, 8)
	f.observed("let one gateway alone read them")
	k.keeps(0, created)
	time.Sleep(50 * time.Millisecond)
	f.wants(kvindex.Incomplete)
	k.set(func() { clear(k.next) }) // it starts again
	k.keeps(0, created)
	f.wants(kvindex.Exact)
	f.holds(tokens, 0)

	k = newKeeper(t)
	k.set(func() { k.next[0] = 7 })
	k.keeps(0, stored)
	late := follow(t, k.URL, true) // and then one gateway after the other
	late.wants(kvindex.Incomplete)
	late.observed("this one before it started")
}

// An engine that does not respond is doubted. It may have taken the events out already, so it is waited for.
func TestASilentEngineIsDoubtedAndWaitedFor(t *testing.T) {
	k := newKeeper(t)
	stored, tokens := chain(2)
	k.keeps(0, created)
	k.keeps(0, stored)
	f := follow(t, k.URL, true)
	f.wants(kvindex.Exact)
	for range 2 {
		stuck := make(chan struct{})
		k.set(func() { k.stuck = stuck })
		f.wants(kvindex.Unknown)
		f.holds(tokens, 8)
		k.set(func() { k.stuck = nil })
		close(stuck)
		f.wants(kvindex.Exact) // its response to the same request
		f.holds(tokens, 8)
	}
	k.set(func() { k.status = http.StatusInternalServerError })
	f.wants(kvindex.Unknown)
	f.observed("kvevents: read: the response is an error")
	k.set(func() { k.status = 0 })
	time.Sleep(50 * time.Millisecond)
	f.wants(kvindex.Unknown) // it may be another process
	k.keeps(0, `{"type":"removed","block_hashes":[9223372036854775809]}`)
	f.wants(kvindex.Exact) // no other would go on with this number
	f.holds(tokens, 4)

	k.set(func() { k.status = http.StatusInternalServerError })
	f.wants(kvindex.Unknown)
	k.set(func() { k.status = 0; clear(k.next) })
	k.keeps(0, created)
	f.wants(kvindex.Exact)
	f.holds(tokens, 0)
}

func TestARequestForEventsThatFailsIsMadeAgain(t *testing.T) {
	for name, answer := range map[string]string{"no JSON": "<html>", "no list": `{"event_id":0}`,
		"half":     `[{"event_id":0}`,
		"no event": `[[`, "too deep": strings.Repeat("[", 20_000)} {
		t.Run(name, func(t *testing.T) {
			k := newKeeper(t)
			k.set(func() { k.answer = answer })
			f := follow(t, k.URL, true)
			f.observed("kvevents: read: ")
			k.set(func() { k.answer = "" })
			k.keeps(0, created)
			f.wants(kvindex.Exact)
			f.mu.Lock()
			defer f.mu.Unlock()
			for _, told := range f.told {
				assert.Less(t, len(told), 100, "no piece of the response is told")
			}
		})
	}
}

func TestAddressesOfEventsThatAreTaken(t *testing.T) {
	for address, want := range map[string]bool{"http://a:1/kv_cache_events": true, "https://*:1/x": true,
		"http://a:1": false, "http://a/x": false, "http://u:p@a:1/x": false, "httpx://a:1/x": false,
		"http://a:1/x, http://a:2/x": false, "http://:1/x": true} {
		e, err := discovery.New("http://h:1", discovery.RoleDecode)
		require.NoError(t, err)
		e.Attributes = map[string]string{"kvEvents": address}
		assert.Equal(t, want, kvevents.CheckAttributes(e) == nil, address)
		for _, other := range []string{"kvEventsReplay", "loadEvents"} {
			e.Attributes = map[string]string{"kvEvents": address, other: "tcp://a:2"}
			require.Error(t, kvevents.CheckAttributes(e))
		}
	}
}

// trtEngine is TensorRT-LLM of enginesim, and complete asks it for a prompt; it returns cached_tokens.
func trtEngine(t *testing.T, blocks int) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.Start(enginesim.Config{Connector: "trtllm", Blocks: blocks,
		KeepRequests: 1 << 20, Extra: map[string]string{"event_buffer_max_size": "1000"}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, e.Close()) })
	return e
}

func completeTRT(t *testing.T, e *enginesim.Engine, tokens []uint32) (cached int) {
	t.Helper()
	body, err := json.Marshal(map[string]any{"model": "tiny", "prompt": tokens, "max_tokens": 4})
	require.NoError(t, err)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(e.URL()+"/v1/completions", "application/json", strings.NewReader(string(body)))
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	var got struct {
		Usage struct {
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	require.NoError(t, json.NewDecoder(resp.Body).Decode(&got))
	return got.Usage.Details.Cached
}

func promptOf(n, number int) (tokens []uint32) {
	for i := range n {
		tokens = append(tokens, uint32((i*i+number)%251))
	}
	return tokens
}

// The engine has room for half of the conversations, so that blocks go all the time.
func TestCachedTokensOfTensorRTLLMArePredicted(t *testing.T) {
	e := trtEngine(t, 128)
	f := follow(t, e.URL(), true)
	polls := func() (n int) {
		for _, r := range e.Requests() {
			if r.Path == "/kv_cache_events" {
				n++
			}
		}
		return n
	}
	hits, compared := 0, 0
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 60 {
		p := promptOf(40+rnd.IntN(560), rnd.IntN(12))
		before := polls()
		require.Eventually(t, func() bool { return polls() >= before+2 }, 20*time.Second, time.Millisecond)
		exact := f.index.State(f.id).State == kvindex.Exact
		predicted := 0
		for _, hit := range f.index.Match(&kvindex.Query{Model: "tiny", Tokens: p}, nil) {
			predicted = hit.Device
		}
		cached := completeTRT(t, e, p)
		if exact {
			compared++
			assert.Equal(t, cached, predicted)
		}
		hits += min(cached, 1)
	}
	t.Logf("%d requests, %d while exact, %d of all had cached tokens", 60, compared, hits)
	assert.Greater(t, compared, 20)
	assert.Greater(t, hits, 10)
}

// An engine dies, starts again, and freezes: a claim to know all of it ends within a second.
func TestTheStateOfTensorRTLLMFollowsTheEngine(t *testing.T) {
	e := trtEngine(t, 64)
	f := follow(t, e.URL(), false)
	f.wants(kvindex.Exact)
	p := promptOf(320, 1)
	assert.Zero(t, completeTRT(t, e, p))
	f.holds(p, 320)
	for name, fault := range map[string]struct{ begin, end func() }{
		"killed": {e.Kill, func() { require.NoError(t, e.Restart()) }},
		"frozen": {e.Freeze, e.Thaw},
	} {
		fault.begin()
		took := f.wants(kvindex.Unknown)
		t.Log(name, "and unknown after", took)
		fault.end()
		completeTRT(t, e, p)
		t.Log("exact after", f.wants(kvindex.Exact))
		f.holds(p, 320)
	}
}

// An engine whose host begins like a URL publishes over ZeroMQ all the same.
func TestAHostNamedHTTPIsNotPolled(t *testing.T) {
	t.Parallel()
	e, err := discovery.New("http://http-engine.invalid:8000", discovery.RoleDecode)
	require.NoError(t, err)
	e.Attributes = map[string]string{"kvEvents": "tcp://*:5557"}
	ctx, cancel := context.WithCancel(t.Context())
	told := make(chan error, 1)
	sub, err := kvevents.New(kvindex.New().Sink(), &kvevents.Options{Observe: func(_ kvevents.Source, err error) {
		select {
		case told <- err:
		default:
		}
	}})
	require.NoError(t, err)
	set, err := static.NewSet(e)
	require.NoError(t, err)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { _ = set.Run(ctx) })
	running.Go(func() { assert.NoError(t, sub.Run(ctx, set)) })
	var why *kvevents.Error
	require.ErrorAs(t, <-told, &why)
	assert.Equal(t, "connect", why.Op)
}
