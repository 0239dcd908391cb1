// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
)

// fleet is engines that list models, by host.
type fleet struct {
	t      *testing.T
	lists  map[string]string // host to body; "" never answers
	mu     sync.Mutex
	asked  map[string]int
	header http.Header // of the last request
	now    int         // requests at the moment
	most   int         // at once
}

func (f *fleet) RoundTrip(r *http.Request) (*http.Response, error) {
	host := r.URL.Hostname()
	f.mu.Lock()
	f.asked[host]++
	f.header = r.Header
	f.now++
	f.most = max(f.most, f.now)
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.now--
	}()
	switch list := f.lists[host]; list {
	case "":
		<-r.Context().Done()
		return nil, r.Context().Err()
	case "down":
		return nil, errors.New("refused")
	case "late":
		select {
		case <-r.Context().Done():
			return nil, r.Context().Err()
		case <-time.After(1500 * time.Millisecond):
			return response(200, "application/json", strings.NewReader(`{"data":[{"id":"late"}]}`)), nil
		}
	case "ill":
		return response(500, "application/json", strings.NewReader(`{"data":[{"id":"ill"}]}`)), nil
	default:
		return response(200, "application/json", strings.NewReader(list)), nil
	}
}

// engines are a model's, as role@host, with an ! before those that are not ready.
func (f *fleet) engines(names ...string) *passthrough.Engines {
	var eps []discovery.Endpoint
	for _, name := range names {
		role, host, _ := strings.Cut(strings.TrimPrefix(name, "!"), "@")
		kind, err := discovery.ParseRole(role)
		require.NoError(f.t, err)
		e, err := discovery.New("http://"+host+":1", kind)
		require.NoError(f.t, err)
		if strings.HasPrefix(name, "!") {
			e.Phase = discovery.PhaseNotReady
		}
		eps = append(eps, e)
	}
	set, err := static.NewSet(eps...)
	require.NoError(f.t, err)
	return &passthrough.Engines{Set: set, Transport: f}
}

func get(t *testing.T, h http.Handler, header ...string) string {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "/v1/models", nil)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := do(h, r)
	require.Equal(t, http.StatusOK, w.Code)
	assert.Equal(t, "application/json", w.Header().Get("Content-Type"))
	assert.Len(t, w.Header().Values("X-Request-Id"), 1)
	var l struct {
		Object string
		Data   []struct{ ID string }
	}
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &l), w.Body)
	require.Equal(t, "list", l.Object)
	ids := []string{}
	for _, m := range l.Data {
		ids = append(ids, m.ID)
	}
	return strings.Join(ids, " ")
}

func TestTheListIsTheUnionAndNeverFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t, asked: map[string]int{}, lists: map[string]string{
			"one":  `{"data":[{"id":"a"},{"id":"shared"},{"no":"id"},7]}`,
			"two":  `{"data":[{"id":"shared","owned_by":"x"},{"id":"b"}]}`,
			"both": `{"data":[{"id":"c"}]}`, "prefill": `{"data":[{"id":"p"}]}`, "unready": `{"data":[{"id":"u"}]}`,
			"down": "down", "ill": "ill", "garbage": "<html>",
			"large":  `{"data":[{"id":"` + strings.Repeat("x", 1<<20) + `"}]}`,
			"silent": "",
		}}
		first := f.engines("decode@one", "prefill@prefill", "!decode@unready", "decode@down", "decode@ill")
		second := f.engines("decode@silent", "decode@two", "decode@garbage", "decode@large", "both@both", "decode@one")
		h := handler(t, unknown, &passthrough.Options{All: func() []*passthrough.Engines {
			return []*passthrough.Engines{first, nil, {}, second}
		}})
		begun := time.Now()
		assert.Equal(t, "a shared b c", get(t, h, "Authorization", "Bearer 1", "Cookie", "x"))
		assert.Equal(t, 2*time.Second, time.Since(begun), "a silent engine is left out in the end")
		assert.Equal(t, "Bearer 1", f.header.Get("Authorization"))
		assert.Empty(t, f.header.Get("Cookie"))
		assert.Equal(t, 1, f.asked["one"], "an engine is asked once, whatever models it stands under")
		assert.Zero(t, f.asked["prefill"]+f.asked["unready"])
	})
}

func TestAListIsKeptForAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t, asked: map[string]int{}, lists: map[string]string{"one": `{"data":[{"id":"a"}]}`}}
		only := f.engines("decode@one")
		h := handler(t, func(model string) (*passthrough.Engines, *pdflow.Error) {
			assert.Empty(t, model)
			return only, nil
		}, nil)
		for range 3 {
			assert.Equal(t, "a", get(t, h, "Authorization", "Bearer 1"))
		}
		assert.Equal(t, 1, f.asked["one"])
		get(t, h, "Authorization", "Bearer 2")
		assert.Equal(t, 2, f.asked["one"], "another key may list others")
		only.ForwardHeaders = []string{"x-tenant"}
		for i, name := range []string{"X-Api-Key", "X-Tenant"} {
			for range 2 {
				get(t, h, name, "1", "Cookie", "2")
				assert.Equal(t, 3+i, f.asked["one"], "so may one in %s", name)
				assert.Equal(t, "1", f.header.Get(name))
				assert.Empty(t, f.header.Get("Cookie"))
			}
		}
		time.Sleep(2 * time.Second)
		get(t, h, "Authorization", "Bearer 1")
		assert.Equal(t, 5, f.asked["one"])
		assert.Empty(t, get(t, handler(t, unknown, nil)), "nobody's")
	})
}

// If the client whose request started the query leaves, other clients that wait for the same list still get it. With
// the last of them the query ends.
func TestAListLivesAsLongAsSomebodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t, asked: map[string]int{}, lists: map[string]string{"one": "late"}}
		only := f.engines("decode@one")
		h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return only, nil }, nil)
		second := make(chan string)
		go func() { time.Sleep(time.Second / 2); second <- get(t, h) }()
		waitFor := func(d time.Duration) {
			ctx, leave := context.WithTimeout(t.Context(), d)
			defer leave()
			w := do(h, httptest.NewRequest(http.MethodGet, "/v1/models", nil).WithContext(ctx))
			assert.NotEqual(t, http.StatusOK, w.Code)
		}
		waitFor(time.Second)
		assert.Equal(t, "late", <-second)
		assert.Equal(t, 1, f.asked["one"])

		time.Sleep(modelsFresh)
		waitFor(time.Second)
		synctest.Wait()
		assert.Zero(t, f.now, "the query has ended")
		assert.Equal(t, "late", get(t, h), "and what it had is nobody's list")
		assert.Equal(t, 3, f.asked["one"])
	})
}

const modelsFresh = 2 * time.Second

// Of 2,000 clients, each with an Authorization of its own, each cost a request to each engine, all of them at once, and
// went on when its client had left.
func TestManyListsAskFewEngines(t *testing.T) {
	for name, c := range map[string]struct {
		stay         time.Duration
		asked, lists int // at most; at least
	}{
		"clients that leave at once": {time.Millisecond, 600, 0},
		"clients that wait":          {time.Minute, 100, 10},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f, hosts := &fleet{t: t, asked: map[string]int{}, lists: map[string]string{}}, []string(nil)
				for _, host := range []string{"one", "two", "three", "four", "five", "six"} {
					f.lists[host] = "late"
					hosts = append(hosts, "decode@"+host)
				}
				all := f.engines(hosts...)
				h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return all, nil }, nil)
				var wg sync.WaitGroup
				var lists, refused atomic.Int64
				for i := range 2000 {
					wg.Go(func() {
						ctx, leave := context.WithTimeout(t.Context(), c.stay)
						defer leave()
						r := httptest.NewRequest(http.MethodGet, "/v1/models", nil).WithContext(ctx)
						r.Header.Set("Authorization", strconv.Itoa(i))
						switch w := do(h, r); {
						case strings.Contains(w.Body.String(), "late"):
							lists.Add(1)
						case w.Code == http.StatusServiceUnavailable:
							refused.Add(1)
						case ctx.Err() == nil:
							t.Error("neither a list nor the truth", w.Code, w.Body)
						}
					})
				}
				wg.Wait()
				synctest.Wait()
				asked := 0
				for _, n := range f.asked {
					asked += n
				}
				t.Logf("%d requests to engines, %d at once; %d lists, %d refused", asked, f.most, lists.Load(),
					refused.Load())
				assert.LessOrEqual(t, asked, c.asked)
				assert.LessOrEqual(t, f.most, 32)
				assert.GreaterOrEqual(t, int(lists.Load()), c.lists)
				assert.Zero(t, f.now)
				time.Sleep(modelsFresh)
				assert.Equal(t, "late", get(t, h), "nothing is left behind")
			})
		})
	}
}

// Of the lists that are kept the oldest goes for a new one, and no other.
func TestTheOldestListGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fleet{t: t, asked: map[string]int{}, lists: map[string]string{"one": `{"data":[{"id":"a"}]}`}}
		only := f.engines("decode@one")
		h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return only, nil }, nil)
		for i := range 65 {
			get(t, h, "Authorization", strconv.Itoa(i))
			time.Sleep(time.Millisecond)
		}
		for i := 64; i > 0; i-- {
			get(t, h, "Authorization", strconv.Itoa(i))
		}
		assert.Equal(t, 65, f.asked["one"])
		get(t, h, "Authorization", "0")
		assert.Equal(t, 66, f.asked["one"])
	})
}

// A host's function that panics ends its request, and not the process: the list is made by a goroutine of its own.
func TestModelsOfAHostThatPanics(t *testing.T) {
	h := handler(t, unknown, &passthrough.Options{All: func() []*passthrough.Engines { panic("host") }})
	for range 2 { // nothing of the first is left behind
		assert.Panics(t, func() {
			h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/v1/models", nil))
		})
	}
}

// deadlines is a writer that keeps the write deadlines it was given.
type deadlines struct {
	*httptest.ResponseRecorder
	set []time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error { d.set = append(d.set, t); return nil }

// The write timeout holds for the list of models, too, so a client that does not read is cut.
func TestWritingModelsIsBounded(t *testing.T) {
	w := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	handler(t, unknown, nil).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/models", nil))
	require.Len(t, w.set, 2)
	assert.WithinDuration(t, time.Now().Add(30*time.Second), w.set[0], 5*time.Second)
	assert.True(t, w.set[1].IsZero(), "the connection serves more requests")
}
