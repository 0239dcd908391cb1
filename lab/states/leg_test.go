// SPDX-License-Identifier: Apache-2.0

package states

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tidwall/gjson"
)

// point is how far a leg has come. At each point it waits for the driver.
type point string

// The points, in their order.
const (
	atStep      point = "given"     // a host has got the leg from Steps.Next and has not sent it yet
	atDial      point = "dialing"   // the gateway connects
	atAccept    point = "connected" // the connection stands; the engine has read nothing
	atCompute   point = "computing" // the engine has read the request
	atAsked     point = "asked"     // D has asked for the prefill
	atHead      point = "head"      // the engine has sent the response's head
	atFirst     point = "first"     // and the first event, or half of the body
	atSecond    point = "second"    // and the second event
	atEnd       point = "ending"    // and everything but the end of the framing
	noPoint     point = ""
	prefillRole       = "P"
	decodeRole        = "D"
)

// points are all of them.
var points = []point{atStep, atDial, atAccept, atCompute, atAsked, atHead, atFirst, atSecond, atEnd}

// leg is one connection to an engine, from the wish for it until its end. It carries one request. A leg at atStep has
// no connection: its host may open one.
type leg struct {
	w     *world
	role  string
	host  string
	grant chan *fault
	gone  chan struct{} // closed when the gateway has closed the connection, or wants it no more

	// with world.mu
	at     point
	waits  bool   // for the driver
	got    bool   // the engine has the whole request
	room   string // the session
	prompt string // the client's name
	raw    string // the prompt as it was sent
	given  int    // tokens of D's in it
	since  time.Time
	failed bool      // as the driver said
	sent   time.Time // when the gateway began to write
	began  int64     // the same moment
	served bool      // the engine has sent its whole response
	ended  time.Time

	once  sync.Once
	reset atomic.Bool
	dead  atomic.Bool // the engine failed, or was silent for too long, before the end of what it had to say
	far   net.Conn    // the engine's side
}

func (w *world) newLeg(role, host string) *leg {
	l := &leg{w: w, role: role, host: host, grant: make(chan *fault), gone: make(chan struct{})}
	w.mu.Lock()
	w.legs = append(w.legs, l)
	w.mu.Unlock()
	return l
}

// end notes that the gateway wants nothing more of the leg.
func (l *leg) end() {
	l.once.Do(func() {
		l.w.mu.Lock()
		if l.at != atEnd && l.waits && time.Since(l.since) >= idleLimit {
			l.dead.Store(true)
		}
		l.ended, l.waits = time.Now(), false
		l.w.mu.Unlock()
		close(l.gone)
		l.w.signal()
	})
}

// abandon ends the engine's side, whatever it does.
func (l *leg) abandon() {
	l.end()
	l.w.mu.Lock()
	far := l.far
	l.w.mu.Unlock()
	if far != nil {
		_ = far.Close()
	}
}

// pass waits at a point until the driver lets the leg go on. It returns false if the leg is over.
func (l *leg) pass(at point, over <-chan struct{}) (f *fault, ok bool) {
	l.w.mu.Lock()
	l.at, l.waits, l.since = at, true, time.Now()
	l.w.mu.Unlock()
	l.w.signal()
	select {
	case f = <-l.grant:
		return f, true
	case <-over:
	case <-l.gone:
	}
	l.w.mu.Lock()
	l.waits = false
	l.w.mu.Unlock()
	return nil, false
}

// let lets a waiting leg go on, with a fault or without.
func (l *leg) let(f *fault) {
	l.w.mu.Lock()
	l.waits = false
	if f != nil {
		l.failed = true
		l.dead.Store(l.at != atEnd)
	}
	l.w.mu.Unlock()
	l.grant <- f
}

var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}

// dial is how the gateway connects to engines.
func (w *world) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, _, _ := net.SplitHostPort(address)
	l := w.newLeg(strings.ToUpper(host[:1]), host)
	f, ok := l.pass(atDial, ctx.Done())
	if f != nil && f.hangs {
		l.hang(ctx.Done())
		ok = false
	}
	switch {
	case !ok:
		l.end()
		return nil, ctx.Err()
	case f != nil:
		l.end()
		return nil, errRefused
	}
	near, far := net.Pipe()
	w.mu.Lock()
	l.far = far
	w.mu.Unlock()
	go l.serve(far)
	return &wire{Conn: near, leg: l}, nil
}

// wire is the gateway's side of a connection. It has the errors of a socket.
type wire struct {
	net.Conn
	leg    *leg
	closed atomic.Bool
}

func (c *wire) Close() error {
	c.closed.Store(true)
	err := c.Conn.Close()
	c.leg.end()
	return err
}

func (c *wire) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) && c.leg.reset.Load() {
		err = &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
	}
	return n, c.own(err)
}

func (c *wire) Write(p []byte) (int, error) {
	c.leg.w.mu.Lock()
	if c.leg.sent.IsZero() {
		c.leg.sent, c.leg.began = time.Now(), c.leg.w.moment.Add(1)
	}
	c.leg.w.mu.Unlock()
	n, err := c.Conn.Write(p)
	if errors.Is(err, io.ErrClosedPipe) && !c.closed.Load() {
		err = &net.OpError{Op: "write", Net: "tcp", Err: os.NewSyscallError("write", syscall.EPIPE)}
	}
	return n, c.own(err)
}

func (c *wire) own(err error) error {
	if errors.Is(err, io.ErrClosedPipe) {
		return net.ErrClosed
	}
	return err
}

// hang does nothing more until nobody waits.
func (l *leg) hang(over <-chan struct{}) {
	select {
	case <-over:
	case <-l.gone:
	}
}

// serve is an engine that serves one request.
func (l *leg) serve(c net.Conn) {
	defer l.w.signal()
	defer c.Close()
	if !l.go1(c, atAccept) {
		return
	}
	r, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	l.read(string(body))
	if !l.go1(c, atCompute) {
		return
	}
	if l.asks(string(body)) {
		l.w.protocol.ask(l.room)
		if !l.go1(c, atAsked) {
			return
		}
	}
	for _, part := range l.response(string(body)) {
		if _, err := io.WriteString(c, part.bytes); err != nil {
			return
		}
		l.w.gave(l, part.tokens)
		if part.at != noPoint && !l.go1(c, part.at) {
			return
		}
	}
	l.w.leased(l)
	l.w.mu.Lock()
	l.served = true
	l.w.mu.Unlock()
}

// go1 goes on from a point, or fails there as the driver says.
func (l *leg) go1(c net.Conn, at point) bool {
	f, ok := l.pass(at, nil)
	switch {
	case !ok:
		return false
	case f == nil:
		return true
	case f.hangs:
		l.hang(nil)
	case f.resets:
		l.reset.Store(true)
	case f.write != nil:
		_, _ = io.WriteString(c, f.write(l))
	}
	return false
}

// read notes what the engine was asked for.
func (l *leg) read(body string) {
	params := gjson.Get(body, "kv_transfer_params")
	l.w.mu.Lock()
	l.got, l.room, l.raw = true, params.Get("room").Str, gjson.Get(body, "prompt").Raw
	l.prompt, l.given = l.w.promptOf(l.raw)
	sent, began := l.sent, l.began
	l.w.mu.Unlock()
	l.w.asked(l, params.Get("handoff").Str, sent, began)
}

// part is a piece of a response, and the point at which the engine is after it.
type part struct {
	bytes  string
	at     point
	tokens int // of a stream that may be rescued: how many there are with this part
}

const eventHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

func jsonHead(status, length int) string {
	return "HTTP/1.1 " + strconv.Itoa(status) + " X\r\nContent-Type: application/json\r\nContent-Length: " +
		strconv.Itoa(length) + "\r\n\r\n"
}

// chunk is one server-sent event in a chunk of its own.
func chunk(data string) string {
	event := "data: " + data + "\n\n"
	return strconv.FormatInt(int64(len(event)), 16) + "\r\n" + event + "\r\n"
}

const lastChunk = "0\r\n\r\n"

// words are what D says to a prompt.
func words(prompt string) (first, second string) { return "to " + prompt, ", this" }

func choice(text, reason string) string {
	return `{"choices":[{"index":0,"text":"` + text + `","finish_reason":` + reason + `}]}`
}

// asks reports whether the leg is one of a D that asks for a prefill by an event.
func (l *leg) asks(string) bool { return l.role == decodeRole && l.w.protocol.asks }

// whole is a response that is not streamed.
func whole(all string) []part {
	return []part{{bytes: jsonHead(200, len(all)), at: atHead}, {bytes: all[:len(all)/2], at: atFirst},
		{bytes: all[len(all)/2:]}}
}

// response is what a healthy engine says.
func (l *leg) response(body string) []part {
	if l.role == prefillRole {
		all := l.w.made(l)
		return whole(all)
	}
	if gjson.Get(body, "return_token_ids").Bool() {
		return l.tokens(int(gjson.Get(body, "max_tokens").Int()))
	}
	first, second := words(l.prompt)
	reason := `"length"`
	if l.w.protocol.cold && !gjson.Get(body, "kv_transfer_params.handoff").Exists() {
		first, second, reason = "", "", `"cache_threshold"`
	}
	if gjson.Get(body, "stream").Bool() {
		begun := "null"
		if first == "" {
			begun = reason
		}
		return []part{{bytes: eventHead, at: atHead}, {bytes: chunk(choice(first, begun)), at: atFirst},
			{bytes: chunk(choice(second, reason)), at: atSecond}, {bytes: chunk("[DONE]"), at: atEnd},
			{bytes: lastChunk}}
	}
	all := choice(first+second, reason)
	return whole(all)
}
