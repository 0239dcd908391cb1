// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"io"
	"net/http"
	"net/http/httptest"
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

// Of a list that has an ID twice, a set takes the first endpoint. That one is asked, once.
func TestOfAnIDThatIsListedTwiceTheFirstIsAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1", "b:1")
		w := run(t, client, inspect.Options{})
		list := []discovery.Endpoint{endpoint(t, "a:1", nil), endpoint(t, "b:1", nil)}
		list[0].ID, list[1].ID = "x", "x"
		for range 3 {
			w.list.Publish(list...)
			settle()
		}
		for _, key := range client.questions() {
			assert.True(t, strings.HasPrefix(key, "a:1/"), key)
		}
		assert.Len(t, client.questions(), 3, "models, version and metrics")
		assert.Equal(t, "0.32.0", w.one(t).Version)
	})
}

// Engines that answer over a network as no engine should: each costs what one question may cost, and the list stays as
// it came.
func TestHostileEnginesOverTheNetwork(t *testing.T) {
	const timeout = 200 * time.Millisecond
	for name, serve := range map[string]http.HandlerFunc{
		"a byte at a time": func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				_, _ = io.WriteString(w, " ")
				_ = http.NewResponseController(w).Flush()
				time.Sleep(time.Millisecond)
			}
		},
		"redirects to itself": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path+"x", http.StatusFound)
		},
		"a head without end": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Long", strings.Repeat("x", 1<<20))
		},
		"a bomb": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = io.WriteString(w, strings.Repeat("\x00", 1<<20))
		},
		"another type": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>{\"version\":\"1\"}")
		},
		"promises more than it gives": func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n{\"version\":\"1\"}")
				_ = conn.Close()
			}
		},
		"no HTTP": func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, strings.Repeat("SSH-2.0-x\r\n", 100))
				_ = conn.Close()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asked atomic.Int32
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				assert.Empty(t, r.Header.Get("Accept-Encoding"), "what is packed costs more than it says")
				serve(w, r)
			}))
			defer server.Close()
			e, err := discovery.New(server.URL, discovery.RoleBoth)
			require.NoError(t, err)
			list := discoverytest.NewManual()
			list.Publish(e)
			failed := make(chan error, 100)
			src := inspect.Wrap(
				list, &inspect.Options{Timeout: timeout, Interval: time.Hour,
					Observe: func(_ string, err error) { failed <- err }},
			)
			set := discovery.NewSet(src)
			ended := make(chan struct{})
			go func() { defer close(ended); _ = set.Run(t.Context()) }()
			t.Cleanup(func() { <-ended })
			for range 2 {
				select {
				case err := <-failed:
					assert.NotContains(t, err.Error(), "127.0.0.1")
				case <-time.After(30 * time.Second):
					require.Fail(t, "the question goes on")
				}
			}
			assert.Equal(t, []discovery.Endpoint{e}, set.Load().Endpoints)
			assert.LessOrEqual(t, asked.Load(), int32(20), "it leads the questions on")
		})
	}
}

// An engine may serve several models, each with adapters. Only those of the model for which it is listed count, by any
// of the names that the engine has for it.
func TestAdaptersOfAnotherModelAreLeftOut(t *testing.T) {
	const cards = `{"data":[{"id":"n","root":"/w/n","parent":null,"max_model_len":512},
		{"id":"m","root":"org/m","parent":null,"max_model_len":4096},
		{"id":"alias","root":"org/m","parent":null,"max_model_len":4096},
		{"id":"of-n","parent":"n"},{"id":"of-m","parent":"m"},{"id":"of-alias","parent":"alias"},
		{"id":"of-weights","parent":"org/m"},{"id":"of-adapter","root":"org/m","parent":"of-m"},
		{"id":"of-nobody","parent":"x"}]}`
	for name, c := range map[string]struct {
		listed, served string
		want           string
		length         string
	}{
		"nobody says which":                    {"", "", "of-adapter,of-alias,of-m,of-n,of-nobody,of-weights", "512"},
		"the options say it":                   {"", "m", "of-alias,of-m,of-weights", "4096"},
		"the list says it":                     {"m", "", "of-alias,of-m,of-weights", "4096"},
		"by another name":                      {"", "alias", "of-alias,of-m,of-weights", "4096"},
		"another model":                        {"", "n", "of-n", "512"},
		"the options count more":               {"m", "n", "of-n", "512"},
		"a name that the engine does not list": {"", "y", "of-n", "512"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := vllm("a:1")
				client.set("a:1/v1/models", cards)
				e := endpoint(t, "a:1", nil)
				e.Model = c.listed
				w := run(t, client, inspect.Options{Interval: time.Hour, Model: c.served})
				w.list.Publish(e)
				settle()
				assert.Equal(t, c.want, w.one(t).Attribute("adapters"))
				assert.Equal(t, c.length, w.one(t).Attribute("maxModelLen"))
			})
		})
	}
}

// The length of the context is told by the same response, whoever has asked for it.
func TestTheContextIsKnownWithoutAdapters(t *testing.T) {
	for _, ask := range []inspect.Questions{inspect.Models, inspect.Adapters} {
		synctest.Test(t, func(t *testing.T) {
			client := vllm("a:1")
			client.set("a:1/v1/models", `{"data":[{"id":"m","max_model_len":4096},{"id":"lora","parent":"m"}]}`)
			e := visited(t, client, inspect.Options{Interval: time.Hour, Ask: ask}).one(t)
			assert.Equal(t, "4096", e.Attribute("maxModelLen"))
			assert.Equal(t, ask == inspect.Adapters, e.Attribute("adapters") != "")
		})
	}
}

// Adapters are loaded and unloaded while the engine runs, and lost when it restarts.
func TestAdaptersAreFollowed(t *testing.T) {
	card := func(id, parent string) string {
		return `{"id":"` + id + `","parent":` + parent + `,"max_model_len":null}`
	}
	const model = `{"id":"m","parent":null,"max_model_len":4096}`
	synctest.Test(t, func(t *testing.T) {
		client := vllm("a:1")
		w := visited(t, client, inspect.Options{Interval: time.Hour, LoadInterval: time.Second})
		require.Equal(t, "lora", w.one(t).Attribute("adapters"))
		for _, c := range []struct {
			data []string
			want string
		}{
			{[]string{model, card("b", `"m"`), card("a", `"m"`), card("a", `"m"`)}, "a,b"},
			{[]string{card("b", `"m"`), model, card("has,comma", `"m"`), card("\\u0007", `"m"`)}, "b"},
			{[]string{model}, ""},
			{[]string{model, card("c", `"m"`)}, "c"},
		} {
			client.set("a:1/v1/models", `{"data":[`+strings.Join(c.data, ",")+`]}`)
			after(2 * time.Second)
			assert.Equal(t, c.want, w.one(t).Attribute("adapters"))
		}
		version := w.set.Load().Version
		client.set("a:1/v1/models", `{"data":7}`)
		after(10 * time.Second)
		assert.Equal(t, "c", w.one(t).Attribute("adapters"), "nonsense says nothing")
		assert.Equal(t, version, w.set.Load().Version, "what has not changed is no snapshot")
		w.Refresh("a:1")
		client.set("a:1/v1/models", `{"data":[`+model+`]}`)
		after(time.Second)
		assert.Equal(t, map[string]string{"dpSize": "2", "maxModelLen": "4096"}, w.one(t).Attributes)
	})
}
