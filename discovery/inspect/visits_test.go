// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/discovery/inspect"
)

func TestWhatOnlyAPrefillEngineIsGiven(t *testing.T) {
	for name, c := range map[string]struct {
		role discovery.Role
		info string
		want string
	}{
		"a prefill engine":                  {discovery.RolePrefill, sglangInfo, "8997"},
		"an engine of role both":            {discovery.RoleBoth, sglangInfo, "8997"},
		"a decode engine, whatever it says": {discovery.RoleDecode, sglangInfo, ""},
		"an engine that says that it is not": {discovery.RolePrefill,
			strings.Replace(sglangInfo, `"prefill"`, `"decode"`, 1), ""},
		"a port beyond ports": {discovery.RolePrefill, strings.Replace(sglangInfo, "8997", "65536", 1),
			""},
	} {
		inBubble(t, name, func(t *testing.T) {
			w := run(t, &engines{bodies: map[string]string{"a:1/server_info": c.info}}, inspect.Options{})
			e := endpoint(t, "a:1", nil)
			e.Role = c.role
			w.list.Publish(e)
			settle()
			assert.Equal(t, c.want, w.one(t).Attribute("bootstrapPort"))
			assert.Equal(t, "4", w.one(t).Attribute("dpSize"))
		})
	}
}

// A response that is too large is ignored, even if its beginning is valid.
func TestTheBeginningOfAResponseIsNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		client.bodies["a:1/version"] += strings.Repeat(" ", 5<<10)
		client.bodies["a:1/metrics"] += strings.Repeat("# a long page\n", 2<<20)
		w := visited(t, client, inspect.Options{})
		assert.Equal(t, "tiny", w.one(t).Model)
		assert.Empty(t, w.one(t).Version)
		r, _ := w.Reading("a:1")
		assert.Equal(t, []any{0, inspect.Load{}}, []any{r.DPSize, r.Load})
	})
}

// body is a response's body that records whether it was closed.
type body struct {
	io.Reader
	open *atomic.Int32
}

func (b body) Close() error { b.open.Add(-1); return nil }

func TestEachResponseIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var open atomic.Int32
		client, n := vllm(), 0
		client.serve = func(*http.Request) (*http.Response, error) {
			open.Add(1)
			n++
			r := respond([]int{200, 404, 500}[n%3], "")
			r.Body = body{strings.NewReader(vllmVersion), &open}
			return r, nil
		}
		w := run(t, client, inspect.Options{Interval: time.Second})
		w.list.Publish(endpoint(t, "a:1", nil))
		after(time.Minute)
		assert.Zero(t, open.Load())
		assert.Greater(t, n, 100)
	})
}

// An engine that cannot be reached costs one question a visit, and one that starts is asked again soon.
func TestAnEngineThatIsNotThereYetIsAskedOnceAndSoonAgain(t *testing.T) {
	for name, starting := range map[string]func(*http.Request) (*http.Response, error){
		"nobody listens": func(*http.Request) (*http.Response, error) { return nil, io.EOF },
		"it says so":     func(*http.Request) (*http.Response, error) { return respond(503, ""), nil },
	} {
		inBubble(t, name, func(t *testing.T) {
			client := vllm("a:1")
			client.serve = starting
			w := visited(t, client, inspect.Options{})
			assert.Equal(t, []string{"a:1/v1/models"}, client.questions())
			client.mu.Lock()
			client.serve = nil
			client.mu.Unlock()
			after(1200 * time.Millisecond)
			assert.Equal(t, "0.32.0", w.one(t).Version)
		})
	}
}

// Pauses grow while an engine is down, and begin anew when it was there.
func TestPausesBeginAnewAfterAGoodVisit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := run(t, client, inspect.Options{Interval: time.Hour})
		down := func(is bool) { client.setDown("a:1", is) }
		down(true)
		w.list.Publish(endpoint(t, "a:1", nil))
		after(10 * time.Minute)
		assert.LessOrEqual(t, len(client.questions()), 11, "1 s, 2 s, 4 s …")
		down(false)
		w.Refresh("a:1")
		settle()
		require.Equal(t, "0.32.0", w.one(t).Version)
		down(true)
		w.Refresh("a:1")
		settle()
		client.forget()
		after(1500 * time.Millisecond)
		assert.Len(t, client.questions(), 1)
	})
}

// What was learnt belongs to an address: another engine under the same ID has its own.
func TestAnotherAddressIsAnotherEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		client.down["b:1"] = true
		w := run(t, client, inspect.Options{Interval: 10 * time.Second})
		a, b := endpoint(t, "a:1", nil), endpoint(t, "b:1", nil)
		a.ID, b.ID = "x", "x"
		w.list.Publish(a)
		settle()
		require.Equal(t, "0.32.0", w.one(t).Version)
		w.list.Publish(b)
		settle()
		assert.Empty(t, w.one(t).Version)
		client.forget()
		after(time.Minute)
		assert.NotEmpty(t, client.questions())
		for _, key := range client.questions() {
			assert.True(t, strings.HasPrefix(key, "b:1/"), "the old address is asked still")
		}
	})
}

// An engine that leaves is asked no more, even if a question was under way; one that comes back is asked again.
func TestEnginesThatLeaveAndComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		client.delay = time.Second
		w := run(t, client, inspect.Options{Interval: 10 * time.Second})
		w.list.Publish(endpoint(t, "a:1", nil))
		time.Sleep(500 * time.Millisecond) // in the midst of the first question
		w.list.Publish()
		after(5 * time.Second)
		client.forget()
		after(time.Minute)
		assert.Empty(t, client.questions())
		w.list.Publish(endpoint(t, "a:1", nil))
		after(5 * time.Second)
		assert.Equal(t, "0.32.0", w.one(t).Version)
	})
}

// Who says during a visit that the engine has restarted means what comes after it.
func TestARefreshDuringAVisitIsAnotherVisit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		client.delay = time.Second
		w := run(t, client, inspect.Options{})
		w.list.Publish(endpoint(t, "a:1", nil))
		time.Sleep(1500 * time.Millisecond)
		w.Refresh("a:1")
		after(6 * time.Second)
		assert.Len(t, client.questions(), 6)
	})
}

// A list with an entry that is none is the set's to complain of.
func TestAnEntryThatIsNoneIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1", "x:1")
		w := run(t, client, inspect.Options{})
		odd := endpoint(t, "x:1", nil)
		odd.Role = 0
		w.list.Publish(discovery.Endpoint{ID: "none"}, odd, endpoint(t, "a:1", nil))
		settle()
		assert.Equal(t, "0.32.0", w.one(t).Version)
		for _, key := range client.questions() {
			assert.True(t, strings.HasPrefix(key, "a:1/"))
		}
	})
}

// When Watch has returned, no question is under way, though a client may be slow to give up.
func TestNoQuestionIsUnderWayAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var under atomic.Int32
		client := vllm()
		client.serve = func(r *http.Request) (*http.Response, error) {
			under.Add(1)
			defer under.Add(-1)
			<-r.Context().Done()
			time.Sleep(time.Second)
			return nil, r.Context().Err()
		}
		list := discoverytest.NewManual()
		list.Publish(endpoint(t, "a:1", nil))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		require.NoError(
			t, inspect.Wrap(list, &inspect.Options{Client: client, Timeout: time.Minute}).Watch(ctx,
				func(discovery.Snapshot) {}),
		)
		assert.Zero(t, under.Load())
	})
}
