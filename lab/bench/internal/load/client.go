// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// askTimeout ends a request that hangs. The longest streams run for about ten seconds.
const askTimeout = 60 * time.Second

// Target is where clients send their requests: a proxy, or the two engines themselves.
type Target struct {
	Proxy           string // host:port; empty: the client does both legs itself
	Prefill, Decode string
}

// Meter counts what clients get. Safe for concurrent use.
type Meter struct {
	Requests atomic.Int64 // whole responses
	Failed   atomic.Int64 // requests without a right response
	Chunks   atomic.Int64 // events of streams
	Open     atomic.Int64 // streams whose first event has come and whose end has not
	Sampling atomic.Bool  // clients keep latencies
}

// Client asks one request after the other on connections of its own and checks every byte of every response.
type Client struct {
	board  *Board
	slot   int
	plan   *Plan
	target Target
	meter  *Meter

	request []byte // to the proxy, or the decode leg's first part: head and body
	body    []byte // view of request
	prefill []byte // direct only
	first   wire   // the proxy, or the prefill engine
	second  wire   // direct only: the decode engine
	room    []byte
	stream  streamCheck
	whole   []byte

	// Samples are the latencies kept while the meter was sampling: of a whole response; of a stream's first event;
	// of a paced stream each event's way from the engine's write to here. Read them while the client sends nothing.
	Samples []time.Duration
}

// wire is a connection. It is made when the first request is sent.
type wire struct {
	conn net.Conn
	br   *bufio.Reader
	head head
}

// NewClient returns a client that sends its requests under the number slot.
func NewClient(board *Board, slot int, target Target, plan *Plan, meter *Meter) *Client {
	c := &Client{board: board, slot: slot, plan: plan, target: target, meter: meter}
	host := target.Proxy
	if host == "" {
		host = target.Decode
	}
	c.request = appendRequestHead(nil, host, plan.Prompt.Size())
	at := len(c.request)
	c.request = append(c.request, plan.Prompt.body...)
	c.body = c.request[at:]
	plan.Prompt.address(c.body, slot, 0)
	board.Assign(slot, plan)
	return c
}

// Run sends requests until stop is set, and notes wrong responses on the board. It gives up after ten faults in a row.
// A client whose response comes later than its next request is due sends that at once, and then as planned again: a
// slow proxy gets fewer requests than planned, never two of one client at a time.
func (c *Client) Run(ctx context.Context, stop *atomic.Bool) {
	next := time.Now().Add(c.plan.Phase)
	for failed := 0; !stop.Load() && ctx.Err() == nil && failed < 10; {
		if c.plan.Every > 0 {
			time.Sleep(time.Until(next))
			if next = next.Add(c.plan.Every); next.Before(time.Now()) {
				next = time.Now()
			}
			if stop.Load() {
				return
			}
		}
		if err := c.Ask(ctx); err != nil {
			failed++
			c.meter.Failed.Add(1)
			c.board.Fault("client: %v", err)
			time.Sleep(10 * time.Millisecond)
			continue
		}
		failed = 0
	}
}

// Close ends the client's connections.
func (c *Client) Close() {
	c.first.close()
	c.second.close()
}

// Ask sends one request, and reads and checks its response. ctx bounds only the making of connections: a request that
// was sent is not cancelled.
func (c *Client) Ask(ctx context.Context) (err error) {
	serial := c.board.begin(c.slot)
	c.plan.Prompt.stamp(c.body, serial)
	defer func() {
		if err != nil {
			c.Close()
		}
	}()
	start := time.Now()
	from := &c.first
	if c.target.Proxy != "" {
		err = c.first.send(ctx, c.target.Proxy, start, c.request)
	} else {
		from = &c.second
		err = c.legs(ctx, start, serial)
	}
	if err != nil {
		return err
	}
	if err := c.check(from, start, serial); err != nil {
		return err
	}
	c.meter.Requests.Add(1)
	return nil
}

// check reads a response and compares it with what the engine must have said.
func (c *Client) check(w *wire, start time.Time, serial uint64) error {
	if err := w.head.read(w.br); err != nil {
		return fmt.Errorf("no response: %w", noEOF(err))
	}
	status, err := w.head.status()
	if err != nil {
		return err
	}
	if status != 200 {
		return fmt.Errorf("status %d", status)
	}
	s := &c.board.slots[c.slot]
	word := s.word.Load()
	if word == 0 {
		return errors.New("a response came although no prefill engine has seen the request")
	}
	if c.plan.Prompt.stream {
		return c.checkStream(w, start, serial, word)
	}
	if !bytes.HasPrefix(w.head.contentType, []byte("application/json")) {
		return fmt.Errorf("the response's type is %q", w.head.contentType)
	}
	if c.room, err = w.head.body(w.br, c.room); err != nil {
		return fmt.Errorf("inside the response: %w", err)
	}
	took := time.Since(start)
	c.whole = appendWhole(c.whole[:0], serial, word)
	if !bytes.Equal(c.room, c.whole) && !(c.board.byMeaning && sameResponse(c.room, c.whole)) {
		if !bytes.Contains(c.room, appendHex(nil, serial)) {
			return errors.New("the response is another request's")
		}
		return errors.New("the response is not what the engine said")
	}
	c.sample(took)
	return nil
}

func (c *Client) checkStream(w *wire, start time.Time, serial, word uint64) error {
	if !bytes.HasPrefix(w.head.contentType, []byte("text/event-stream")) {
		return fmt.Errorf("the stream's type is %q", w.head.contentType)
	}
	c.stream.reset(c, start, serial, word)
	opened := false
	err := w.head.each(w.br, func(piece []byte) error {
		err := c.stream.feed(piece)
		if !opened && c.stream.next > 0 {
			opened = true
			c.meter.Open.Add(1)
		}
		return err
	})
	if opened {
		c.meter.Open.Add(-1)
	}
	if err != nil {
		return fmt.Errorf("inside the stream: %w", err)
	}
	return c.stream.end()
}

func (c *Client) sample(d time.Duration) {
	if c.meter.Sampling.Load() {
		c.Samples = append(c.Samples, d)
	}
}

// legs sends both legs itself, as a proxy would. Its latency is the least that any proxy can have.
func (c *Client) legs(ctx context.Context, start time.Time, serial uint64) error {
	if c.prefill == nil {
		messages := c.plan.Prompt.messages
		const tail = `,"model":"bench","max_tokens":1,"temperature":0.5,"stream":false,"kv_transfer_params":` +
			`{"do_remote_decode":true,"do_remote_prefill":false}}`
		at := c.plan.Prompt.msgAt
		c.prefill = appendRequestHead(nil, c.target.Prefill, at+len(messages)+len(tail))
		c.room = append(append(c.room[:0], c.body[:at+len(messages)]...), tail...)
		c.prefill = append(c.prefill, c.room...)
	}
	c.stampLast(c.prefill, serial)
	if err := c.first.send(ctx, c.target.Prefill, start, c.prefill); err != nil {
		return err
	}
	if err := c.first.head.read(c.first.br); err != nil {
		return fmt.Errorf("no response to the prefill leg: %w", noEOF(err))
	}
	var err error
	if c.room, err = c.first.head.body(c.first.br, c.room); err != nil {
		return err
	}
	_, rest, found := bytes.Cut(c.room, []byte(`"kv_transfer_params":`))
	size := skipValue(rest, 0)
	if !found || size < 0 {
		return errors.New("the prefill response has no handoff")
	}
	const name = `,"kv_transfer_params":`
	c.whole = appendRequestHead(c.whole[:0], c.target.Decode, len(c.body)+len(name)+size)
	c.whole = append(c.whole, c.body[:len(c.body)-1]...)
	c.whole = append(c.whole, name...)
	c.whole = append(c.whole, rest[:size]...)
	c.whole = append(c.whole, '}')
	return c.second.send(ctx, c.target.Decode, start, c.whole)
}

// stampLast writes the serial number into the prefill request, where it stands at the same places as in the client's
// body.
func (c *Client) stampLast(request []byte, serial uint64) {
	at := bytes.Index(request, []byte("\r\n\r\n")) + 4
	c.plan.Prompt.stamp(request[at:], serial)
}

func (w *wire) send(ctx context.Context, address string, start time.Time, request []byte) error {
	if w.conn == nil {
		dialer := net.Dialer{Timeout: 5 * time.Second}
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return err
		}
		w.conn = conn
		w.br = bufio.NewReaderSize(conn, 8<<10)
	}
	if err := w.conn.SetDeadline(start.Add(askTimeout)); err != nil {
		return err
	}
	_, err := w.conn.Write(request)
	return err
}

func (w *wire) close() {
	if w.conn != nil {
		w.conn.Close()
		w.conn = nil
	}
}
