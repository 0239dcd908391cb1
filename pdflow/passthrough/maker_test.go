// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/responses"
)

// keeper is a model's two engines, which keep responses and can delete them, unlike vLLM's.
type keeper struct {
	*passthrough.Engines
	mu   sync.Mutex
	has  map[string]string // responses' ids to hosts
	gone map[string]bool   // hosts
	seen []string
}

func newKeeper(t *testing.T, hosts ...string) *keeper {
	t.Helper()
	k := &keeper{has: map[string]string{}, gone: map[string]bool{}}
	var engines []discovery.Endpoint
	for _, host := range hosts {
		e, err := discovery.New("http://"+host, discovery.RoleDecode)
		require.NoError(t, err)
		engines = append(engines, e)
	}
	set, err := static.NewSet(engines...)
	require.NoError(t, err)
	k.Engines = &passthrough.Engines{Set: set, Picker: pick.New(set, pick.RoundRobin()), Transport: k,
		Responses: responses.New(set, k)}
	return k
}

func (k *keeper) RoundTrip(r *http.Request) (*http.Response, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen = append(k.seen, r.Method+" "+r.URL.Host+" "+r.URL.RequestURI())
	if k.gone[r.URL.Host] {
		return nil, syscall.ECONNREFUSED
	}
	id, below, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/v1/responses/"), "/")
	status, body := http.StatusOK, fmt.Sprintf(`{"id":%q}`, id)
	if k.ModelNames != nil {
		body = fmt.Sprintf(`{"id":%q,"model":"big"}`, id)
	}
	switch {
	case k.has[id] != r.URL.Host:
		status, body = http.StatusNotFound, `{"error":{"message":"Response with id 'x' not found.",`+
			`"type":"invalid_request_error","param":"response_id","code":404}}`
	case below != "" && below != "cancel" && below != "input_items":
		status, body = http.StatusNotFound, `{"detail":"Not Found"}`
	case r.Method == http.MethodDelete:
		delete(k.has, id)
	}
	return response(status, "application/json", strings.NewReader(body)), nil
}

func (k *keeper) sent() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	seen := k.seen
	k.seen = nil
	return seen
}

func refer(h http.Handler, method, path string) (status int, body string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, "http://g"+path, http.NoBody))
	b, _ := io.ReadAll(w.Result().Body)
	return w.Code, string(b)
}

// Requests that name a response name no model. The engines of all models are asked, once.
func TestAResponseIsFoundAmongAllModels(t *testing.T) {
	m, n := newKeeper(t, "m0", "m1"), newKeeper(t, "n0", "n1")
	n.has["resp_1"] = "n1"
	h := handler(t, unknown, &passthrough.Options{All: func() []*passthrough.Engines {
		return []*passthrough.Engines{nil, m.Engines, {}, n.Engines}
	}})
	for _, c := range []string{"GET /v1/responses/resp_1", "GET /v1/responses/resp_1?stream=true&starting_after=3",
		"POST /v1/responses/resp_1/cancel", "GET /v1/responses/resp_1/input_items?limit=2"} {
		method, path, _ := strings.Cut(c, " ")
		status, body := refer(h, method, path)
		assert.Equal(t, http.StatusOK, status, body)
		sent := n.sent()
		assert.Equal(t, method+" n1 "+path, sent[len(sent)-1])
	}
	assert.Len(t, m.sent(), 2)

	status, body := refer(h, "GET", "/v1/responses/resp_1/else")
	assert.Equal(t, http.StatusNotFound, status)
	assert.NotContains(t, body, "response_not_found", "the engine has it, and does not know the path")
	n.sent()
	status, body = refer(h, "DELETE", "/v1/responses/resp_1")
	assert.Equal(t, http.StatusOK, status, body)
	status, body = refer(h, "GET", "/v1/responses/resp_1")
	assert.Equal(t, http.StatusNotFound, status)
	assert.Contains(t, body, `"code":"response_not_found"`)
	assert.Len(t, n.sent(), 3, "deleted, so it is looked for")
}

// A stored response names its model as clients do.
func TestAStoredResponseHasTheClientsName(t *testing.T) {
	k := newKeeper(t, "d0", "d1")
	k.ModelNames = map[string]string{"gpt-4o": "big"}
	k.has["resp_1"] = "d1"
	h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return k.Engines, nil },
		&passthrough.Options{All: func() []*passthrough.Engines { return []*passthrough.Engines{k.Engines} }})
	status, body := refer(h, http.MethodGet, "/v1/responses/resp_1")
	assert.Equal(t, http.StatusOK, status)
	assert.JSONEq(t, `{"id":"resp_1","model":"gpt-4o"}`, body)
}

func TestAResponseThatItsEngineHasNoMore(t *testing.T) {
	k := newKeeper(t, "m0", "m1")
	h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) { return k.Engines, nil }, nil)
	for name, lose := range map[string]func(){
		"the engine was restarted": func() { k.has = map[string]string{} },
		"the engine has ended":     func() { k.gone["m1"] = true },
	} {
		k.has, k.gone = map[string]string{"resp_1": "m1"}, map[string]bool{}
		k.Responses.Learn("resp_1", "m1", "")
		status, _ := refer(h, "GET", "/v1/responses/resp_1")
		assert.Equal(t, http.StatusOK, status, name)
		lose()
		status, body := refer(h, "GET", "/v1/responses/resp_1")
		assert.Equal(t, http.StatusNotFound, status, name)
		assert.Contains(t, body, `"code":"response_not_found"`, name)
		time.Sleep(1100 * time.Millisecond) // what was found out is remembered
	}
	k.has, k.gone = map[string]string{"resp_2": "m0"}, map[string]bool{}
	k.Responses.Learn("resp_2", "m1", "")
	status, _ := refer(h, "GET", "/v1/responses/resp_2")
	assert.Equal(t, http.StatusOK, status, "another engine has it")
}

// Until its models are known, and while it ends, a host answers so to ids that it does not know.
func TestAHostThatServesNobodyNow(t *testing.T) {
	k := newKeeper(t, "m0")
	h := handler(t, func(string) (*passthrough.Engines, *pdflow.Error) {
		return nil, &pdflow.Error{Code: pdflow.CodeDraining}
	}, &passthrough.Options{All: func() []*passthrough.Engines { return []*passthrough.Engines{k.Engines} }})
	status, body := refer(h, "GET", "/v1/responses/resp_1")
	assert.Equal(t, http.StatusServiceUnavailable, status, body)
	k.gone["m0"] = true
	k.Set.SetHealthy("m0", false)
	k.Responses.Learn("resp_1", "m0", "")
	status, body = refer(h, "GET", "/v1/responses/resp_2")
	assert.Equal(t, http.StatusServiceUnavailable, status, body)
}

// Without an index any engine gets what names a response.
func TestResponsesWithoutAnIndex(t *testing.T) {
	e := newEngine(t, answers(http.StatusNotFound, `{"detail":"Not Found"}`))
	h := handler(t, e.find, nil)
	status, body := refer(h, "GET", "/v1/responses/resp_1")
	assert.Equal(t, http.StatusNotFound, status)
	assert.NotContains(t, body, "response_not_found")
	assert.Len(t, e.requests, 1)
}
