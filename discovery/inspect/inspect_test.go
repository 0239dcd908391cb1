// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engines is a client to engines that are not there: bodies by host and path.
type engines struct {
	mu      sync.Mutex
	bodies  map[string]string // "host/path" to a body; none is 404
	down    map[string]bool
	asked   []string
	headers []http.Header
	serve   func(*http.Request) (*http.Response, error) // instead of all that
	delay   time.Duration
	now     int
	most    int
}

func (e *engines) RoundTrip(r *http.Request) (*http.Response, error) {
	e.mu.Lock()
	key := r.URL.Host + r.URL.Path
	e.asked = append(e.asked, key)
	e.headers = append(e.headers, r.Header)
	e.now++
	e.most = max(e.most, e.now)
	body, known := e.bodies[key]
	down, serve := e.down[r.URL.Host], e.serve
	e.mu.Unlock()
	defer func() { e.mu.Lock(); e.now--; e.mu.Unlock() }()
	time.Sleep(e.delay)
	switch {
	case serve != nil:
		return serve(r)
	case down:
		return nil, errors.New("dial tcp " + r.URL.Host + ": connection refused")
	case !known:
		return respond(http.StatusNotFound, "{}"), nil
	}
	return respond(http.StatusOK, body), nil
}

func respond(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
}

func (e *engines) set(key, body string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bodies[key] = body
}

func (e *engines) setDown(host string, down bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down[host] = down
}

func (e *engines) questions() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.asked...)
}

func (e *engines) forget() { e.mu.Lock(); defer e.mu.Unlock(); e.asked = nil }

// What vLLM 0.32.0 answers (captured; the page of /metrics shortened).
const (
	vllmModels = `{"object":"list","data":[{"id":"lora","parent":"tiny"},{"id":"tiny","object":"model",` +
		`"owned_by":"vllm","root":"./model","parent":null}]}`
	vllmVersion = `{"version":"0.32.0"}`
	vllmMetrics = `# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="ti\"ny, {x}"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.5
process_start_time_seconds 1.79526211248e+09
`
	sglangInfo = `{"model_path":"m","api_key":"secret","dp_size":4,"disaggregation_mode":"prefill",` +
		`"disaggregation_bootstrap_port":8997,"version":"0.5.9","internal_states":[{}]}`
	mooncake = `{"0":{"engine_id":"a-0","worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}},"1":{"engine_id":"a-1",` +
		`"more":[]}}`
)

func vllm(hosts ...string) *engines {
	e := &engines{bodies: map[string]string{}, down: map[string]bool{}}
	for _, h := range hosts {
		e.bodies[h+"/v1/models"], e.bodies[h+"/version"], e.bodies[h+"/metrics"] = vllmModels, vllmVersion,
			vllmMetrics
	}
	return e
}

func endpoint(t testing.TB, host string, attributes map[string]string) discovery.Endpoint {
	t.Helper()
	e, err := discovery.New("http://"+host, discovery.RolePrefill)
	require.NoError(t, err)
	e.ID, e.Attributes = host, attributes
	return e
}

// world is a wrapped source at work inside a bubble of fake time.
type world struct {
	*inspect.Source
	list *discoverytest.Manual
	set  *discovery.Set
	errs *[]error
}

func run(t *testing.T, client *engines, o inspect.Options) *world {
	t.Helper()
	var mu sync.Mutex
	errs := &[]error{}
	if o.Client == nil {
		o.Client = client
	}
	o.Observe = func(_ string, err error) { mu.Lock(); defer mu.Unlock(); *errs = append(*errs, err) }
	list := discoverytest.NewManual()
	src := inspect.Wrap(list, &o)
	set := discovery.NewSet(src)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return &world{src, list, set, errs}
}

// after lets time pass, and everything happen that happens by then. settle is after a moment.
func after(d time.Duration) { time.Sleep(d); synctest.Wait() }
func settle()               { after(100 * time.Millisecond) }

// visited runs a source over a list of one engine, a:1, and lets it visit that.
func visited(t *testing.T, client *engines, o inspect.Options) *world {
	t.Helper()
	w := run(t, client, o)
	w.list.Publish(endpoint(t, "a:1", nil))
	settle()
	return w
}

// inBubble runs a subtest in a bubble of fake time.
func inBubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func (w *world) one(t *testing.T) discovery.Endpoint {
	t.Helper()
	require.Len(t, w.set.Load().Endpoints, 1)
	return w.set.Load().Endpoints[0]
}

func TestRulesOfSources(t *testing.T) {
	client := vllm("a:1", "b:1")
	var list *discoverytest.Manual
	n := 0
	publish := func() {
		n++
		e := endpoint(t, "a:1", nil)
		e.Zone = fmt.Sprint(n)
		list.Publish(e, endpoint(t, "b:1", nil))
	}
	discoverytest.Run(t, discoverytest.Harness{
		New: func() discovery.Source {
			list = discoverytest.NewManual()
			publish()
			return inspect.Wrap(list, &inspect.Options{Client: client, Interval: 10 * time.Millisecond})
		},
		Change: func() error { publish(); return nil },
		Break:  func() error { list.Fail(errors.New("down")); return nil },
		Repair: func() error { return nil },
		Remove: func() (string, error) {
			b := endpoint(t, "b:1", nil)
			b.Phase = discovery.PhaseDraining
			list.Publish(endpoint(t, "a:1", nil), b)
			list.Publish(endpoint(t, "a:1", nil))
			return "b:1", nil
		},
	})
}

func TestWhatTheListLacksComesFromTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := run(t, vllm("a:1"), inspect.Options{})
		given := map[string]string{"sideChannelPort": "5600"}
		w.list.Publish(endpoint(t, "a:1", given))
		settle()
		e := w.one(t)
		assert.Equal(t, "tiny", e.Model, "an adapter is not the model")
		assert.Equal(t, "0.32.0", e.Version)
		assert.Equal(t, map[string]string{"sideChannelPort": "5600", "dpSize": "2", "adapters": "lora"}, e.Attributes)
		assert.Equal(t, map[string]string{"sideChannelPort": "5600"}, given, "the list's own map was written to")
		r, ok := w.Reading("a:1")
		require.True(t, ok)
		assert.Equal(t, 2, r.DPSize)
		assert.Equal(t, inspect.Load{At: r.Load.At, KVUsage: 0.5, Running: 5, Waiting: 5}, r.Load)
		assert.Empty(t, *w.errs)
	})
}

func TestWhatTheListSaysWinsAndIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := run(t, client, inspect.Options{})
		listed := endpoint(t, "a:1", map[string]string{"dpSize": "8", "adapters": ""})
		listed.Model, listed.Version = "mine", "1"
		w.list.Publish(listed)
		settle()
		assert.Equal(t, listed, w.one(t))
		assert.Equal(t, []string{"a:1/metrics"}, client.questions())
	})
}

func TestAListIsPublishedBeforeItsEnginesAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm()
		client.serve = func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}
		w := run(t, client, inspect.Options{Timeout: time.Second})
		w.list.Publish(endpoint(t, "a:1", nil))
		synctest.Wait() // no time has passed
		assert.Equal(t, endpoint(t, "a:1", nil), w.one(t))
		after(1500 * time.Millisecond)
		require.NotEmpty(t, *w.errs)
		assert.EqualError(t, (*w.errs)[0], "inspect: GET /v1/models: no whole response in time")
	})
}

func TestSGLangTellsItsRanksAndBootstrapPort(t *testing.T) {
	for _, path := range []string{"/server_info", "/get_server_info"} {
		inBubble(t, path, func(t *testing.T) {
			client := &engines{bodies: map[string]string{"a:1" +
				path: sglangInfo, "a:1/metrics": "sglang:num_queue_reqs{tp_rank=\"0\"} 7\n" +
				"sglang:num_queue_reqs{tp_rank=\"1\"} 7\n"}}
			w := visited(t, client, inspect.Options{})
			e := w.one(t)
			assert.Equal(t, "0.5.9", e.Version)
			assert.Equal(t, map[string]string{"dpSize": "4", "bootstrapPort": "8997"}, e.Attributes)
			r, _ := w.Reading("a:1")
			assert.Equal(t, 7, r.Load.Waiting, "the ranks of one tensor-parallel group tell of the same queue")
			assert.NotContains(t, fmt.Sprintf("%+v", r), "secret")
		})
	}
}

func TestMooncakesServerIsAskedWhereTheListNamesIt(t *testing.T) {
	for name, attributes := range map[string]map[string]string{"port": {"bootstrapPort": "8998"},
		"URL": {"bootstrapURL": "http://a:8998/"}} {
		inBubble(t, name, func(t *testing.T) {
			client := &engines{bodies: map[string]string{"a:8998/query": mooncake}}
			w := run(t, client, inspect.Options{Client: transport.WithHeader(client, func() http.Header {
				return http.Header{"Authorization": {"Bearer k"}}
			})})
			w.list.Publish(endpoint(t, "a:1", attributes))
			settle()
			r, _ := w.Reading("a:1")
			assert.Equal(t, map[int]string{0: "a-0", 1: "a-1"}, r.EngineIDs)
			assert.Equal(t, "2", w.one(t).Attribute("dpSize"))
			for i, key := range client.questions() {
				assert.Equal(t, strings.HasPrefix(key, "a:1/"), client.headers[i].Get("Authorization") != "",
					"who gets the key of engines: %s", key)
			}
		})
	}
}

// A server whose ranks do not count from 0 is one of several that share a world: requests must not be sent to the
// others' ranks, and the engine's ports are those of its own ranks.
func TestRanksElsewhereAreNotCounted(t *testing.T) {
	type attributes = map[string]string
	for name, c := range map[string]struct {
		ranks      []string
		list, want attributes
	}{
		"one, which is another": {ranks: []string{"3"}, want: attributes{"dpSizeLocal": "1", "dpStartRank": "3"}},
		"one":                   {ranks: []string{"0"}},
		"with a gap":            {ranks: []string{"1", "3"}},
		"those of the second pod": {ranks: []string{"3", "2"}, list: attributes{"dpSize": "4"},
			want: attributes{"dpSize": "4", "dpSizeLocal": "2", "dpStartRank": "2"}},
		"the list counts the ports from the pod's first rank": {ranks: []string{"2", "3"},
			list: attributes{"dpStartRank": "0"}, want: attributes{"dpSizeLocal": "2", "dpStartRank": "0"}},
		"the list says that there are fewer": {ranks: []string{"2", "3"}, list: attributes{"dpSize": "1"},
			want: attributes{"dpSize": "1"}},
	} {
		inBubble(t, name, func(t *testing.T) {
			client := vllm("a:1")
			client.bodies["a:1/metrics"] = ""
			for _, rank := range c.ranks {
				client.bodies["a:1/metrics"] += `vllm:num_requests_running{engine="` + rank + `"} 0` + "\n"
			}
			w := run(t, client, inspect.Options{Ask: inspect.All &^ inspect.Adapters})
			w.list.Publish(endpoint(t, "a:1", c.list))
			settle()
			assert.Equal(t, c.want, w.one(t).Attributes)
		})
	}
}

func TestResponsesThatMakeNoSenseChangeNothing(t *testing.T) {
	long := strings.Repeat("x", 300)
	for name, body := range map[string]string{
		"empty": "", "text": "<html>", "cut": `{"version":"0.3`, "null": "null", "number": "1",
		"types":   `{"version":1,"data":{},"dp_size":"4","0":{"engine_id":1}}`,
		"long":    `{"version":"` + long + `","data":[{"id":"` + long + `"}],"dp_size":2,"version":"` + long + `"}`,
		"control": "{\"version\":\"1\\n2\",\"data\":[{\"id\":\"\\u0000\"}],\"dp_size\":-1}",
		"ranks":   `{"x":{"engine_id":"a"},"-1":{"engine_id":"b"},"dp_size":99999999}`,
		"metrics": "vllm:num_requests_running{engine=\"0} 1\nvllm:kv_cache_usage_perc{engine=\"0\"} NaN\n" +
			"vllm:kv_cache_usage_perc 7\nvllm:num_requests_waiting -1\nvllm:num_requests_waiting{a=\"\\\n{",
		"huge": strings.Repeat("a", 17<<20),
		"sum":  strings.Repeat("vllm:num_requests_running 999999999999\n", 4),
	} {
		inBubble(t, name, func(t *testing.T) {
			client := vllm()
			client.serve = func(*http.Request) (*http.Response, error) { return respond(http.StatusOK, body), nil }
			w := run(t, client, inspect.Options{})
			given := endpoint(t, "a:1", map[string]string{"bootstrapPort": "8998"})
			w.list.Publish(given)
			settle()
			if name == "long" {
				// the one thing that it says well
				given.Attributes = map[string]string{"bootstrapPort": "8998", "dpSize": "2"}
			}
			assert.Equal(t, given, w.one(t))
			r, ok := w.Reading("a:1")
			assert.True(t, ok)
			assert.Equal(t, inspect.Load{}, r.Load)
		})
	}
}

func TestEnginesThatMisbehaveCostNothingElse(t *testing.T) {
	status := func(code int) func(*http.Request) (*http.Response, error) {
		return func(*http.Request) (*http.Response, error) {
			r := respond(code, vllmVersion)
			r.Header.Set("Location", "http://elsewhere:1/")
			return r, nil
		}
	}
	for name, serve := range map[string]func(*http.Request) (*http.Response, error){
		"redirects": status(307), "refuses": status(401), "fails": status(500), "is starting": status(503),
		"panics": func(*http.Request) (*http.Response, error) { panic("a client of the caller's") },
		"breaks off": func(*http.Request) (*http.Response, error) {
			return nil, errors.New("dial tcp 10.1.2.3:1: refused")
		},
		"breaks in the middle": func(*http.Request) (*http.Response, error) {
			r := respond(200, "")
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader(`{"ver`), broken{}))
			return r, nil
		},
	} {
		inBubble(t, name, func(t *testing.T) {
			client := vllm()
			client.serve = serve
			w := visited(t, client, inspect.Options{})
			assert.Equal(t, endpoint(t, "a:1", nil), w.one(t))
			for _, key := range client.questions() {
				assert.True(t, strings.HasPrefix(key, "a:1/"), "it led elsewhere: %s", key)
			}
			require.NotEmpty(t, *w.errs)
			for _, err := range *w.errs {
				assert.NotContains(t, err.Error(), "10.1.2.3")
			}
			// and it is found when it is well
			client.mu.Lock()
			client.serve = nil
			maps.Copy(client.bodies, vllm("a:1").bodies)
			client.mu.Unlock()
			after(35 * time.Second)
			assert.Equal(t, "0.32.0", w.one(t).Version)
		})
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("reset by 10.1.2.3") }

func TestResponsesAreKeptAndAskedForAgainAfterTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := visited(t, client, inspect.Options{Interval: 10 * time.Second})
		client.forget()
		time.Sleep(9 * time.Second)
		zoned := endpoint(t, "a:1", nil)
		zoned.Zone = "z"
		w.list.Publish(zoned)
		synctest.Wait()
		assert.Empty(t, client.questions(), "a new list asks nothing of engines that are known")
		assert.Equal(t, "0.32.0", w.one(t).Version)
		said := zoned
		said.Version, said.Attributes = "mine", map[string]string{"dpSize": "1"}
		w.list.Publish(said)
		synctest.Wait()
		assert.Equal(t, "mine 1", w.one(t).Version+" "+w.one(t).Attribute("dpSize"),
			"what the list says now wins over what was learnt before")
		w.list.Publish(zoned)
		client.set("a:1/version", `{"version":"0.33.0"}`)
		time.Sleep(2 * time.Second)
		settle()
		assert.Equal(t, "0.33.0", w.one(t).Version)
	})
}

func TestAnEngineThatRestartsIsAskedAgain(t *testing.T) {
	const minute = time.Minute
	next := func(client *engines) { client.set("a:1/version", `{"version":"0.33.0"}`) }
	for name, restart := range map[string]func(t *testing.T, client *engines, w *world){
		"a visit fails": func(_ *testing.T, client *engines, _ *world) {
			client.setDown("a:1", true)
			time.Sleep(20 * time.Second) // of which a reading of the load notices it
			next(client)
			client.setDown("a:1", false)
			time.Sleep(20 * time.Second)
		},
		"its process is another": func(_ *testing.T, client *engines, _ *world) {
			next(client)
			client.set("a:1/metrics", strings.ReplaceAll(vllmMetrics, "1.79526211248e+09", "1.79526299e+09"))
			time.Sleep(11 * time.Second)
		},
		"somebody says so": func(_ *testing.T, client *engines, w *world) {
			next(client)
			w.Refresh("a:1")
			w.Refresh("unknown")
		},
		"its list says that it is ready again": func(t *testing.T, client *engines, w *world) {
			e := endpoint(t, "a:1", nil)
			e.Phase = discovery.PhaseNotReady
			w.list.Publish(e)
			settle()
			next(client)
			w.list.Publish(endpoint(t, "a:1", nil))
		},
		"it is at another address": func(t *testing.T, client *engines, w *world) {
			client.mu.Lock()
			maps.Copy(client.bodies, vllm("b:1").bodies)
			client.bodies["b:1/version"] = `{"version":"0.33.0"}`
			client.mu.Unlock()
			moved := endpoint(t, "b:1", nil)
			moved.ID = "a:1"
			w.list.Publish(moved)
		},
	} {
		inBubble(t, name, func(t *testing.T) {
			client := vllm("a:1")
			w := visited(t, client, inspect.Options{Interval: 10 * minute, LoadInterval: 10 * time.Second})
			require.Equal(t, "0.32.0", w.one(t).Version)
			restart(t, client, w)
			settle()
			assert.Equal(t, "0.33.0", w.one(t).Version)
		})
	}
}

func TestAnEngineThatIsDownKeepsWhatItSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := visited(t, client, inspect.Options{Interval: 5 * time.Second})
		client.setDown("a:1", true)
		after(time.Minute)
		assert.Equal(t, "0.32.0", w.one(t).Version)
		assert.NotEmpty(t, *w.errs)
		w.list.Fail(errors.New("down")) // nor does a failure of the list cost anything
		w.list.Publish(endpoint(t, "a:1", nil))
		after(time.Second)
		assert.Equal(t, "0.32.0", w.one(t).Version)
	})
}

func TestTheLoadIsReadMoreOftenAndIsNoSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := visited(t, client, inspect.Options{Interval: time.Hour, LoadInterval: time.Second})
		version := w.set.Load().Version
		client.forget()
		client.set("a:1/metrics", strings.ReplaceAll(vllmMetrics, "4.0", "40.0"))
		after(3 * time.Second)
		r, _ := w.Reading("a:1")
		assert.Equal(t, 41, r.Load.Waiting)
		assert.Equal(t, "0.32.0", r.Version, "a reading of the load forgot the rest")
		assert.Equal(t, version, w.set.Load().Version)
		assert.Subset(t, []string{"a:1/metrics", "a:1/v1/models"}, client.questions())
	})
}

func TestVisitsAreBoundedAndJoinedInFewSnapshots(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hosts []string
		var list []discovery.Endpoint
		for i := range 100 {
			hosts = append(hosts, fmt.Sprintf("e%d:1", i))
			list = append(list, endpoint(t, hosts[i], nil))
		}
		client := vllm(hosts...)
		client.delay = time.Millisecond
		w := run(t, client, inspect.Options{Concurrency: 3})
		w.list.Publish(list...)
		after(time.Second)
		for _, e := range w.set.Load().Endpoints {
			assert.Equal(t, "0.32.0", e.Version)
		}
		assert.Equal(t, 3, client.most)
		assert.LessOrEqual(t, w.set.Load().Version, uint64(12), "each engine made a snapshot of its own")
	})
}

func TestEnginesThatLeaveAreForgottenAndDrainingOnesLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := visited(t, client, inspect.Options{Interval: time.Second})
		e := endpoint(t, "a:1", nil)
		e.Phase = discovery.PhaseDraining
		w.list.Publish(e)
		client.forget()
		after(time.Minute)
		assert.Empty(t, client.questions())
		assert.Equal(t, "0.32.0", w.one(t).Version, "its last requests lost its attributes")
		w.list.Publish()
		settle()
		_, known := w.Reading("a:1")
		assert.False(t, known)
	})
}

func TestAPanicOfTheListIsItsFailure(t *testing.T) {
	src := inspect.Wrap(discovery.SourceFunc(func(context.Context, func(discovery.Snapshot)) error { panic("oh") }),
		nil)
	require.EqualError(t, src.Watch(t.Context(), func(discovery.Snapshot) {}), "panic: oh")
}

func TestNoMoreIsAskedThanWhatOneWants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		visited(t, client, inspect.Options{Ask: inspect.Version})
		assert.Equal(t, []string{"a:1/version"}, client.questions())
	})
}

// A visit must not wait on a network: what it costs is what it computes.
func BenchmarkPublish(b *testing.B) {
	var list []discovery.Endpoint
	for i := range 1000 {
		list = append(list, endpoint(b, fmt.Sprintf("e%d:1", i), nil))
	}
	inner, err := static.New(list...)
	require.NoError(b, err)
	client := vllm()
	b.ReportAllocs()
	for b.Loop() {
		ctx, cancel := context.WithCancel(b.Context())
		_ = inspect.Wrap(inner, &inspect.Options{Client: client, Ask: inspect.Version}).Watch(ctx,
			func(discovery.Snapshot) { cancel() })
	}
}
