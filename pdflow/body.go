// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
)

// streamBuffer is one read of a response, in bytes. It is held as long as the response runs, but not while a stream
// waits for its next part (see Body.wait).
const streamBuffer = 4 << 10

// bulkBuffer is one read of a response that comes faster than it is passed on: each read then saves a write, too.
const bulkBuffer = 32 << 10

var (
	buffers     = sync.Pool{New: func() any { return new([streamBuffer]byte) }}
	bulkBuffers = sync.Pool{New: func() any { return new([bulkBuffer]byte) }}
)

// Body is a response on its way: what was read while the head was awaited, then the engine's bytes. One goroutine reads
// it. Close may be called by any, also while a Read waits, and more than once.
type Body struct {
	mu    sync.Mutex // held by what reads and by what closes
	a     *attempt   // the last, of a stream that was rescued
	x     *exchange  // a's
	outer *exchange  // the first of the exchanges that fell back until this flow served; see exchange.inner

	status int
	header http.Header
	mode   Mode
	sse    bool

	resp       io.Closer
	waits      waiter    // resp, if it can wait without a buffer; nil where src, but for faults, may hold parts
	src        io.Reader // the engine's bytes, rewritten if the connector asks for it
	withheld   sse.Withheld
	faults     sse.Faults
	pooled     *[streamBuffer]byte
	bulk       *[bulkBuffer]byte
	full       bool // the last read filled the buffer
	smallReads int  // reads since one filled streamBuffer
	buf        []byte
	n          int    // bytes of head in buf
	judged     int    // how much of the head has been looked at
	first      []byte // the first event with content; once Read has begun, what it has not taken yet
	known      bool   // the first event with content is in the head
	eof        bool
	err        *Error
	closed     bool
	tail       verdict.Tail
	guarded    bool // marks are looked for
	unframed   bool // nothing but the connection's end tells the response's

	received int64

	tokens *resume.Stream // not nil: the stream can be rescued

	steps *Steps // not nil: the caller sends the legs
	relay bool   // the caller passes the response on by itself
}

func newBody(a *attempt, resp *http.Response) *Body {
	b := &Body{a: a, x: a.x, status: resp.StatusCode, mode: a.mode, resp: resp.Body, src: resp.Body}
	b.sse = strings.HasPrefix(strings.ToLower(resp.Header.Get("Content-Type")), "text/event-stream")
	b.unframed = resp.ContentLength < 0 && len(resp.TransferEncoding) == 0
	b.guarded = a.x.req.API.Guarded()
	stop := a.f.traits.Ending.FailureStop
	if stop != "" && a.x.req.StopsAt(stop) {
		stop = "" // the end that the client asked for
	}
	b.tail = verdict.NewTail(b.sse, stop)
	rewritten := b.rewrite(a)
	b.header = responseHeader(resp, b.sse, rewritten, a.x.door.own)
	length := resp.ContentLength
	if b.header["Content-Length"] == nil {
		length = -1
	}
	b.withhold(length)
	b.follow()
	b.pooled = buffers.Get().(*[streamBuffer]byte)
	b.buf = b.pooled[:]
	if b.sse && a.x.door.steps == nil && !rewritten && b.tokens == nil {
		b.waits, _ = resp.Body.(waiter)
	}
	return b
}

// responseHeader picks what a client needs of an engine's header. The header of pdkit's own transport (own) is nobody
// else's, and serves itself.
func responseHeader(resp *http.Response, sse, rewritten, own bool) http.Header {
	h := resp.Header
	if own {
		maps.DeleteFunc(h, func(name string, _ []string) bool { return !slices.Contains(passed, name) })
	} else {
		h = make(http.Header, 6)
		for _, name := range passed {
			if v := resp.Header[name]; len(v) > 0 {
				h[name] = v
			}
		}
	}
	switch {
	case sse:
		delete(h, "Content-Length")
		if h["Cache-Control"] == nil {
			h["Cache-Control"] = noCache
		}
		h["X-Accel-Buffering"] = noBuffering
	case resp.ContentLength < 0 || rewritten:
		delete(h, "Content-Length")
	case len(h["Content-Length"]) != 1:
		h["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	}
	return h
}

// passed are the fields of an engine's header that clients get.
var passed = []string{"Content-Type", "Cache-Control", "Content-Length"}

var (
	noCache     = []string{"no-cache"}
	noBuffering = []string{"no"}
)

// grow gives the head more room.
func (b *Body) grow() {
	bigger := make([]byte, min(4*len(b.buf), maxHead))
	copy(bigger, b.buf[:b.n])
	b.freeBuffer()
	b.buf = bigger
}

func (b *Body) freeBuffer() {
	if b.pooled != nil && b.steps == nil { // else the caller may still hold a piece of it
		buffers.Put(b.pooled)
	}
	if b.bulk != nil && b.steps == nil {
		bulkBuffers.Put(b.bulk)
	}
	b.pooled, b.bulk = nil, nil
	b.buf = nil
}

// waiter is a response body of pdkit's own transport, or one that passes it on: WaitReadable returns when bytes have
// come, or when Read would return at once for another reason.
type waiter interface{ WaitReadable() }

// wait waits for the next part of a stream that is not in a hurry, without a buffer. It returns at once where a reader
// before the engine's bytes has something left.
func (b *Body) wait() {
	if b.waits == nil || b.bulk != nil || b.full || b.n > 0 || b.pooled == nil || b.faults.Holds() {
		return
	}
	b.freeBuffer()
	b.waits.WaitReadable()
	b.pooled = buffers.Get().(*[streamBuffer]byte)
	b.buf = b.pooled[:]
}

// chooseBuffer takes a larger buffer once a read has filled the small one, and gives it back when reads are small
// again: most open streams wait for a token, and a thousand of them should not hold a thousand large buffers.
func (b *Body) chooseBuffer() {
	switch {
	case b.bulk == nil && (b.full || b.buf == nil):
		b.freeBuffer()
		b.bulk = bulkBuffers.Get().(*[bulkBuffer]byte)
		b.buf = b.bulk[:]
		b.smallReads = 0
	case b.bulk != nil && b.smallReads >= 8:
		b.freeBuffer()
		b.pooled = buffers.Get().(*[streamBuffer]byte)
		b.buf = b.pooled[:]
	case b.bulk != nil:
		b.smallReads++
	}
}

// finalBody is a response that no engine streams.
func finalBody(a *attempt, response connector.Response) *Body {
	b := &Body{a: a, x: a.x, status: http.StatusOK, mode: a.mode, resp: http.NoBody, src: http.NoBody, eof: true}
	if a.x.req.Stream && len(response.Events) > 0 {
		b.sse = true
		b.header = http.Header{"Content-Type": {"text/event-stream; charset=utf-8"}, "Cache-Control": noCache,
			"X-Accel-Buffering": noBuffering}
		var buf bytes.Buffer
		for _, event := range response.Events {
			buf.WriteString("data: ")
			buf.Write(event)
			buf.WriteString("\n\n")
		}
		b.buf = buf.Bytes()
	} else {
		b.buf = response.Body
		b.header = http.Header{"Content-Type": jsonType, "Content-Length": {strconv.Itoa(len(response.Body))}}
	}
	b.n = len(b.buf)
	return b
}

// next returns the next piece of the response: all that is there. It is valid until the next call. At the end the error
// is io.EOF; a piece and an error may come together.
func (b *Body) next() ([]byte, error) {
	b.lock()
	defer b.unlock()
	return b.piece()
}

// lock begins a call of the reader's.
func (b *Body) lock() {
	if b.steps != nil {
		b.steps.wait()
	}
	b.mu.Lock()
}

func (b *Body) unlock() {
	b.mu.Unlock()
	if b.steps != nil {
		b.steps.waited()
	}
}

// lockToClose ends a Read that waits for the engine.
func (b *Body) lockToClose(cause error) {
	if !b.mu.TryLock() {
		b.x.stop(cause)
		b.mu.Lock()
	}
}

var errClosedBody = errors.New("pdflow: read of a closed body")

func (b *Body) piece() ([]byte, error) {
	if b.closed {
		return nil, errClosedBody
	}
	if b.err != nil {
		return nil, b.err
	}
	if b.n > 0 {
		head := b.buf[:b.n]
		b.n, b.first = 0, nil
		b.seen(head, b.eof)
		return head, nil
	}
	if b.eof {
		return nil, io.EOF
	}
	b.a.watch.limit(b.a.f.limits.Idle)
	b.wait()
	b.chooseBuffer()
	n, err := b.src.Read(b.buf)
	b.a.watch.relax() // from here on the client may be slow, not the engine
	b.received += int64(n)
	piece := b.buf[:n]
	if b.full = n == len(b.buf); n > streamBuffer {
		b.smallReads = 0
	}
	if cut := b.gaveUp(piece, errors.Is(err, io.EOF)); cut >= 0 {
		b.err = b.failed(CodeStreamBroken, "the decode engine aborted the request")
		return piece[:cut], b.err
	}
	switch {
	case err == nil:
	case errors.Is(err, io.EOF):
		b.eof = true
		b.a.decodeUsage(b.tail.End(piece))
		if b.sse && b.guarded && b.unframed && !b.tail.Done(piece) {
			b.err = b.failed(CodeStreamBroken, "the decode engine closed the connection before [DONE]")
			return piece, b.err
		}
	default:
		e := b.broke(err)
		if n == 0 && b.rescued(e) {
			return b.piece()
		}
		b.err = e
		if errors.Is(err, resume.ErrGaveUp) && b.tokens.Fault() != nil { // as without rescue
			piece = sse.AppendEvent(nil, nil, b.tokens.Fault())
		}
		return piece, b.err
	}
	if n == 0 && b.eof {
		return nil, io.EOF
	}
	return piece, nil
}

// gaveUp returns how much of a piece may go to the client if the engine says in it that it gave up, else -1. A stream
// is searched at its end only; a response that is not streamed comes in few pieces, and is searched in each.
func (b *Body) gaveUp(piece []byte, end bool) int {
	switch {
	case !b.guarded:
		if !end {
			b.tail.Keep(piece)
		}
		return -1
	case b.sse:
		return b.tail.Stream(piece, end)
	}
	return b.tail.Whole(piece, end)
}

// seen keeps the end of the head, which has been searched, for what two reads cut.
func (b *Body) seen(head []byte, end bool) {
	if !end {
		b.tail.Keep(head)
		return
	}
	b.a.decodeUsage(head)
}

// Read reads the response.
func (b *Body) Read(p []byte) (int, error) {
	b.lock()
	defer b.unlock()
	if b.n > 0 || len(b.first) == 0 {
		piece, err := b.piece()
		if len(piece) == 0 {
			return 0, err
		}
		b.first = piece // unread rest of the piece, for Read
	} else if b.closed {
		return 0, errClosedBody
	}
	n := copy(p, b.first)
	b.first = b.first[n:]
	return n, nil
}

// Close ends the request: it cancels whatever leg still runs, waits for it, and records the outcome. A response that
// was not read to its end counts as the client's leaving.
func (b *Body) Close() error {
	if b.steps != nil {
		b.steps.End(nil) // which closes b, and tells a clean-up that nobody sends its calls
		return nil
	}
	b.lockToClose(context.Canceled)
	defer b.mu.Unlock()
	b.close()
	return nil
}

func (b *Body) close() {
	if b.closed {
		return
	}
	b.closed = true
	e := b.err
	if e == nil && !b.eof {
		e = &Error{Code: CodeClientGone, Leg: LegDecode, Phase: "stream", Connector: b.a.f.name,
			Message: "the response was closed before its end"}
		if b.a.ctx.Err() != nil {
			e = b.a.f.ended(b.a.ctx, LegDecode, "stream")
		}
	}
	b.release()
	if !b.a.over { // else a rescue has failed
		b.ended(e)
		b.a.f.tel.streamed(b)
		b.a.end(e)
	}
	b.x.end(e)
	for x := b.outer; x != nil; x = x.inner {
		x.end(e)
	}
}

// relayedResponse is the body of a response that the caller passes on by itself.
func relayedResponse(a *attempt, status int) *Body {
	return &Body{a: a, x: a.x, status: status, mode: a.mode, resp: http.NoBody, src: http.NoBody, relay: true}
}

// hostEnded notes how a response ended that a host has: by being forgotten or, if it was relayed, as err says; nil is
// whole.
func (b *Body) hostEnded(err error) {
	switch {
	case b.err != nil || b.closed:
	case errors.Is(err, errForgotten):
		b.err = b.a.f.ended(b.a.ctx, LegDecode, "stream")
	case !b.relay || b.a.ctx.Err() != nil:
	case !serves(b.status):
		b.err = b.a.refused(LegDecode, &http.Response{StatusCode: b.status}, nil)
	case err == nil:
		b.eof = true
	case !errors.Is(err, context.Canceled):
		b.err = b.failed(CodeStreamBroken, "the response broke on its way past the gateway")
	}
}

// ended records the end of the decode leg.
func (b *Body) ended(e *Error) {
	o := &b.a.out.Decode
	o.ResponseBytes, o.End, o.Err = b.received, time.Now(), e
	b.a.legEnded(o, nil)
}

// discard gives up a response that nobody will see.
func (b *Body) discard(e *Error) {
	b.release()
	b.ended(e)
}

// release gives back connection and buffer.
func (b *Body) release() {
	_ = b.resp.Close()
	b.n, b.first = 0, nil
	b.freeBuffer()
}
