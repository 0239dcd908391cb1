// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sharedtest"
)

// bothClients runs a test with this package's own HTTP/1.1 and with net/http's.
func bothClients(t *testing.T, test func(t *testing.T, options Options)) {
	for name, options := range map[string]Options{"own": {}, "net/http": {NetHTTP: true}} {
		t.Run(name, func(t *testing.T) { test(t, options) })
	}
}

// surplus is an engine that repeats its first response on each connection, late. Each response takes some time, and
// says which request it is of, in its body and, if echo says so, by the request's id.
type surplus struct {
	late, takes time.Duration // late below 0: it does not
	echo        string        // "", "header" or "body"
	said        chan struct{} // nil, or gets a value when it has repeated a response
}

func (s surplus) serve(e *engine, c net.Conn) {
	var mu sync.Mutex
	write := func(text string) {
		mu.Lock()
		defer mu.Unlock()
		_, _ = io.WriteString(c, text)
	}
	in := bufio.NewReader(c)
	for n := 0; ; n++ {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		e.requests.Add(1)
		time.Sleep(s.takes)
		id, head := req.Header.Get("X-Request-Id"), "Content-Type: application/json\r\n"
		if s.echo == "header" {
			head += "X-Request-ID: " + id + "\r\n"
		}
		if s.echo != "body" {
			id = "random"
		}
		text := fmt.Sprintf(`{"id":"cmpl-%s","text":"%s"}`, id, body)
		response := fmt.Sprintf("HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s", head, len(text), text)
		write(response)
		if n == 0 && s.late >= 0 {
			e.wg.Go(func() {
				time.Sleep(s.late)
				write(response)
				select {
				case s.said <- struct{}{}:
				default:
				}
			})
		}
	}
}

// attack sends 60 requests of different clients, and counts what they got.
func attack(t *testing.T, rt http.RoundTripper, e *engine, clients int) (wrong, failed int32) {
	var next, strangers, failures atomic.Int32
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			for n := next.Add(1); n <= 60; n = next.Add(1) {
				who := fmt.Sprint("client-", n)
				req := post(t, e.url(), who)
				req.Header.Set("X-Request-Id", who)
				resp, err := rt.RoundTrip(req)
				if err == nil {
					var got []byte
					got, err = io.ReadAll(resp.Body)
					_ = resp.Body.Close()
					if err == nil && !strings.Contains(string(got), `"text":"`+who+`"`) {
						strangers.Add(1)
					}
				}
				if err != nil {
					failures.Add(1)
				}
			}
		})
	}
	all.Wait()
	return strangers.Load(), failures.Load()
}

func perClient(n int) string { return map[int]string{1: "1 client", 4: "4 clients"}[n] }

// An engine that repeats ids in a header (vLLM's --enable-request-id-headers) or in its responses (vLLM's ids) serves
// nobody with a response to somebody else. A request whose response is another one's fails, and may be tried again.
func TestAResponseWithTheIDOfAnotherRequestIsNotServed(t *testing.T) {
	bothClients(t, func(t *testing.T, options Options) {
		for _, echo := range []string{"header", "body"} {
			for _, clients := range []int{1, 4} {
				t.Run(echo+", "+perClient(clients), func(t *testing.T) {
					s := surplus{late: 3 * time.Millisecond, takes: 5 * time.Millisecond, echo: echo}
					e := newEngine(t, s.serve)
					tr := newTransport(t, &options)
					wrong, failed := attack(t, tr, e, clients)
					assert.Zero(t, wrong)
					assert.LessOrEqual(t, failed, int32(2*clients))
					assert.True(t, tr.suspects.has(hostKey{host: e.Addr().String()}))
				})
			}
		}
	})
}

// An engine that repeats no ids can shift responses for as long as requests follow at once, but not for ever: its
// connection pauses after some requests, and then what it has sent too much is seen.
func TestResponsesStayShiftedOnlyUntilAConnectionPauses(t *testing.T) {
	ownOnly(t, "gives a connection to the next request at once")
	e := newEngine(t, surplus{late: 3 * time.Millisecond, takes: 25 * time.Millisecond}.serve)
	wrong, failed := attack(t, newTransport(t, nil), e, 1)
	assert.Less(t, wrong, int32(12), "all but one without")
	assert.Zero(t, failed)
}

// After a response that took long a connection pauses in any case, since that needs few connections more: what comes
// too much within the pause is seen before any client gets it, whether the engine repeats ids or not.
func TestAConnectionPausesAfterAResponseThatTookLong(t *testing.T) {
	ownOnly(t, "gives a connection to the next request at once")
	e := newEngine(t, surplus{late: 3 * time.Millisecond, takes: 60 * time.Millisecond}.serve)
	tr := newTransport(t, nil)
	wrong, failed := attack(t, tr, e, 4)
	assert.Zero(t, wrong)
	assert.Zero(t, failed)
	assert.True(t, tr.suspects.has(hostKey{host: e.Addr().String()}))
	e = newEngine(t, surplus{late: -1, takes: 60 * time.Millisecond}.serve)
	wrong, failed = attack(t, newTransport(t, nil), e, 4)
	assert.Zero(t, wrong+failed)
	assert.LessOrEqual(t, e.accepted.Load(), int32(8), "requests that take turns need no more than two each")
}

// What has come unasked for is seen before the next request. From then on each request has a connection of its own.
func TestAnEngineThatSaysTooMuchGetsNoKeptConnections(t *testing.T) {
	bothClients(t, func(t *testing.T, options Options) {
		said := make(chan struct{}, 1)
		e := newEngine(t, surplus{late: 30 * time.Millisecond, said: said}.serve)
		other := newEngine(t, keepAlive)
		tr := newTransport(t, &options)
		address := e.Addr().String()
		send := func(n int) {
			for range n {
				exchange(t, tr, post(t, e.url(), "x"))
			}
		}
		send(1)
		<-said
		time.Sleep(30 * time.Millisecond)
		send(5)
		assert.EqualValues(t, 6, e.accepted.Load())
		for range 3 {
			exchange(t, tr, post(t, other.url(), "x"))
		}
		assert.EqualValues(t, 1, other.accepted.Load(), "other engines keep theirs")

		// Until its time is over, or the address refuses a connection: then the engine is started anew.
		tr.suspects.add(address)
		tr.suspects.mu.Lock()
		tr.suspects.until[address] = time.Now()
		tr.suspects.mu.Unlock()
		assert.False(t, tr.suspects.has(hostKey{host: address}))
		tr.suspects.add(address)
		_ = e.Close()
		_, err := Send(WithNewConnection(t.Context()), tr, post(t, e.url(), "x"))
		failure(t, err, SentNothing, KindRefused)
		assert.False(t, tr.suspects.has(hostKey{host: address}))
	})
}

// The idle connections of a suspect serve nobody and are looked at when their time is over: an engine that goes on
// stays a suspect.
func TestASuspectStaysOneWhileItGoesOn(t *testing.T) {
	ownOnly(t, "keeps no connection of a suspect")
	e := newEngine(t, surplus{late: 3 * time.Millisecond}.serve)
	tr := newTransport(t, &Options{IdleTimeout: 500 * time.Millisecond})
	address := e.Addr().String()
	soon := time.Now().Add(time.Minute)
	tr.suspects.add(address)
	tr.suspects.until[address] = soon
	exchange(t, tr, post(t, e.url(), "x"))
	waitFor(t, "still a suspect", func() bool {
		tr.suspects.mu.Lock()
		defer tr.suspects.mu.Unlock()
		return tr.suspects.until[address].After(soon)
	})
}

func TestWhatMakesAnEngineASuspect(t *testing.T) {
	const chunked = chunkedHead + "2\r\nok\r\n0\r\n\r\n"
	for _, row := range []struct {
		name                string
		first, late, second string // what the engine says at once, a moment later, and to the next request
		suspect             bool
		fails               bool // the next request
		ownOnly             bool
	}{
		{name: "nothing", first: okResponse, second: okResponse},
		{name: "the connection's end", first: okResponse},
		{name: "a response", first: okResponse, late: okResponse, suspect: true},
		{name: "a response at once", first: okResponse + okResponse, suspect: true, ownOnly: true},
		{name: "a response after chunks", first: chunked + okResponse, suspect: true, ownOnly: true},
		{name: "more than the length", first: okResponse, late: "ay", suspect: true},
		{name: "no HTTP", first: okResponse, second: "ay" + okResponse, suspect: true, fails: true},
		{name: "408", first: okResponse, late: "HTTP/1.1 408 Request Timeout\r\n\r\n"},
		{name: "an empty line", first: okResponse, late: "\r\n"},
		{name: "400", first: okResponse, second: "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"},
	} {
		bothClients(t, func(t *testing.T, options Options) {
			for _, secure := range []bool{false, true} {
				t.Run(row.name, func(t *testing.T) {
					if row.ownOnly && (netHTTP || options.NetHTTP) {
						t.Skip("net/http does not tell what it has read beyond a response")
					}
					read, said := make(chan struct{}), make(chan struct{})
					script := func(e *engine, c net.Conn) {
						in := bufio.NewReader(c)
						e.read(in)
						_, _ = io.WriteString(c, row.first)
						<-read
						_, _ = io.WriteString(c, row.late)
						if e.accepted.Load() == 1 {
							close(said)
						}
						if row.second+row.late != "" && e.read(in) {
							_, _ = io.WriteString(c, row.second)
						}
						_ = c.Close()
					}
					scheme := "http"
					if secure {
						scheme, script, options.TLS = overTLS(t, script)
					}
					e := newEngine(t, script)
					tr := newTransport(t, &options)
					url := scheme + "://" + e.Addr().String()
					assert.Equal(t, "ok", exchange(t, tr, post(t, url, "x")))
					close(read)
					<-said
					time.Sleep(50 * time.Millisecond)
					if resp, err := tr.RoundTrip(post(t, url, "x")); err == nil {
						drain(t, resp)
						assert.False(t, row.fails)
					} else {
						assert.True(t, row.fails)
					}
					assert.Equal(t, row.suspect, tr.suspects.has(hostKey{host: e.Addr().String()}))
				})
			}
		})
	}
}

// overTLS makes an engine's script one of an https engine, and returns what its clients need.
func overTLS(t *testing.T, script func(*engine, net.Conn)) (string, func(*engine, net.Conn), *tls.Config) {
	ca := sharedtest.NewAuthority(t, "ca")
	cert, err := tls.X509KeyPair(ca.Issue(t, "engine"))
	require.NoError(t, err)
	return "https", func(e *engine, c net.Conn) {
		script(e, tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}}))
	}, trustOnly(ca)
}

// No engine serves half a request: a response of status 2xx that begins before the request was sent is somebody else's,
// unless the connection is new.
func TestAResponseToHalfARequestIsSomebodyElses(t *testing.T) {
	ownOnly(t, "does not tell what it had sent when a response began")
	for status, served := range map[string]bool{"200 OK": false, "413 Content Too Large": true} {
		e := newEngine(t, func(e *engine, c net.Conn) {
			in := bufio.NewReader(c)
			e.read(in)
			_, _ = io.WriteString(c, okResponse)
			if _, err := in.Peek(1); err == nil { // of a request that it does not read
				_, _ = io.WriteString(c, "HTTP/1.1 "+status+"\r\nContent-Length: 2\r\n\r\nok")
				time.Sleep(time.Second)
			}
		})
		tr := newTransport(t, nil)
		large := post(t, e.url(), strings.Repeat("x", 64<<20))
		exchange(t, tr, post(t, e.url(), "x"))
		resp, err := tr.RoundTrip(large)
		if served {
			require.NoError(t, err)
			drain(t, resp)
		} else {
			failure(t, err, SentMaybe, KindProtocol)
		}
		assert.Equal(t, !served, tr.suspects.has(hostKey{host: e.Addr().String()}))
	}
}

func TestHowIDsAreCompared(t *testing.T) {
	const mine, other = "1234", "123"
	body := func(text string) func(*echo) bool {
		return func(e *echo) bool { return e.misplacedBody(mine, []byte(text)) }
	}
	header := func(values ...string) func(*echo) bool {
		return func(e *echo) bool { return e.misplacedHead(mine, http.Header{"X-Request-Id": values}) }
	}
	for name, row := range map[string]struct {
		before, then func(*echo) bool
		misplaced    bool
	}{
		"header":                      {header(mine), header(other), true},
		"header with a prefix":        {header("cmpl-" + mine), header("cmpl-" + other), true},
		"header with another prefix":  {header("cmpl-" + mine), header("chatcmpl-" + other), false},
		"no header":                   {header(mine), header(), false},
		"a proxy's ids":               {header(other), header("12"), false},
		"body":                        {body(`{"id":"cmpl-1234"`), body(`{"id":"cmpl-123","object"`), true},
		"event":                       {body(`{"id":"cmpl-1234"`), body("data: {\"id\":\"cmpl-55555\"}\n\n"), true},
		"another API":                 {body(`{"id":"cmpl-1234"`), body(`{"id":"resp_55"`), false},
		"ids of the engine's own":     {body(`{"id":"cmpl-77"`), body(`{"id":"cmpl-88"`), false},
		"an id alone":                 {body(`{"id":"1234"`), body(`{"id":"msg_1"`), false},
		"an id in two reads":          {body(`{"id":"cmpl-1234"`), body(`{"id":"cmpl-12`), false},
		"header and body are not one": {header(mine), body(`{"id":"cmpl-123"`), false},
		"an id too long to be compared": {body(`{"id":"cmpl-1234"`),
			body(`{"id":"cmpl-` + strings.Repeat("5", maxID) + `"`), false},
		"a long text before the id": {body(`{"id":"` + strings.Repeat("5", 25) + `1234"`),
			body(`{"id":"` + strings.Repeat("5", 25) + `123"`), false},
	} {
		var e echo
		assert.False(t, row.before(&e), name)
		assert.Equal(t, row.misplaced, row.then(&e), name)
		assert.False(t, e.misplacedHead("", http.Header{"X-Request-Id": {"5"}}), "a request without an id")
	}
	e, head, text := echo{}, http.Header{"X-Request-Id": {mine}}, []byte(`{"id":"cmpl-1234"}`)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_ = e.misplacedHead(mine, head) || e.misplacedBody(mine, text)
	}))
}
