// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
)

var prompts atomic.Int64 // each is another one

// fresh uses no connection of an engine's former life.
var fresh = &http.Transport{DisableKeepAlives: true}

// complete asks an engine for a completion of a new prompt of n characters.
func complete(t *testing.T, e *enginesim.Engine, n int) {
	t.Helper()
	text := fmt.Sprint(prompts.Add(1), " ", strings.Repeat("abcdefg ", n/8))
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, e.URL()+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"model":"tiny","max_tokens":40,"prompt":%q}`, text)))
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/json")
	resp, err := fresh.RoundTrip(r)
	require.NoError(t, err)
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	require.Equal(t, http.StatusOK, resp.StatusCode)
}

func TestAnEngineIsAskedWhereItPublishes(t *testing.T) {
	for _, events := range []enginesim.KVEvents{{}, {Arrays: true, OldReplay: true, Topic: "kv@x@tiny", Rank: 3}} {
		e, err := enginesim.Start(enginesim.Config{KVEvents: &events})
		require.NoError(t, err)
		defer e.Close()
		complete(t, e, 320)
		ep, err := discovery.New(e.URL(), discovery.RoleDecode)
		require.NoError(t, err)
		b := newBook()
		begin(t, b, &Options{Client: http.DefaultTransport, Model: "served"}, ep)
		src := Source{Engine: ep.ID, Model: "served", Rank: events.Rank}
		eventually(t, "the past", func() bool { n := len(b.get(src).batches); return n > 0 && b.exact(src, n) })
		old := b.get(src).batches
		complete(t, e, 640)
		eventually(t, "what is new", func() bool {
			n := len(b.get(src).batches)
			return n > len(old) && b.exact(src, n)
		})
		require.NoError(t, e.Restart())
		complete(t, e, 64)
		eventually(t, "the new life", func() bool {
			got := b.get(src).batches
			return len(got) > 0 && got[0] != old[0] && b.exact(src, len(got))
		})
	}
}

func TestAnEngineWithoutEventsIsAskedAgainNowAndThen(t *testing.T) {
	var asked atomic.Int64
	e, err := enginesim.Start(enginesim.Config{})
	require.NoError(t, err)
	defer e.Close()
	ep, err := discovery.New(e.URL(), discovery.RoleDecode)
	require.NoError(t, err)
	errs := make(chan error, 100)
	begin(t, newBook(), &Options{Observe: func(_ Source, err error) { errs <- err },
		Client: roundTripper(func(r *http.Request) (*http.Response, error) {
			asked.Add(1)
			return http.DefaultTransport.RoundTrip(r)
		})}, ep)
	assert.EqualError(t, <-errs, "kvevents: find: the engine publishes no events")
	eventually(t, "again", func() bool { return asked.Load() > 3 })
}

func TestAnsweringNonsenseHarmsNobody(t *testing.T) {
	for name, answer := range map[string]func() (*http.Response, error){
		"an error": func() (*http.Response, error) { return nil, errors.New("dial tcp 10.1.2.3:80: refused") },
		"a panic":  func() (*http.Response, error) { panic("x") },
		"a status": func() (*http.Response, error) { return response(500, "x"), nil },
		"no JSON":  func() (*http.Response, error) { return response(200, "x"), nil },
		"endless":  func() (*http.Response, error) { return response(200, strings.Repeat(" ", maxBody+10)), nil },
	} {
		t.Run(name, func(t *testing.T) {
			errs := make(chan error, 100)
			begin(t, newBook(), &Options{Observe: func(_ Source, err error) { errs <- err },
				Client: roundTripper(func(*http.Request) (*http.Response, error) { return answer() })},
				endpoint(t, "p", nil))
			err := <-errs
			var e *Error
			require.ErrorAs(t, err, &e)
			assert.NotContains(t, e.Error(), "10.1.2.3")
		})
	}
}

func response(status int, body string) *http.Response {
	return &http.Response{StatusCode: status, Body: io.NopCloser(bytes.NewBufferString(body))}
}

// listed is a source of discovery whose list changes.
type listed chan []discovery.Endpoint

func (l listed) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	for version := uint64(1); ; version++ {
		select {
		case list := <-l:
			publish(discovery.Snapshot{Version: version, Endpoints: list})
		case <-ctx.Done():
			return nil
		}
	}
}

func TestSubscriptionsFollowTheList(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(2)
	e := p.endpoint(t, "p")
	with := func(change func(e *discovery.Endpoint)) []discovery.Endpoint {
		changed := e
		change(&changed)
		return []discovery.Endpoint{changed}
	}
	b, l := newBook(), make(listed)
	s := beginWith(t, &quick, b, nil, discovery.NewSet(l))
	l <- with(func(e *discovery.Endpoint) { e.Phase = discovery.PhaseNotReady })
	l <- with(func(e *discovery.Endpoint) { e.Role = discovery.RoleEncode })
	time.Sleep(50 * time.Millisecond)
	assert.Zero(t, s.Counts().Streams, "not ready, or without KV")
	l <- with(func(*discovery.Endpoint) {})
	eventually(t, "ready", func() bool { return b.exact(first, 2) })
	l <- with(func(e *discovery.Endpoint) { e.Phase = discovery.PhaseNotReady })
	p.publish(1)
	eventually(t, "not ready for a while", func() bool { return b.exact(first, 3) })
	for i, gone := range [][]discovery.Endpoint{
		with(func(e *discovery.Endpoint) { e.Phase = discovery.PhaseDraining }), nil,
		with(func(e *discovery.Endpoint) { e.Attributes = map[string]string{"kvEvents": "off"} }),
	} {
		l <- gone
		eventually(t, "forgotten "+strconv.Itoa(i), func() bool {
			return len(b.get(first).batches) == 0 && s.Counts().Streams == 0
		})
		l <- with(func(*discovery.Endpoint) {})
		eventually(t, "back", func() bool { return b.exact(first, 3) })
	}
}

func TestEnginesThatConnectAreToldApartByTopicOrAddress(t *testing.T) {
	port := freePort(t)
	b := newBook()
	named := endpoint(t, "p", map[string]string{"kvEventsReplay": "tcp://*:1"})
	e, err := enginesim.Start(enginesim.Config{KVEvents: &enginesim.KVEvents{Connect: true,
		Endpoint: fmt.Sprintf("127.0.0.1:%d", port), Topic: "kv@named@tiny"}})
	require.NoError(t, err)
	defer e.Close()
	asked, err := discovery.New(e.URL(), discovery.RoleDecode)
	require.NoError(t, err)
	asked.ID = "named"
	s := begin(t, b, &Options{Client: http.DefaultTransport, Listen: fmt.Sprintf("127.0.0.1:%d", port)}, named, asked)
	src := Source{Engine: "named"}
	eventually(t, "it connects", func() bool {
		complete(t, e, 64)
		n := len(b.get(src).batches)
		return n > 0 && b.exact(src, n)
	})
	assert.EqualValues(t, 1, s.Counts().Streams)
	require.NoError(t, e.Restart())
	complete(t, e, 64)
	eventually(t, "its next life takes the place", func() bool {
		complete(t, e, 64)
		n := len(b.get(src).batches)
		return n > 0 && b.exact(src, n) && s.Counts().Streams == 1 && s.Counts().Lost == 1
	})
}

func TestOptionsThatCannotBe(t *testing.T) {
	for _, o := range []Options{{Listen: "x"}, {Listen: "a:b"}, {Listen: ":0", ListenRanks: 2},
		{Listen: ":65535", ListenRanks: 2}} {
		_, err := New(newBook(), &o)
		assert.Error(t, err)
	}
	ln := freePort(t)
	s, err := New(newBook(), &Options{Listen: fmt.Sprintf("192.0.2.1:%d", ln)})
	require.NoError(t, err)
	assert.EqualError(t, s.Run(t.Context(), discovery.NewSet()),
		"kvevents: listen: the engine cannot be reached, or broke off")
}

// SGLang says where its events are, and the entry where the replay is.
func TestAnEntryMayNameTheReplayAlone(t *testing.T) {
	p := newPublisher(t, "a")
	p.publish(3)
	_, port, err := net.SplitHostPort(p.pub.Addr())
	require.NoError(t, err)
	b := newBook()
	begin(t, b, &Options{Client: roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Path == "/server_info" {
			return response(200, `{"kv_events":{"publisher":"zmq","endpoint_port_base":`+port+`,"dp_size":1}}`), nil
		}
		return response(404, ""), nil
	})}, endpoint(t, "p", map[string]string{"kvEventsReplay": "tcp://" + p.router.Addr()}))
	eventually(t, "exact", func() bool { return b.exact(first, 3) })
}
