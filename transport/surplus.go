// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// On a kept connection nothing but their order tells which response is to which request. An engine that sends one
// response too many shifts all that follow: each client gets the response of the client before. So such an engine gets
// no kept connections for a while, and where it repeats the ids of requests, they are compared.
//
// Nothing else in a response tells. Date and created are whole seconds of another machine's clock, the model is the
// same for all, or has another name than the request gives it, and how soon a response may begin after its request
// depends on the engine.

// errMisplaced is a response that is not to the request that was sent.
var errMisplaced = errors.New("transport: the response is to another request")

// suspectFor is how long an engine gets no kept connections after it has sent something that nobody asked for.
const suspectFor = 5 * time.Minute

// suspects are the engines that get no kept connections, by the addresses that are dialed. Most often there is none,
// and then a request pays for looking at one number.
type suspects struct {
	n     atomic.Int64 // of until
	mu    sync.Mutex
	until map[string]time.Time
}

// add makes an engine a suspect, also one that is, and reports whether it was not.
func (s *suspects) add(address string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, was := s.until[address]
	if s.until == nil {
		s.until = make(map[string]time.Time)
	}
	s.until[address] = time.Now().Add(suspectFor)
	s.n.Store(int64(len(s.until)))
	return !was
}

func (s *suspects) has(k hostKey) bool {
	if s.n.Load() == 0 {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(s.until, func(_ string, until time.Time) bool { return !now.Before(until) })
	s.n.Store(int64(len(s.until)))
	_, is := s.until[k.address()]
	return is
}

// clear is called when nothing listens at an address: what listens there later is another process.
func (s *suspects) clear(address string) {
	if s.n.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.until, address)
	s.n.Store(int64(len(s.until)))
}

// suspect notes that an engine has sent something that nobody asked for. Its idle connections are closed.
func (t *Transport) suspect(k hostKey) {
	if t.suspects.add(k.address()) {
		t.pool.drop(k)
	}
}

// unasked reports whether bytes that have come on an idle connection make its engine a suspect. Some servers and
// proxies say 408 before they close an idle connection, and some write an empty line.
func unasked(b []byte) bool {
	status, isHTTP := bytes.CutPrefix(b, []byte("HTTP/1."))
	says408 := isHTTP && len(status) > 1 && bytes.HasPrefix(status[1:], []byte(" 408"))
	return len(bytes.Trim(b, "\r\n")) > 0 && !says408
}

// A response that nobody asked for is seen if it comes while the connection is idle. If one request follows another at
// once, the connection is never idle, and responses stay shifted for as long as that goes on. So the pool prefers
// connections that were idle for minPause, and a connection that went without such a pause for too long must have one.
// For that an engine has a few connections more. After an exchange that took as long as those of inference do, a pause
// needs at most one connection more for each five, so that one has a pause in any case.
const (
	minPause    = 10 * time.Millisecond
	fewUnpaused = 2                      // requests that followed at once: so many a connection serves in any case,
	unpausedFor = 100 * time.Millisecond // others only for so long since its last pause, or for minPause each,
	maxUnpaused = 24                     // and no more than so many
	maxPausing  = 2                      // connections to an engine that pause while a request opens another
	long        = 5 * minPause           // for an exchange
	maxLong     = 16                     // as maxPausing, after long exchanges
)

// first reports whether an idle connection has hardly served a request yet without a pause.
func (c *conn) first() bool { return c.unpaused < fewUnpaused && !c.long }

// mayServe reports whether an idle connection may serve the next request without a pause.
func (c *conn) mayServe(now time.Time) bool {
	if c.long {
		return false
	}
	limit := max(unpausedFor, time.Duration(c.unpaused)*minPause)
	return c.unpaused < fewUnpaused || c.unpaused < maxUnpaused && now.Sub(c.paused) < limit
}

// echo is what a connection has shown of the ids of its requests: what stands before the id, in the header X-Request-Id
// and at the begin of a body.
type echo struct{ header, body prefix }

// prefix is a text before a request's id.
type prefix struct {
	known bool
	n     uint8
	text  [24]byte
}

const (
	headerRequestID = "X-Request-Id"
	maxID           = 256 // bytes of an id in a body, as far as it is looked for
)

// idOf returns a request's X-Request-Id, "" if it has none.
func idOf(req *http.Request) string {
	if v := req.Header[headerRequestID]; len(v) == 1 {
		return v[0]
	}
	return ""
}

// misplacedHead reports whether a response is to another request than the one with the id, by its header. With
// --enable-request-id-headers vLLM repeats the id there.
func (e *echo) misplacedHead(id string, header http.Header) bool {
	got := header[headerRequestID]
	return id != "" && len(got) == 1 && misplaced(&e.header, got[0], id, 0)
}

// misplacedBody reports the same by the first bytes of a body. vLLM's responses begin with an id that ends with the
// request's, whole ones and events (docs/protocols/vllm.md §2). An id without a text before it could be of any engine
// and API, so it is not compared.
func (e *echo) misplacedBody(id string, body []byte) bool {
	value, ok := bytes.CutPrefix(bytes.TrimPrefix(body, []byte("data: ")), []byte(`{"id":"`))
	if !ok || id == "" {
		return false
	}
	end := bytes.IndexByte(value[:min(len(value), maxID)], '"')
	return end >= 0 && misplaced(&e.body, value[:end], id, 1)
}

// misplaced learns how a value repeats the id of its request, after least bytes or more. It returns true if an earlier
// value did and this one is made in the same way of another id.
func misplaced[T string | []byte](p *prefix, value T, id string, least int) bool {
	before := len(value) - len(id)
	if before >= least && before <= len(p.text) && begins(value[before:], id) {
		p.known, p.n = true, uint8(copy(p.text[:], value[:before]))
		return false
	}
	return p.known && begins(value, p.text[:p.n])
}

// begins reports whether s begins with the bytes of start. It makes no string of either.
func begins[S, P string | []byte](s S, start P) bool {
	if len(s) < len(start) {
		return false
	}
	for i := range len(start) {
		if s[i] != start[i] {
			return false
		}
	}
	return true
}
