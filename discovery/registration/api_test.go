// SPDX-License-Identifier: Apache-2.0

package registration_test

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/registration"
)

const endpoints = "/v1/endpoints"

func open(t testing.TB, o *registration.Options) (*registration.Source, http.Handler) {
	t.Helper()
	s, err := registration.New(o)
	require.NoError(t, err)
	return s, s.Handler()
}

func full(id, url string) obj {
	return obj{
		"id": id, "url": url, "role": "prefill", "group": "g", "zone": "z", "model": "m", "version": "0.28",
		"attributes": obj{"bootstrapPort": "8998"}, "leaseSeconds": 20,
	}
}

func TestALifeByHTTP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := open(t, nil)
		set := watched(t, s)
		code, response := call(t, h, http.MethodPost, endpoints, full("p/0", "http://10.0.0.1:8000/"))
		assert.Equal(t, http.StatusCreated, code)
		assert.Equal(t, obj{"id": "p/0", "leaseSeconds": 20.0}, response)
		until(t, set, map[string]string{"p/0": "prefill/ready"})
		e := set.Load().Endpoints[0]
		assert.Equal(t, []string{"http://10.0.0.1:8000", "g", "z", "m", "0.28", "8998"},
			[]string{e.URL.String(), e.Group, e.Zone, e.Model, e.Version, e.Attribute("bootstrapPort")})

		time.Sleep(19 * time.Second)
		code, response = call(t, h, http.MethodPut, endpoints+"/p%2F0/heartbeat", nil)
		assert.Equal(t, http.StatusOK, code)
		assert.Equal(t, obj{"id": "p/0", "leaseSeconds": 20.0}, response)
		time.Sleep(19 * time.Second)
		_, response = call(t, h, http.MethodGet, endpoints, nil)
		assert.Equal(t, obj{"endpoints": []any{obj{
			"id": "p/0", "url": "http://10.0.0.1:8000", "role": "prefill", "phase": "ready", "group": "g", "zone": "z",
			"model": "m", "version": "0.28",
			"attributes": obj{"bootstrapPort": "8998"}, "announcedBy": "http", "secondsLeft": 1.0,
		}}}, response)

		code, response = call(t, h, http.MethodPost, endpoints+"/p%2F0/drain", nil)
		assert.Equal(t, http.StatusOK, code)
		assert.Equal(t, obj{"id": "p/0", "phase": "draining"}, response)
		until(t, set, map[string]string{"p/0": "prefill/draining"})
		call(t, h, http.MethodPut, endpoints+"/p%2F0/heartbeat", nil)
		time.Sleep(19 * time.Second)
		until(t, set, map[string]string{"p/0": "prefill/draining"})

		code, _ = call(t, h, http.MethodDelete, endpoints+"/p%2F0", nil)
		assert.Equal(t, http.StatusNoContent, code)
		until(t, set, map[string]string{})
		for _, gone := range [][2]string{{http.MethodPut, "/heartbeat"}, {http.MethodPost, "/drain"},
			{http.MethodDelete, ""}} {
			code, response = call(t, h, gone[0], endpoints+"/p%2F0"+gone[1], nil)
			assert.Equal(t, http.StatusNotFound, code)
			assert.Equal(t, "not_found", response["error"].(obj)["code"])
		}
	})
}

func TestALeaseThatRunsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := open(t, nil)
		set := watched(t, s)
		began := time.Now()
		code, response := call(t, h, http.MethodPost, endpoints, obj{"url": "http://10.0.0.1:8000", "role": "decode"})
		assert.Equal(t, http.StatusCreated, code)
		assert.Equal(t, obj{"id": "10.0.0.1:8000", "leaseSeconds": 15.0}, response)
		until(t, set, map[string]string{"10.0.0.1:8000": "decode/ready"})
		until(t, set, map[string]string{"10.0.0.1:8000": "decode/draining"})
		assert.Equal(t, 15*time.Second, time.Since(began))
		code, _ = call(t, h, http.MethodPut, endpoints+"/10.0.0.1:8000/heartbeat", nil)
		assert.Equal(t, http.StatusNotFound, code, "register again")
		until(t, set, map[string]string{})
		assert.Equal(t, 16*time.Second, time.Since(began))

		call(t, h, http.MethodPost, endpoints, obj{"url": "http://10.0.0.1:8000", "role": "decode"})
		call(t, h, http.MethodPost, endpoints+"/10.0.0.1:8000/drain", nil)
		until(t, set, map[string]string{"10.0.0.1:8000": "decode/draining"})
		began = time.Now()
		until(t, set, map[string]string{})
		assert.InDelta(t, 15, time.Since(began).Seconds(), 0.1, "who has drained leaves at once")
	})
}

// Each engine is removed when its own time is over, in any order of registration.
func TestLeasesRunOutByThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := open(t, nil)
		set := watched(t, s)
		began := time.Now()
		for id, lease := range map[string]int{"a": 2, "b": 5, "c": 12} {
			call(t, h, http.MethodPost, endpoints, obj{"id": id, "url": "http://" + id +
				":8000", "role": "both", "leaseSeconds": lease})
		}
		until(t, set, map[string]string{"a": "both/ready", "b": "both/ready", "c": "both/ready"})
		time.Sleep(4 * time.Second)
		call(t, h, http.MethodPut, endpoints+"/b/heartbeat", nil) // which is later than what was expected of it
		until(t, set, map[string]string{"b": "both/draining", "c": "both/ready"})
		assert.InDelta(t, 9, time.Since(began).Seconds(), 0.1)
		until(t, set, map[string]string{"c": "both/draining"})
		assert.InDelta(t, 12, time.Since(began).Seconds(), 0.1)
		until(t, set, map[string]string{})
		assert.InDelta(t, 13, time.Since(began).Seconds(), 0.1)
	})
}

func TestRegisteringAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := open(t, nil)
		set := watched(t, s)
		register := func(id, url, role string) int {
			code, _ := call(t, h, http.MethodPost, endpoints, obj{"id": id, "url": url, "role": role})
			return code
		}
		assert.Equal(t, 201, register("a", "http://10.0.0.1:8000", "prefill"))
		until(t, set, map[string]string{"a": "prefill/ready"})
		version := set.Load().Version
		assert.Equal(t, 200, register("a", "http://10.0.0.1:8000", "prefill"))
		time.Sleep(time.Second)
		assert.Equal(t, version, set.Load().Version, "what says the same changes nothing")
		assert.Equal(t, 200, register("a", "http://10.0.0.1:8000", "decode"), "another role")
		until(t, set, map[string]string{"a": "decode/ready"})
		assert.Equal(t, 409, register("b", "http://10.0.0.1:8000", "decode"), "one URL under two ids")
		assert.Equal(t, 409, register("b", "HTTP://10.0.0.1:8000/", "decode"), "however it is written")
		assert.Equal(t, 200, register("a", "http://10.0.0.2:8000", "decode"), "another address")
		time.Sleep(time.Second)
		assert.Equal(t, "10.0.0.2:8000", set.Load().Endpoints[0].URL.Host)
		assert.Equal(t, 201, register("b", "http://10.0.0.1:8000", "decode"), "the old one is free")

		call(t, h, http.MethodPost, endpoints+"/a/drain", nil)
		assert.Equal(t, 201, register("c", "http://10.0.0.2:8000", "prefill"), "the successor of one that drains")
		until(t, set, map[string]string{"b": "decode/ready", "c": "prefill/ready"})
		call(t, h, http.MethodPost, endpoints+"/c/drain", nil)
		until(t, set, map[string]string{"b": "decode/ready", "c": "prefill/draining"})
		assert.Equal(t, 200, register("c", "http://10.0.0.2:8000", "prefill"), "registering ends draining")
		until(t, set, map[string]string{"b": "decode/ready", "c": "prefill/ready"})
		call(t, h, http.MethodDelete, endpoints+"/c", nil)
		until(t, set, map[string]string{"b": "decode/ready", "c": "prefill/draining"})
		assert.Equal(t, 201, register("d", "http://10.0.0.2:8000", "prefill"), "the successor of one that leaves")
		until(t, set, map[string]string{"b": "decode/ready", "d": "prefill/ready", "c": "prefill/draining"})
		until(t, set, map[string]string{"b": "decode/ready", "d": "prefill/ready"})
		assert.Equal(t, 409, register("e", "http://10.0.0.2:8000", "prefill"),
			"its address is its own when the other has left")
	})
}

// What is registered by HTTP may have shown a token; what comes by ZeroMQ has shown nothing.
func TestHTTPWinsOverZeroMQ(t *testing.T) {
	s := start(t, registration.Options{Listen: "127.0.0.1:0", Expiry: time.Minute})
	h := s.Handler()
	set := watched(t, s)
	send, _ := engine(t, s.Addr())
	send(p2p("P", 1))
	until(t, set, map[string]string{idOf(1): "prefill/ready"})
	code, _ := call(t, h, http.MethodPut, endpoints+"/"+idOf(1)+"/heartbeat", nil)
	assert.Equal(t, http.StatusNotFound, code)
	code, _ = call(t, h, http.MethodDelete, endpoints+"/"+idOf(1), nil)
	assert.Equal(t, http.StatusConflict, code, "it would come back")

	code, _ = call(t, h, http.MethodPost, endpoints+"/"+idOf(1)+"/drain", nil)
	assert.Equal(t, http.StatusOK, code)
	send(p2p("P", 1))
	require.Eventually(t, func() bool { return s.Counts().Pings == 2 }, 20*time.Second, time.Millisecond)
	until(t, set, map[string]string{idOf(1): "prefill/draining"}) // whatever it sends

	code, _ = call(t, h, http.MethodPost, endpoints, obj{"id": "mine", "url": "http://" + idOf(1), "role": "both"})
	assert.Equal(t, http.StatusCreated, code)
	until(t, set, map[string]string{"mine": "both/ready"})
	send(p2p("P", 1))
	require.Eventually(t, func() bool { return s.Counts().Held == 1 }, 20*time.Second, time.Millisecond)
	until(t, set, map[string]string{"mine": "both/ready"})
	send(p2p("D", 3))
	until(t, set, map[string]string{"mine": "both/ready", idOf(3): "decode/ready"})
	code, _ = call(t, h, http.MethodPost, endpoints, obj{"id": "three", "url": "http://" + idOf(3), "role": "decode"})
	assert.Equal(t, http.StatusCreated, code, "one that does not drain is taken over, too")
	until(t, set, map[string]string{"mine": "both/ready", "three": "decode/ready"})
	code, _ = call(t, h, http.MethodPost, endpoints, obj{"id": idOf(2), "url": "http://10.0.0.7:1", "role": "both"})
	assert.Equal(t, http.StatusCreated, code)
	send(p2p("P", 2))
	require.Eventually(t, func() bool { return s.Counts().Held == 2 }, 20*time.Second, time.Millisecond,
		"an id is not taken away either")
}

func TestWhatTheAPIRefuses(t *testing.T) {
	_, h := open(t, nil)
	good := full("p", "http://10.0.0.1:8000")
	with := func(name string, v any) obj {
		o := maps.Clone(good)
		o[name] = v
		return o
	}
	many := obj{}
	for i := range 33 {
		many[fmt.Sprint(i)] = "x"
	}
	for rule, k := range map[string]struct {
		body  any
		code  int
		param any
	}{
		"no JSON":               {"{", 400, nil},
		"null":                  {"null", 400, nil},
		"a list":                {"[]", 400, nil},
		"two objects":           {`{"url":"http://10.0.0.1:8000","role":"both"}{}`, 400, nil},
		"a url twice":           {`{"url":"http://10.0.0.1:1","role":"both","url":"http://10.0.0.2:1"}`, 400, "url"},
		"twice by an escape":    {`{"url":"http://10.0.0.1:1","role":"both","\u0075rl":"http://h:1"}`, 400, "url"},
		"twice in another case": {`{"url":"http://10.0.0.1:1","role":"both","URL":"http://10.0.0.2:1"}`, 400, "url"},
		"an attribute twice": {`{"url":"http://10.0.0.1:1","role":"both","attributes":{"a":"1","a":"2"}}`, 400,
			"attributes.a"},
		"a field that is misspelt":  {with("rol", "both"), 400, "rol"},
		"a number for text":         {with("group", 1), 400, "group"},
		"no url":                    {obj{"role": "both"}, 400, "url"},
		"another scheme":            {with("url", "ftp://10.0.0.1:8000"), 400, "url"},
		"user info":                 {with("url", "http://user:secret@10.0.0.1:8000"), 400, "url"},
		"a query":                   {with("url", "http://10.0.0.1:8000?secret"), 400, "url"},
		"a url without end":         {with("url", "http://10.0.0.1:8000/"+strings.Repeat("a", 2048)), 400, "url"},
		"no role":                   {with("role", ""), 400, "role"},
		"an unknown role":           {with("role", "secret"), 400, "role"},
		"a long id":                 {with("id", strings.Repeat("a", 257)), 400, "id"},
		"an id with spaces":         {with("id", "a b"), 400, "id"},
		"control characters":        {with("zone", "a\nb"), 400, "zone"},
		"too many attributes":       {with("attributes", many), 400, "attributes"},
		"an attribute without name": {with("attributes", obj{"": "x"}), 400, "attributes"},
		"an attribute's odd name":   {with("attributes", obj{"a b": "x"}), 400, "attributes"},
		"an attribute too long":     {with("attributes", obj{"a": strings.Repeat("x", 1025)}), 400, "attributes.a"},
		"an attribute of no text":   {with("attributes", obj{"a": 1}), 400, "attributes"},
		"a lease of nothing":        {with("leaseSeconds", 0), 400, "leaseSeconds"},
		"a lease for ever":          {with("leaseSeconds", 3601), 400, "leaseSeconds"},
		"a lease beyond numbers":    {with("leaseSeconds", 1e15), 400, "leaseSeconds"},
		"bytes that are no text": {`{"url":"http://10.0.0.1:8000","role":"both","group":"` + "\xff" + `"}`, 400,
			nil},
		"a line feed in the path":   {with("url", "http://10.0.0.1:8000/a%0Ab"), 400, "url"},
		"an id with spaces, of url": {obj{"url": "http://10.0.0.1:8000/a%20b", "role": "both"}, 400, "id"},
		"an id too long, of url": {obj{"url": "http://10.0.0.1:8000/" + strings.Repeat("a", 300), "role": "both"},
			400, "id"},
		"a body too large": {`{"id":"` + strings.Repeat("a", 64<<10) + `"}`, 413, nil},
	} {
		t.Run(rule, func(t *testing.T) {
			code, response := call(t, h, http.MethodPost, endpoints, k.body)
			assert.Equal(t, k.code, code)
			e := response["error"].(obj)
			assert.Equal(t, "invalid_request_error", e["type"])
			assert.Equal(t, k.param, e["param"])
			assert.NotContains(t, e["message"], "secret")
		})
	}
	for path, k := range map[string]struct {
		method string
		code   int
	}{"/": {"GET", 404}, "/v1/endpoint": {"POST", 404}, endpoints: {"PATCH", 405}, endpoints + "/p": {"GET", 405},
		endpoints + "/p/heartbeat": {"POST", 405}, endpoints + "/p/drain": {"PUT", 405}} {
		code, response := call(t, h, k.method, path, nil)
		assert.Equal(t, k.code, code, path)
		assert.NotNil(t, response["error"], path)
	}
	_, response := call(t, h, http.MethodGet, endpoints, nil)
	assert.Empty(t, response["endpoints"], "nothing of it is taken")
}

func TestTheToken(t *testing.T) {
	_, h := open(t, &registration.Options{Token: "s3cret"})
	for _, wrong := range []string{"", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret",
		"s3cret"} {
		for _, k := range [][2]string{{"GET", endpoints}, {"POST", endpoints}, {"PUT", endpoints + "/p/heartbeat"},
			{"POST", endpoints + "/p/drain"}, {"DELETE", endpoints + "/p"}, {"GET", "/"}} {
			code, response := call(t, h, k[0], k[1], nil, "Authorization", wrong)
			assert.Equal(t, http.StatusUnauthorized, code, wrong)
			assert.Equal(t, "unauthorized", response["error"].(obj)["code"])
		}
	}
	for _, right := range []string{"Bearer s3cret", "bearer  s3cret"} {
		code, _ := call(t, h, "POST", endpoints, full("p", "http://10.0.0.1:8000"), "Authorization", right)
		assert.Less(t, code, 300)
	}
}

// A file's tokens change under way: both are good while both are in the file.
func TestTheTokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	put := func(text string) { require.NoError(t, os.WriteFile(path, []byte(text), 0o600)) }
	put("first-secret\n")
	_, h := open(t, &registration.Options{Token: "fixed", TokenFile: path})
	allowed := func() (good []string) {
		for _, token := range []string{"fixed", "first-secret", "second-secret", "first-secret\nsecond-secret", ""} {
			code, _ := call(t, h, "GET", endpoints, nil, "Authorization", "Bearer "+token)
			if code == http.StatusOK {
				good = append(good, token)
			}
		}
		return good
	}
	assert.Equal(t, []string{"fixed", "first-secret"}, allowed())
	put("first-secret\n\n second-secret ")
	assert.Equal(t, []string{"fixed", "first-secret", "second-secret"}, allowed())
	put("second-secret")
	assert.Equal(t, []string{"fixed", "second-secret"}, allowed())
	put("\n")
	assert.Equal(t, []string{"fixed", "second-secret"}, allowed(), "an empty file opens no door")
	require.NoError(t, os.Remove(path))
	assert.Equal(t, []string{"fixed", "second-secret"}, allowed())

	_, err := registration.New(&registration.Options{TokenFile: path})
	require.ErrorContains(t, err, "token file "+path+": no such file")
	put(" \n")
	_, err = registration.New(&registration.Options{TokenFile: path})
	require.ErrorContains(t, err, "has no token")
}

// A page that an operator looks at must not register engines.
func TestBrowsersOfOtherSitesAreRefused(t *testing.T) {
	_, h := open(t, nil)
	code, response := call(t, h, "POST", endpoints, full("p", "http://10.0.0.1:8000"), "Sec-Fetch-Site", "cross-site",
		"Origin", "http://other.example")
	assert.Equal(t, http.StatusForbidden, code)
	assert.Equal(t, "forbidden", response["error"].(obj)["code"])
}

func TestSeveralWatchersSeeTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := open(t, nil)
		one, other := watched(t, s), watched(t, s)
		for n := range 20 {
			call(
				t, h, "POST", endpoints, obj{"id": fmt.Sprint(n), "url": fmt.Sprintf("http://10.0.0.%d:1", n),
					"role": "both"},
			)
		}
		time.Sleep(time.Second)
		assert.Len(t, one.Load().Endpoints, 20)
		assert.True(t, slices.IsSortedFunc(one.Load().Endpoints, func(a, b discovery.Endpoint) int {
			return strings.Compare(a.ID, b.ID)
		}), "a change of one moves no other")
		assert.Equal(t, one.Load().Endpoints, other.Load().Endpoints)
		assert.IsType(t, []discovery.Endpoint{}, one.Load().Endpoints)
	})
}

// A client that sends its request too slowly is disconnected, so it does not hold a connection that others need.
func TestSlowPeersAreSentAway(t *testing.T) {
	t.Parallel()
	s := start(t, registration.Options{HTTP: "127.0.0.1:0"})
	for name, begins := range map[string]string{
		"in the head": "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\n",
		"in the body": "POST /v1/endpoints HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"url\"",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("tcp", s.HTTPAddr())
			require.NoError(t, err)
			defer conn.Close()
			_, err = io.WriteString(conn, begins)
			require.NoError(t, err)
			require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
			_, err = io.Copy(io.Discard, conn)
			assert.NoError(t, err, "the connection is open still")
		})
	}
}
