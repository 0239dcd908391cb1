// SPDX-License-Identifier: Apache-2.0

package states

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// The ways in.
const (
	byDo      = "Do"
	byHandler = "handler"
	bySteps   = "steps"
)

var entrances = []string{byDo, byHandler, bySteps}

// client is one request, and what came of it.
type client struct {
	w        *world
	name     string // and its prompt
	entrance string
	stream   bool
	greedy   bool   // the request's content allows a rescue
	prefill  string // the ID of the engine that the request names, or ""
	decode   string
	late     bool // the gateway takes no new requests any more
	ctx      context.Context
	cancel   context.CancelCauseFunc
	conn     net.Conn      // to the handler
	over     chan struct{} // closed when the client is through
	stop     chan struct{} // closed when the client must end
	done     chan struct{} // closed when the gateway has returned

	mu     sync.Mutex // of what follows; the driver and the client change it
	steps  *pdflow.Steps
	left   bool
	stalls bool

	// with ledger.mu
	first    int64  // the moment at which the response began; 0: it has not
	returned int64  // the moment from which on the gateway has nothing more to do for it
	session  string // of the last leg that an engine has read
	tokens   int    // that D has made, if the stream may be rescued

	// when over is closed
	status int
	code   pdflow.Code
	body   string
	end    string // how the response ended: whole, cut, refused, or gone
}

// start sends a request. Only a greedy one may be rescued.
func (w *world) start(entrance string, stream, greedy bool) *client {
	return w.startAt(entrance, stream, greedy, "", "")
}

// startAt sends a request that names one of its engines, which the handler's cannot.
func (w *world) startAt(entrance string, stream, greedy bool, prefill, decode string) *client {
	if entrance == byHandler {
		prefill, decode = "", ""
	}
	c := &client{prefill: prefill, decode: decode, w: w, name: "client " + strconv.Itoa(len(w.clients)),
		entrance: entrance, stream: stream, greedy: greedy,
		over: make(chan struct{}), stop: make(chan struct{}), done: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.late = w.draining != nil
	w.mu.Lock()
	w.clients = append(w.clients, c)
	w.mu.Unlock()
	run := map[string]func(){byDo: c.do, byHandler: c.post, bySteps: c.drive}[entrance]
	if entrance == byHandler {
		near, far := net.Pipe()
		c.conn = near
		w.accept <- far
	}
	go func() {
		defer w.signal()
		defer close(c.over)
		run()
		c.judge()
	}()
	return c
}

func (w *world) clientOf(name string) *client {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.clients {
		if c.name == name {
			return c
		}
	}
	return nil
}

func (w *world) byID(id string) *client { return w.clientOf(strings.ReplaceAll(id, "-", " ")) }

// rescuable reports whether another pair may go on with the client's stream.
func (c *client) rescuable() bool {
	return c.w.protocol.rescues > 0 && c.stream && c.greedy && c.entrance != bySteps
}

func (c *client) request() string {
	body := `{"model":"m","prompt":"` + c.name + `","max_tokens":` + strconv.Itoa(tokens)
	if c.w.protocol.rescues > 0 && c.greedy {
		body += `,"temperature":0`
	}
	if c.stream {
		body += `,"stream":true`
	}
	return body + "}"
}

func (c *client) isOver() bool {
	select {
	case <-c.over:
		return true
	default:
		return false
	}
}

// leave ends the request from the client's side.
func (c *client) leave(cause error) {
	c.mu.Lock()
	c.left = true
	steps := c.steps
	c.mu.Unlock()
	switch {
	case c.conn != nil:
		_ = c.conn.Close()
	case steps != nil && errors.Is(cause, context.Canceled):
		steps.End(cause)
	}
	// A client that ends its steps already is not ended again: that waits for a mutex, and the bubble's clock for it.
	c.cancel(cause)
}

// give ends the client, whatever it does.
func (c *client) give() {
	if !c.isOver() {
		c.leave(context.Canceled)
	}
	close(c.stop)
	<-c.over
}

func (c *client) gotHead() {
	c.w.ledger.mu.Lock()
	defer c.w.ledger.mu.Unlock()
	c.first = c.w.moment.Add(1)
}

// returns is called when the gateway has returned from the request: then no leg of it may be alive, but one of P's that
// runs on.
func (c *client) returns() {
	close(c.done)
	c.w.ledger.mu.Lock()
	c.returned = c.w.moment.Add(1)
	c.w.ledger.mu.Unlock()
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	for _, l := range c.w.legs {
		own := l.prompt == c.name || len(c.w.clients) == 1
		if own && l.host != "" && l.ended.IsZero() && !c.w.protocol.outlives(l) {
			c.w.breach("%s's leg is alive at %s after the request's end", l.role, l.at)
		}
	}
}

// outlives reports whether a leg may go on after its request: only one that was sent to P may, where P finishes.
func (p *protocol) outlives(l *leg) bool { return p.finishes && l.role == prefillRole && l.began > 0 }

// do calls Flow.Do.
func (c *client) do() {
	defer c.returns()
	resp, err := c.w.flow.Do(c.ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(c.request()),
		RequestID: c.id(), Prefill: c.prefill, Decode: c.decode})
	if err != nil {
		c.failed(err)
		return
	}
	c.read(resp)
	_ = resp.Body.Close()
	_ = resp.Body.Close()
}

func (c *client) id() string { return strings.ReplaceAll(c.name, " ", "-") }

func (c *client) failed(err error) {
	e, ok := errors.AsType[*pdflow.Error](err)
	if !ok {
		c.w.breach("an error of another type: %T", err)
		return
	}
	c.status, c.code, c.end = e.HTTPStatus(), e.Code, "refused"
}

// read reads a response that the caller has.
func (c *client) read(resp *pdflow.Response) {
	c.gotHead()
	c.status, c.end = resp.Status, "whole"
	var b strings.Builder
	buf := make([]byte, 64)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err == nil {
			continue
		}
		if err != io.EOF {
			c.end = "cut"
			if e, ok := errors.AsType[*pdflow.Error](err); ok {
				c.code = e.Code
			} else {
				c.code = pdflow.CodeInternal
			}
			if n, again := resp.Body.Read(buf); n > 0 || again == nil {
				c.w.breach("bytes after an error")
			}
		}
		c.body = b.String()
		return
	}
}

// post asks the handler, over a connection of its own.
func (c *client) post() {
	defer c.conn.Close()
	body := c.request()
	go func() {
		_, _ = io.WriteString(c.conn, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
			"X-Request-Id: "+c.id()+"\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	}()
	wire := bufio.NewReaderSize(&slowReader{c}, 64)
	resp, err := http.ReadResponse(wire, nil)
	if err != nil {
		c.end = "gone"
		return
	}
	c.status, c.end = resp.StatusCode, "whole"
	all, err := io.ReadAll(resp.Body)
	if c.body = string(all); err != nil {
		c.end = "cut"
		return
	}
	if resp.StatusCode != 200 {
		c.end, c.code = "refused", pdflow.Code(gjson.Get(c.body, "error.code").String())
		if ct := resp.Header.Get("Content-Type"); ct != "application/json" {
			c.w.breach("an error of the type %q", ct)
		}
	}
	_ = c.conn.SetReadDeadline(time.Now().Add(time.Millisecond))
	if n, _ := io.Copy(io.Discard, wire); n > 0 {
		c.w.breach("%d bytes after the response", n)
	}
}

// slowReader reads the connection until the client stalls.
type slowReader struct{ c *client }

func (r *slowReader) Read(p []byte) (int, error) {
	r.c.mu.Lock()
	stalls := r.c.stalls
	r.c.mu.Unlock()
	if stalls {
		select {
		case <-r.c.done:
		case <-r.c.stop:
		}
	}
	return r.c.conn.Read(p)
}

func (c *client) stall() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stalls = true
}

// serve is the handler, which tells its end.
func (w *world) serve(rw http.ResponseWriter, r *http.Request) {
	if c := w.byID(r.Header.Get("X-Request-Id")); c != nil {
		defer c.returns()
		rw = &committed{rw, c}
	}
	w.mux.ServeHTTP(rw, r)
}

// committed notes that the gateway has begun its response. net/http may hold the first bytes for a while.
type committed struct {
	http.ResponseWriter
	c *client
}

func (w *committed) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *committed) WriteHeader(status int) {
	if status == http.StatusOK {
		w.c.gotHead()
	}
	w.ResponseWriter.WriteHeader(status)
}

// drive sends the legs itself.
func (c *client) drive() {
	defer c.returns()
	s, err := c.w.flow.Begin(c.ctx, &pdflow.Request{API: connector.APICompletions, Body: []byte(c.request()),
		RequestID: c.id(), Prefill: c.prefill, Decode: c.decode})
	if err != nil {
		c.failed(err)
		return
	}
	c.mu.Lock()
	c.steps = s
	left := c.left
	c.mu.Unlock()
	if left {
		s.End(context.Canceled)
	}
	var legs sync.WaitGroup
	for {
		step, resp, err := s.Next(context.Background())
		if step != nil {
			legs.Go(func() { c.send(step) })
			continue
		}
		if err != nil {
			c.failed(err)
		} else {
			c.read(resp)
		}
		break
	}
	c.mu.Lock()
	c.steps = nil
	c.mu.Unlock()
	s.End(nil)
	s.End(nil)
	legs.Wait()
}

func (c *client) send(step *pdflow.Step) {
	role := prefillRole
	if step.Leg == pdflow.LegDecode {
		role = decodeRole
	}
	l := c.w.newLeg(role, "")
	defer l.end()
	if _, ok := l.pass(atStep, step.Context().Done()); ok {
		step.Send(c.w.rt)
	}
}

// judge checks what the client got, whatever happened.
func (c *client) judge() {
	first, second := words(c.name)
	want := choice(first+second, `"length"`)
	if c.stream {
		want = "data: " + choice(first, "null") + "\n\ndata: " + choice(second, `"length"`) + "\n\ndata: [DONE]\n\n"
	}
	if c.rescuable() {
		want = c.tokenStream()
	}
	if c.late && !c.left && c.told() != "503 draining" {
		c.w.breach("a request after the shutdown's begin got %s", c.told())
	}
	switch c.end {
	case "whole":
		if c.body != want {
			c.w.breach("a response that is whole, and wrong: %q", c.body)
		}
	case "cut":
		// An event may have been cut by D itself.
		events := c.body
		if c.stream {
			events = c.body[:strings.LastIndex("\n\n"+c.body, "\n\n")]
		}
		if i := strings.LastIndex(events, `data: {"error":`); i > 0 && c.rescuable() {
			events = events[:i] // what D says as it gives up, where no other pair goes on
		}
		if !strings.HasPrefix(want, events) {
			c.w.breach("a response that was cut, and is wrong: %q", c.body)
		}
	case "refused":
		own := c.status >= 500 && c.code == pdflow.CodeDecodeFailed // D's own status
		if status, ok := expect[c.code]; ok && c.status != status && !own {
			c.w.breach("the code %s has the status %d", c.code, c.status)
		}
		if c.status < 400 {
			c.w.breach("an error of status %d", c.status)
		}
	}
}

// told is what the client got, in words.
func (c *client) told() string {
	switch c.end {
	case "whole":
		return "200"
	case "cut":
		return "200, cut"
	case "refused":
		if c.status == 499 {
			return "gone"
		}
		if c.code == "" {
			return strconv.Itoa(c.status)
		}
		return strconv.Itoa(c.status) + " " + string(c.code)
	}
	return "gone"
}
