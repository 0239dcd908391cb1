// SPDX-License-Identifier: Apache-2.0

package states

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"
)

// fault is how an engine fails at the point where its leg waits.
type fault struct {
	hangs  bool                // it does nothing more, and its connection stands
	resets bool                // its connection is reset
	write  func(l *leg) string // it writes this, and closes the connection
}

// event is something that may happen while a leg waits at a point.
type event struct {
	name   string
	role   string        // of the engine that fails; "" for what no engine does
	at     []point       // where the engine may fail so
	hands  bool          // only where D reads a handoff
	stream bool          // only if D streams
	fault  fault         // of the engine
	do     func(*client) // what else happens
	by     []string      // the entrances at which it may happen; nil: all
	means  []string      // what the client may get, if it had nothing before and a second pair is well
	later  []string      // what the client may get, if it had the first byte
}

const (
	served = "200"
	isCut  = "200, cut"
	gone   = "gone"
)

var (
	connected = []point{atAccept, atCompute, atAsked, atHead, atFirst, atSecond, atEnd}
	goesOn    = []string{served}
	breaks    = []string{served, isCut} // served: where the leg is not needed any more
	timesOut  = []string{"504 timeout", served}
	// While time passes, no engine of a next attempt connects.
	passes = append([]string{"502 prefill_failed", "502 decode_failed", "502 handoff_expired"}, timesOut...)
)

// answers is an engine that answers with a status and a body.
func answers(status int, body string) fault {
	return fault{write: func(*leg) string { return jsonHead(status, len(body)) + body }}
}

const saysNo = `{"error":{"message":"no","type":"t","param":null,"code":"c"}}`

// events are all of them. Faults of engines are there for P and for D.
var events = slices.Concat(failures(prefillRole), failures(decodeRole), prefillFailures, decodeFailures, others)

// refuses is how an engine's own status looks to clients of the handler, and to callers of Do and steps.
func refuses(status string) []string {
	return []string{status + " c", status + " prefill_rejected", status + " decode_rejected"}
}

// failures are faults that both engines may have.
func failures(role string) []*event {
	own := func(name string, f fault, means []string, at ...point) *event {
		return &event{name: name, role: role, at: at, fault: f, means: means, later: breaks}
	}
	list := []*event{
		own("refuses the connection", fault{}, goesOn, atDial),
		own("hangs while connecting", fault{hangs: true}, goesOn, atDial),
		own("resets", fault{resets: true}, goesOn, connected...),
		own("closes the connection", fault{}, goesOn, connected...),
		own("hangs", fault{hangs: true}, timesOut, connected...),
		own("cuts its head", fault{write: func(*leg) string { return "HTTP/1.1 200 OK\r\nCont" }}, goesOn,
			atCompute),
		own("sends what is no HTTP", fault{write: func(*leg) string { return "\x00\x01\r\n\r\n" }}, goesOn,
			atCompute),
		own("redirects", fault{write: func(*leg) string {
			return "HTTP/1.1 307 X\r\nLocation: http://p1:1/x\r\nContent-Length: 0\r\n\r\n"
		}}, goesOn, atCompute),
		own("sends a part (206)", answers(206, `{}`), goesOn, atCompute),
		own("sends nothing (200)", answers(200, ``), goesOn, atCompute),
	}
	for _, status := range []int{400, 429} {
		list = append(list, own("answers "+strconv.Itoa(status), answers(status, saysNo),
			refuses(strconv.Itoa(status)), atCompute))
	}
	for _, status := range []int{500, 503} {
		list = append(list, own("answers "+strconv.Itoa(status), answers(status, saysNo), goesOn, atCompute))
	}
	return list
}

// rest replaces the rest of a body whose head is out.
func rest(l *leg) string { return strings.Repeat(" ", len(l.w.made(l))) }

var prefillFailures = []*event{
	{name: "sends what is no JSON", role: prefillRole, at: []point{atCompute},
		fault: answers(200, "no"), means: goesOn, later: breaks},
	{name: "sends a body of blanks", role: prefillRole, at: []point{atHead},
		fault: fault{write: rest}, means: goesOn, later: breaks},
	{name: "sends an error (200)", role: prefillRole, at: []point{atCompute},
		fault: answers(200, saysNo), means: goesOn, later: breaks},
	{name: "sends no handoff", role: prefillRole, hands: true, at: []point{atCompute},
		fault: answers(200, `{"choices":[{"text":"t"}]}`), means: goesOn, later: breaks},
	{name: "sends a handoff of null", role: prefillRole, hands: true, at: []point{atCompute},
		fault: answers(200, `{"choices":[{"text":"t"}],"kv_transfer_params":null}`), means: goesOn, later: breaks},
}

// ends is a stream that ends with these events.
func ends(events ...string) fault {
	return fault{write: func(l *leg) string {
		var b strings.Builder
		if l.at == atCompute {
			b.WriteString(eventHead)
		}
		for _, e := range events {
			b.WriteString(chunk(e))
		}
		return b.String() + lastChunk
	}}
}

var decodeFailures = []*event{
	{name: "sends an error event", role: decodeRole, at: []point{atCompute, atHead}, stream: true, fault: ends(saysNo),
		means: goesOn, later: breaks},
	{name: "sends an error event and [DONE]", role: decodeRole, at: []point{atCompute, atHead}, stream: true,
		fault: ends(saysNo, "[DONE]"), means: goesOn, later: breaks},
	{name: "ends its stream at once", role: decodeRole, at: []point{atCompute, atHead}, stream: true, fault: ends(),
		means: goesOn, later: breaks},
	{name: "sends [DONE] at once", role: decodeRole, at: []point{atCompute, atHead}, stream: true,
		fault: ends("[DONE]"), means: goesOn, later: breaks},
	{name: "breaks off within an event", role: decodeRole, at: []point{atCompute, atHead, atFirst, atSecond},
		stream: true, fault: fault{write: func(l *leg) string {
			head := ""
			if l.at == atCompute {
				head = eventHead
			}
			return head + "40\r\ndata: {\"choices\":[{\"te"
		}}, means: goesOn, later: breaks},
	{name: "says that its client gave up", role: decodeRole, at: []point{atCompute, atHead}, stream: true,
		fault: ends(choice("", `"abort"`), "[DONE]"), means: goesOn, later: breaks},
	{name: "compresses", role: decodeRole, at: []point{atCompute}, fault: fault{write: func(*leg) string {
		return "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"
	}}, means: goesOn, later: breaks},
}

// others are what clients, operators, discovery and the clock do.
var others = []*event{
	{name: "the client leaves", do: func(c *client) { c.leave(context.Canceled) }, means: []string{gone},
		later: []string{gone, isCut, served}},
	{name: "the client's deadline", do: func(c *client) { c.leave(context.DeadlineExceeded) },
		by: []string{byDo, bySteps}, means: []string{"504 timeout"}, later: breaks},
	{name: "the client stops reading", do: (*client).stall, by: []string{byHandler},
		means: []string{served, isCut, gone}, later: []string{served, isCut, gone}},
	{name: "drain", do: func(c *client) { c.w.shutdown(time.Hour) }, means: goesOn, later: goesOn},
	{name: "shutdown", do: func(c *client) { c.w.shutdown(0) }, means: []string{"503 draining"}, later: breaks},
	{name: "the flow is replaced", do: (*client).replace, by: []string{byHandler}, means: goesOn, later: goesOn},
	{name: "P leaves discovery", do: func(c *client) { c.vanish(prefillRole) }, means: goesOn, later: goesOn},
	{name: "D leaves discovery", do: func(c *client) { c.vanish(decodeRole) }, means: goesOn, later: goesOn},
	{name: "7 s pass", do: func(*client) { time.Sleep(7 * time.Second) }, means: passes, later: breaks},
	{name: "30 s pass", do: func(*client) { time.Sleep(30 * time.Second) }, means: passes, later: breaks},
}

// shutdown ends the flow beside its requests. New ones are refused.
func (w *world) shutdown(limit time.Duration) {
	w.draining = make(chan struct{})
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	go func() {
		defer close(w.draining)
		defer cancel()
		_ = w.end(ctx, w.flow)
	}()
}

// replace gives the route to another flow, and shuts the first one down.
func (c *client) replace() {
	c.w.route(c.w.next)
	c.w.shutdown(time.Hour)
}

// vanish takes the engine of the leg that was begun last out of discovery.
func (c *client) vanish(role string) {
	c.w.mu.Lock()
	id := strings.ToLower(role) + "1:1"
	for _, l := range c.w.legs {
		if l.role == role && l.host != "" {
			id = l.host + ":1"
		}
	}
	c.w.mu.Unlock()
	c.w.vanish(id)
}

// suits reports whether an event may happen to a leg that waits.
func (e *event) suits(l *leg, stream bool) bool {
	return e.role == l.role && slices.Contains(e.at, l.at) && (stream || !e.stream) &&
		(l.w.protocol.hands() || !e.hands)
}

// on reports whether an event may happen while these legs wait, and to which of them; nil for none of them.
func (e *event) on(waiting []*leg, c *client) (l *leg, ok bool) {
	if e.role == "" {
		return nil, e.by == nil || slices.Contains(e.by, c.entrance)
	}
	for _, l := range waiting {
		if e.suits(l, c.stream) {
			return l, true
		}
	}
	return nil, false
}
