// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"k8s.io/client-go/rest"
)

// What a real API server does rarely is played here: each test's handler answers lists and watches of one group.

type played struct {
	*rest.Config
	calls atomic.Int64
}

// play starts a server. call counts from 1.
func play(t *testing.T, answer func(w http.ResponseWriter, r *http.Request, call int64)) *played {
	p := &played{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer(w, r, p.calls.Add(1))
	}))
	t.Cleanup(server.Close)
	t.Cleanup(server.CloseClientConnections)
	p.Config = &rest.Config{Host: server.URL, QPS: -1}
	return p
}

func (p *played) watch(t *testing.T) *watched {
	return watchModelServers(t, ModelServerOptions{Config: p.Config, Groups: groups()[:1]})
}

// listOf writes a list of objects, each with its name as its model.
func listOf(w http.ResponseWriter, names ...string) {
	items := make([]string, len(names))
	for i, name := range names {
		items[i] = objectOf(name, name)
	}
	_, _ = fmt.Fprintf(w, `{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServerList",`+
		`"metadata":{"resourceVersion":"5"},"items":[%s]}`, strings.Join(items, ","))
}

func objectOf(name, model string) string {
	return fmt.Sprintf(`{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServer",`+
		`"metadata":{"name":%q,"namespace":"default","uid":"u-%s","generation":1},"spec":{"model":%q}}`, name, name,
		model)
}

func refuse(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	_, _ = fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"message":"secret `+
		`words","code":%d}`, reason, code)
}

func isWatch(r *http.Request) bool { return r.URL.Query().Has("watch") }

func TestOneWordThatADefinitionIsGoneIsNotBelieved(t *testing.T) {
	var lists atomic.Int64
	p := play(t, func(w http.ResponseWriter, r *http.Request, _ int64) {
		if isWatch(r) {
			refuse(w, http.StatusNotFound, "NotFound") // one of several servers, which has just started
			return
		}
		switch n := lists.Add(1); {
		case n == 1:
			listOf(w, "a")
		case n < 7 && n%2 == 0:
			refuse(w, http.StatusNotFound, "NotFound")
		case n < 7:
			listOf(w, "a")
		case n == 7:
			listOf(w, "a", "b")
		default:
			http.Error(w, "404 page not found", http.StatusNotFound)
		}
	})
	w := p.watch(t)
	assert.Equal(t, "matrixinfer/a=a", shown(w.next(t)))
	assert.Equal(t, "matrixinfer/a=a matrixinfer/b=b", shown(w.next(t)))
	assert.Empty(t, w.faults)
	assert.Empty(t, w.next(t), "the second time it is")
	assert.ErrorContains(t, w.fault(t), "no ModelServer definition is installed")
}

func TestAVersionThatIsTooOldIsNoFault(t *testing.T) {
	var lists atomic.Int64
	p := play(t, func(w http.ResponseWriter, r *http.Request, _ int64) {
		switch n := lists.Load(); {
		case !isWatch(r):
			listOf(w, []string{"a", "b", "c"}[:min(lists.Add(1), 3)]...)
		case n == 1:
			refuse(w, http.StatusGone, "Expired")
		case n == 2:
			_, _ = w.Write(
				[]byte(`{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure",` +
					`"reason":"Expired","code":410}}`),
			)
		default:
			_, _ = w.Write([]byte(`{"type":"MODIFIED","object":` + objectOf("c", "changed") +
				`}{"type":"BOOKMARK","object":{}} garbage`))
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	})
	w := p.watch(t)
	w.until(t, "matrixinfer/a=a matrixinfer/b=b matrixinfer/c=c")
	w.until(t, "matrixinfer/a=a matrixinfer/b=b matrixinfer/c=changed")
	assert.Empty(t, w.faults)
}

// TestAnotherObjectOfTheSameNameIsNews also when the server ended the watch in between, and nobody saw the first one
// go.
func TestAnotherObjectOfTheSameNameIsNews(t *testing.T) {
	p := play(t, func(w http.ResponseWriter, r *http.Request, call int64) {
		object := objectOf("a", "a")
		switch {
		case isWatch(r):
			return
		case call > 4:
			object = strings.Replace(object, `"uid":"u-a"`, `"uid":"u-2"`, 1)
		}
		_, _ = fmt.Fprintf(w, `{"apiVersion":"networking.matrixinfer.ai/v1alpha1","kind":"ModelServerList",`+
			`"metadata":{},"items":[%s]}`, object)
	})
	w := p.watch(t)
	assert.Equal(t, "u-a", w.next(t)[0].UID)
	assert.Equal(t, "u-2", w.next(t)[0].UID)
}

func TestEachFaultIsToldOnceInWordsThatStayTheSame(t *testing.T) {
	const refused = `the API server refuses to list modelservers.networking.matrixinfer.ai in namespace "default": `
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter)
		want   string
	}{
		"credentials": {func(w http.ResponseWriter) { refuse(w, 401, "Unauthorized") },
			`the API server does not accept the credentials`},
		"server's own fault": {func(w http.ResponseWriter) { refuse(w, 500, "InternalError") }, refused +
			`500 Internal Server Error`},
		"no reason": {func(w http.ResponseWriter) { refuse(w, 418, "") }, refused + `418 I'm a teapot`},
		"a proxy's page": {func(w http.ResponseWriter) {
			http.Error(w, "<html>secret words</html>", http.StatusBadGateway)
		}, refused + `502 Bad Gateway`},
	} {
		t.Run(name, func(t *testing.T) {
			fourth := make(chan struct{})
			p := play(t, func(w http.ResponseWriter, r *http.Request, call int64) {
				if call == 4 {
					close(fourth)
				}
				if call > 4 {
					if isWatch(r) {
						<-r.Context().Done()
						return
					}
					listOf(w, "a")
					return
				}
				c.answer(w)
			})
			w := p.watch(t)
			assert.EqualError(t, w.fault(t), "kubernetes: "+c.want+" (there is no list yet)")
			receive(t, fourth)
			w.until(t, "matrixinfer/a=a")
			assert.Empty(t, w.faults)
		})
	}
}

func TestAFaultOfAllGroupsIsToldOnce(t *testing.T) {
	p := play(t, func(w http.ResponseWriter, r *http.Request, call int64) {
		switch {
		case call <= 6:
			refuse(w, http.StatusUnauthorized, "Unauthorized")
		case isWatch(r):
			<-r.Context().Done()
		default:
			listOf(w, "a")
		}
	})
	w := watchModelServers(t, ModelServerOptions{Config: p.Config})
	assert.Len(t, w.next(t), 2)
	assert.Len(t, w.faults, 1)
}

func TestAFaultThatComesBackIsToldAgain(t *testing.T) {
	p := play(t, func(w http.ResponseWriter, r *http.Request, call int64) {
		switch call {
		case 1, 2, 5, 6:
			refuse(w, http.StatusUnauthorized, "Unauthorized")
		case 3:
			listOf(w, "a")
		case 4: // a watch, which ends
		case 7:
			listOf(w, "a", "b")
		default:
			<-r.Context().Done()
		}
	})
	w := p.watch(t)
	w.until(t, "matrixinfer/a=a matrixinfer/b=b")
	require.Len(t, w.faults, 2)
	assert.EqualError(t, w.fault(t), "kubernetes: the API server does not accept the credentials (there is no "+
		"list yet)")
	assert.EqualError(t, w.fault(t), "kubernetes: the API server does not accept the credentials (the last list stays)")
}

func TestAResponseThatIsNoListChangesNothing(t *testing.T) {
	var lists atomic.Int64
	p := play(t, func(w http.ResponseWriter, r *http.Request, _ int64) {
		switch {
		case isWatch(r):
		case lists.Add(1) == 1:
			listOf(w, "a")
		case lists.Load() < 4:
			_, _ = w.Write([]byte(`[]`))
		default:
			listOf(w, "a", "b")
		}
	})
	w := p.watch(t)
	assert.Equal(t, "matrixinfer/a=a", shown(w.next(t)))
	assert.Equal(t, "matrixinfer/a=a matrixinfer/b=b", shown(w.next(t)))
	assert.Len(t, w.faults, 1)
	assert.ErrorContains(t, w.fault(t), "kubernetes: what the API server answers makes no sense (the last list stays)")
}

func TestWatchEndsWithItsContext(t *testing.T) {
	asked := make(chan struct{}, 100)
	p := play(t, func(_ http.ResponseWriter, r *http.Request, _ int64) {
		asked <- struct{}{}
		<-r.Context().Done() // an API server that hangs
	})
	m, err := NewModelServers(&ModelServerOptions{Config: p.Config, OnError: func(err error) {
		t.Error(err)
	}})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Watch(ctx, func([]ModelServer) { t.Error("published") }) }()
	receive(t, asked)
	cancel()
	assert.NoError(t, receive(t, ended), "and it was no fault")
}

func TestNothingIsPublishedAfterTheContextHasEnded(t *testing.T) {
	p := play(t, func(w http.ResponseWriter, r *http.Request, _ int64) {
		if !isWatch(r) {
			listOf(w, "a")
			return
		}
		for i := range 1000 {
			_, _ = fmt.Fprintf(w, `{"type":"MODIFIED","object":%s}`, objectOf("a", fmt.Sprint(i)))
		}
	})
	m, err := NewModelServers(&ModelServerOptions{Config: p.Config})
	require.NoError(t, err)
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		published := 0
		require.NoError(t, m.Watch(ctx, func([]ModelServer) {
			if published++; published == 3 {
				cancel()
			}
		}))
		assert.Equal(t, 3, published)
	}
}
