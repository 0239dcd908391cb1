// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
	"github.com/pdkit/pdkit/connector/internal/play"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const oneRank = `{"0":{"engine_id":"e-0","worker_addr":{"0":{"0":"tcp://10.0.0.1:1"}}}}`

func respond(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(body)), ContentLength: -1}
}

// server is a bootstrap server. It has the response that it gives, and counts the queries.
type server struct {
	asked atomic.Int64
	body  atomic.Pointer[string]
	hold  chan struct{} // if set, responses wait for it
}

func (s *server) say(body string) *server { s.body.Store(&body); return s }

func (s *server) call(r *http.Request) (*http.Response, error) {
	s.asked.Add(1)
	if s.hold != nil {
		select {
		case <-s.hold:
		case <-r.Context().Done():
			return nil, r.Context().Err()
		}
	}
	return respond(200, *s.body.Load()), nil
}

func newConnector(t testing.TB, o *mooncake.Options) *mooncake.Connector {
	return play.New(t, mooncake.New, o)
}

// endpoint is a prefill engine; attributes are names and values in turn.
func endpoint(t testing.TB, url string, attributes ...string) discovery.Endpoint {
	e := play.Engine(t, url, discovery.RolePrefill, map[string]string{})
	for i := 0; i+1 < len(attributes); i += 2 {
		e.Attributes[attributes[i]] = attributes[i+1]
	}
	return e
}

func session(t testing.TB, api connector.API, body string, p discovery.Endpoint) *connector.Session {
	s := play.Session(t, api, body)
	s.Prefill = p
	return s
}

// prepare calls the methods that the flow calls before the legs.
func prepare(ctx context.Context, c *mooncake.Connector, s *connector.Session, call connector.Caller) error {
	v, err := c.Prepare(ctx, s, call)
	s.Prepared = v
	return err
}

// chatSession is a chat session between the engines that most tests use.
func chatSession(t testing.TB) *connector.Session {
	return session(t, connector.APIChat, `{"messages":[]}`, endpoint(t, "http://10.0.0.1:8100"))
}

// If many requests begin at once, only one of them sends the query. The others, and later ones, use its response for a
// while.
func TestOneQueryForAnyNumberOfRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := (&server{hold: make(chan struct{})}).say(oneRank)
		c := newConnector(t, nil)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() { assert.NoError(t, prepare(t.Context(), c, chatSession(t), b.call)) })
		}
		synctest.Wait()
		close(b.hold)
		wg.Wait()
		require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
		assert.EqualValues(t, 1, b.asked.Load())
	})
}

func TestResponsesOfSeveralServersAreKeptApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := (&server{hold: make(chan struct{})}).say(oneRank)
		c := newConnector(t, nil)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- prepare(ctx, c, chatSession(t), slow.call) }()
		synctest.Wait()
		other := (&server{}).say(strings.ReplaceAll(oneRank, "e-0", "e-other"))
		s := session(t, connector.APIChat, `{"messages":[]}`, endpoint(t, "http://10.0.0.2:8100"))
		require.NoError(t, prepare(t.Context(), c, s, other.call), "a server that hangs holds up only its own requests")
		assert.Contains(t, play.Decode(t, c, s, nil).Body, `"remote_bootstrap_addr":"http://10.0.0.2:8998",`+
			`"remote_engine_id":"e-other"`)
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	})
}

func TestResponsesExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ttl := config.Duration(40 * time.Millisecond)
		c := newConnector(t, &mooncake.Options{EngineTTL: &ttl})
		b := (&server{}).say(oneRank)
		require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
		b.say(strings.ReplaceAll(oneRank, "e-0", "e-1"))
		time.Sleep(50 * time.Millisecond)
		s := chatSession(t)
		require.NoError(t, prepare(t.Context(), c, s, b.call))
		assert.EqualValues(t, 2, b.asked.Load())
		assert.Contains(t, play.Decode(t, c, s, nil).Body, `"e-1"`)
	})
}

func TestEngineTTLOf0AsksForEachRequest(t *testing.T) {
	var ttl config.Duration
	c, b := newConnector(t, &mooncake.Options{EngineTTL: &ttl}), (&server{}).say(oneRank)
	for range 3 {
		require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
	}
	assert.EqualValues(t, 3, b.asked.Load())
}

// fault is the cause of a failed attempt, as the flow reports it.
type fault bool

func (fault) Error() string       { return "it failed" }
func (f fault) EngineFault() bool { return bool(f) }

// An engine that restarts has another id, so a failed attempt forgets the old one. Failures that the engines did not
// cause do not.
func TestFailedAttemptsForgetTheEngine(t *testing.T) {
	for name, k := range map[string]struct {
		cause error
		asked int64
	}{
		"a failed load on D":                 {fault(true), 2},
		"a client that left, or bad input":   {fault(false), 1},
		"an error of whoever sends the legs": {errors.New("x"), 2},
	} {
		t.Run(name, func(t *testing.T) {
			c, b := newConnector(t, nil), (&server{}).say(oneRank)
			s := chatSession(t)
			require.NoError(t, prepare(t.Context(), c, s, b.call))
			require.NoError(t, c.Clean(t.Context(), s, k.cause, b.call))
			require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
			assert.Equal(t, k.asked, b.asked.Load())
		})
	}
	t.Run("but not what was learned since", func(t *testing.T) {
		c, b := newConnector(t, nil), (&server{}).say(oneRank)
		old, another := chatSession(t), chatSession(t)
		require.NoError(t, prepare(t.Context(), c, old, b.call))
		require.NoError(t, prepare(t.Context(), c, another, b.call))
		require.NoError(t, c.Clean(t.Context(), old, fault(true), b.call))
		require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
		require.NoError(t, c.Clean(t.Context(), another, fault(true), b.call))
		require.NoError(t, prepare(t.Context(), c, chatSession(t), b.call))
		assert.EqualValues(t, 2, b.asked.Load())
	})
	require.NoError(t, newConnector(t, nil).Clean(t.Context(), chatSession(t), fault(true), nil),
		"an attempt that knew nothing forgets nothing")
}

func TestBadBootstrapServers(t *testing.T) {
	for name, k := range map[string]struct {
		status     int
		body, want string
	}{
		"an error":   {500, oneRank, "answered 500"},
		"a redirect": {302, oneRank, "answered 302"},
		"not JSON":   {200, "<html>", "not a JSON object"},
		"a list":     {200, "[]", "not a JSON object"},
		"nothing":    {200, "", "not a JSON object"},
		"no engine":  {200, "{}", "knows no engine"},
		"no engine id": {200, `{"0":{"worker_addr":{}},"1":{"engine_id":""},"2":{"engine_id":7},` +
			`"3":null,"4":[]}`, "knows no engine"},
		"ranks that are none": {200, `{"-1":{"engine_id":"e"},"01":{"engine_id":"e"},"x":{"engine_id":"e"},` +
			`"70000":{"engine_id":"e"}}`, "knows no engine"},
		"more than is ever read": {200, oneRank + strings.Repeat(" ", 1<<20), "too large"},
	} {
		t.Run(name, func(t *testing.T) {
			c, s := newConnector(t, nil), chatSession(t)
			err := prepare(t.Context(), c, s, func(*http.Request) (*http.Response, error) {
				return respond(k.status, k.body), nil
			})
			require.ErrorContains(t, err, k.want)
			assert.NotContains(t, err.Error(), "10.0.0.1")
			_, err = play.TryDecode(c, s, nil)
			require.Error(t, err, "D dies of a decode without an engine id")
			_, err = play.TryPrefill(c, s)
			require.Error(t, err)
		})
	}
	t.Run("unknown members are tolerated", func(t *testing.T) {
		s, c := chatSession(t), newConnector(t, nil)
		require.NoError(t, prepare(t.Context(), c, s,
			(&server{}).say(`{"version":2,"0":{"engine_id":"e-0","tp_size":8,"worker_addr":null},`+
				`"sizes":{"engine_id":"no rank"}}`).call))
		assert.Contains(t, play.Decode(t, c, s, nil).Body, `"remote_engine_id":"e-0"`)
	})
}

// If an attribute names a rank that does not exist, every attempt with that rank fails, but not every attempt asks.
func TestMissingRankIsNotAskedForAgainAndAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, b := newConnector(t, nil), (&server{}).say(strings.Replace(oneRank, `"0"`, `"9"`, 1))
		p := endpoint(t, "http://10.0.0.1:8100", "dpSize", "2")
		for range 5 {
			require.ErrorContains(t, prepare(t.Context(), c, session(t, connector.APIChat, `{}`, p), b.call), "rank")
		}
		assert.EqualValues(t, 1, b.asked.Load())
		time.Sleep(2 * time.Second)
		for range 2 {
			require.ErrorContains(t, prepare(t.Context(), c, session(t, connector.APIChat, `{}`, p), b.call), "rank")
		}
		assert.EqualValues(t, 2, b.asked.Load(), "once in a while: P may have been given more ranks")
	})
}

// Sessions are spread over the ranks that the server names, and each session keeps its rank.
func TestRanksAreChosenAtRandom(t *testing.T) {
	c := newConnector(t, nil)
	b := (&server{}).say(`{"0":{"engine_id":"e0"},"5":{"engine_id":"e5"}}`)
	seen := map[string]int{}
	for range 64 {
		s := chatSession(t)
		require.NoError(t, prepare(t.Context(), c, s, b.call))
		rank := play.Prefill(t, c, s).Header.Get("X-data-parallel-rank")
		require.NotEmpty(t, rank)
		assert.Contains(t, play.Decode(t, c, s, nil).Body, `"remote_engine_id":"e`+rank+`"`, "both legs name one rank")
		seen[rank]++
	}
	assert.Len(t, seen, 2, "%v", seen)
}

func TestCheckEndpoint(t *testing.T) {
	c := newConnector(t, nil)
	require.NoError(t, c.CheckEndpoint(endpoint(t, "http://h:1")), "the default port")
	require.NoError(t, c.CheckEndpoint(
		endpoint(t, "http://h:1", "bootstrapPort", "9", "dpSize", "4", "bootstrapURL", "http://b:8998")))
	d := endpoint(t, "http://h:1", "bootstrapPort", "x")
	d.Role = discovery.RoleDecode
	require.NoError(t, c.CheckEndpoint(d), "D needs none")
	for attribute, value := range map[string]string{"bootstrapPort": "0", "dpSize": "none",
		"bootstrapURL": "10.0.0.1:8998"} {
		faults := config.FieldErrors(c.CheckEndpoint(endpoint(t, "http://h:1", attribute, value)))
		require.Len(t, faults, 1)
		assert.Equal(t, "attributes."+attribute, faults[0].Path)
		var bad *attr.Error
		s := session(t, connector.APIChat, `{}`, endpoint(t, "http://h:1", attribute, value))
		require.ErrorAs(t, prepare(t.Context(), c, s, nil), &bad)
		assert.NotContains(t, bad.Error(), value+" ")
	}
	alone := newConnector(t, &mooncake.Options{BootstrapServerAddress: "b:8998"})
	require.ErrorContains(t, alone.CheckEndpoint(endpoint(t, "http://h:1")), "attributes.bootstrapURL")
}

// In the order prefill-then-decode, Decode gets P's response, and P must have stopped because of the length.
func TestDecodeAfterPrefill(t *testing.T) {
	c, s := newConnector(t, nil), chatSession(t)
	require.NoError(t, prepare(t.Context(), c, s, (&server{}).say(oneRank).call))
	for body, ok := range map[string]bool{`{"choices":[{"finish_reason":"length"}]}`: true,
		`{"choices":[{"finish_reason":"stop"}]}`: false, `garbage`: false} {
		_, err := play.TryDecode(c, s, play.Response(body))
		if ok {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, connector.ErrNoTransfer)
		}
	}
}
