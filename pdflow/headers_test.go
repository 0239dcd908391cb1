// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
)

func TestRequestIDIsTheClientsIfItIsValid(t *testing.T) {
	for id, valid := range map[string]bool{
		"abc-1_2.3:4": true, strings.Repeat("a", 128): true, strings.Repeat("a", 129): false, "a b": false, "é": false,
		"": false, "x___prefill_addr_1.2.3.4:5": false, "x___decode_addr_1.2.3.4:5": false,
	} {
		got := (&pdflow.Request{Header: http.Header{"X-Request-Id": {id}}}).ID()
		require.Equal(t, valid, got == id, id)
		require.NotEmpty(t, got)
	}
	for _, h := range []http.Header{nil, {}, {"X-Request-Id": {"a", "b"}}} {
		in := pdflow.Request{Header: h}
		id := in.ID()
		require.Len(t, id, 32)
		require.NotEqual(t, id, in.ID())
	}
}

// A host may choose the request's ID: from its own header, a trace, a prefix. The flow replaces an ID that is not
// valid.
func TestAHostNamesItsRequests(t *testing.T) {
	own := func(r *http.Request) string { return r.Header.Get("X-Correlation-Id") }
	x := start(t, setup{opts: []pdflow.Option{pdflow.WithRequestID(own)}})
	mux := newMux(t, pdflow.WithRequestID(own))
	require.NoError(t, mux.SetRoutes(map[string]pdflow.Server{"": x.flow}))
	for name, url := range map[string]string{"Flow": x.url, "Mux": serve(t, mux)} {
		for id, kept := range map[string]bool{"host-7": true, "not valid": false, "": false} {
			before := len(x.d.Requests())
			r := post(t, url, "/v1/completions", completion(longPrompt, ""),
				"X-Correlation-Id", id, "X-Request-Id", "client")
			got := r.header.Get("X-Request-Id")
			require.Equal(t, kept, got == id, name)
			require.NotEqual(t, "client", got)
			require.Equal(t, []string{got}, x.d.Requests()[before].Header["X-Request-Id"])
		}
		r := post(t, url, "/nowhere", "{}", "X-Correlation-Id", "host-8")
		require.Equal(t, "host-8", r.header.Get("X-Request-Id"), "errors have it, too")
	}
	_, err := pdflow.New(&fake{}, pickNothing, pdflow.WithRequestID(nil))
	require.ErrorContains(t, err, "WithRequestID")
}

func TestEngineHeaderIsAnAllowList(t *testing.T) {
	client := http.Header{"Authorization": {"k"}, "Cookie": {"c"}, "X-Tenant": {"t"}, "X-Request-Id": {"theirs"},
		"Accept-Encoding": {"gzip"}}
	want := http.Header{"Authorization": {"k"}, "X-Tenant": {"t"}, "X-Request-Id": {"ours"},
		"User-Agent": {"pdkit/" + pdflow.Version}}
	in := pdflow.Request{Header: client, RequestID: "ours"}
	require.Equal(t, want, in.EngineHeader("x-tenant"))
	require.Equal(t, want, in.EngineHeader("x-tenant", "cookie", "Accept-Encoding", "x-request-id"), "never")
	in.Header = http.Header{"User-Agent": {"curl"}}
	require.Equal(t, []string{"curl"}, in.EngineHeader()["User-Agent"])
}

// patient is a writer that records its write deadlines.
type patient struct {
	*httptest.ResponseRecorder
	deadlines []time.Time
}

func (p *patient) SetWriteDeadline(t time.Time) error {
	p.deadlines = append(p.deadlines, t)
	return nil
}

func TestAMuxBoundsTheWritingOfErrors(t *testing.T) {
	for limit, want := range map[time.Duration]time.Duration{0: 30 * time.Second, 5 * time.Second: 5 * time.Second,
		-1: 0} {
		w := &patient{ResponseRecorder: httptest.NewRecorder()}
		mux := newMux(t, pdflow.WithTimeouts(config.Timeouts{Write: limit}))
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/nowhere", nil))
		require.Equal(t, 404, w.Code)
		if want == 0 {
			require.Empty(t, w.deadlines)
			continue
		}
		require.Len(t, w.deadlines, 2)
		require.WithinDuration(t, time.Now().Add(want), w.deadlines[0], 4*time.Second)
		require.True(t, w.deadlines[1].IsZero(), "the deadline is in force for the connection's next request")
	}
}

// A header that a round tripper adds to one leg does not appear in the other leg, or in the client's request.
func TestLegsShareNoHeaderValues(t *testing.T) {
	values := append(make([]string, 0, 2), "Bearer x")
	client := http.Header{"Authorization": values, "X-Tenant": append(make([]string, 0, 2), "t")}
	in := pdflow.Request{Header: client}
	one, other := in.EngineHeader("X-Tenant"), in.EngineHeader("X-Tenant")
	for _, name := range []string{"Authorization", "X-Tenant"} {
		one.Add(name, "one")
		other.Add(name, "other")
		require.Equal(t, "one", one[name][1])
	}
	require.Empty(t, values[:2][1])
}

// A round tripper may change its leg's header in place: the other leg's is another one.
func TestLegsShareNoRequestID(t *testing.T) {
	var got []string
	var fleet *fakeFleet
	fleet = newFakeFleet(t, &fake{}, "p0 d0", config.Retry{MaxAttempts: 1},
		func(string, int) response { return replies(http.StatusOK) },
		pdflow.WithTransport(roundTripper(func(r *http.Request) (*http.Response, error) {
			v := r.Header["X-Request-Id"]
			v[0] += "-" + r.URL.Host
			got = append(got, v[0])
			return fleet.RoundTrip(r)
		})))
	require.NoError(t, fleet.do(completion("a", "")))
	require.Len(t, got, 2)
	assert.NotContains(t, got[1], "-p0")
}
