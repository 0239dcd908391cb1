// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
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
	"github.com/pdkit/pdkit/internal/contract"
	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
	"github.com/pdkit/pdkit/internal/verdict"
	"github.com/pdkit/pdkit/pdflow/internal/stream"
)

// Body is a response on its way. One goroutine reads it. Close may be called by any, also while a Read waits, and more
// than once.
type Body struct {
	mu       sync.Mutex     // held by what reads and by what closes
	a        *attempt       // the last, of a stream that was rescued
	x        *serving       // a's
	outer    *serving       // what the client asked, if it fell back; inner leads from it towards x
	s        *stream.Stream // a's response; nil if the caller passes it on by itself
	response stream.Stream  // what s is until a stream is rescued

	status int
	header http.Header
	sse    bool

	rest   []byte // of a piece, which Read has not taken yet
	err    *Error
	whole  bool // the caller has passed on all of it
	closed bool
	steps  *Steps // not nil: the caller sends the legs
}

func newBody(a *attempt, resp *http.Response) *Body {
	b := &Body{a: a, x: a.x, status: resp.StatusCode}
	b.sse = strings.HasPrefix(strings.ToLower(resp.Header.Get("Content-Type")), "text/event-stream")
	b.s = &b.response
	b.s.Config = a.reading(b)
	b.header = responseHeader(resp, b.sse, b.s.Rewrite != nil, a.x.sender.own)
	if b.s.Length = resp.ContentLength; b.header["Content-Length"] == nil {
		b.s.Length = -1
	}
	b.s.Open(resp)
	return b
}

// reading says how decode's response is read.
func (a *attempt) reading(b *Body) stream.Config {
	api := a.s.API
	c := stream.Config{Events: b.sse, Guarded: contract.API(api).Guarded, FailureStop: a.failureStop(),
		Deciding: a.deciding(),
		Shared:   a.x.sender.steps != nil, Withheld: a.f.withheld, Owner: (*bodyOwner)(b)}
	if !a.inBackground() {
		c.Endings = contract.API(api).Endings
	}
	c.Rewrite, c.Mark = a.changes(b.sse, b.status)
	c.Foreign = a.foreign(&c, b.status)
	if c.Withheld != nil {
		c.Depth = c.Withheld.Depth
		if b.sse && api == connector.APIResponses {
			c.Depth++ // a stream's last event has the response
		}
	}
	if b.sse && b.status == http.StatusOK {
		c.Resume = a.x.rescue.follow(a)
	}
	return c
}

// failureStop is the stop_reason with which decode gives up, "" if it is the end that the client asked for.
func (a *attempt) failureStop() string {
	if stop := a.f.traits.Ending.FailureStop; stop != "" && !contract.Request(a.s.Request).StopsAt(stop) {
		return stop
	}
	return ""
}

// inBackground reports whether the client may cancel the response by itself, which is no failure then.
func (a *attempt) inBackground() bool {
	if a.s.API != connector.APIResponses {
		return false
	}
	value, _ := a.s.Request.Field("background")
	return string(value) == "true"
}

// deciding reports whether decode's response decides if a prefill is needed.
func (a *attempt) deciding() bool { return a.f.order == connector.DecodeFirst && a.p.Load() == nil }

// bodyOwner is what a Body is for its stream.
type bodyOwner Body

// Fault returns an error event as it would be without a stream. That of the Responses API is the response itself, and
// stays so.
func (o *bodyOwner) Fault(data []byte) []byte {
	b := (*Body)(o)
	if failed := verdict.Failed(data, b.a.private()); failed != nil {
		return failed
	}
	return errorObject(b.a.s.API, b.erroneous(data))
}

// Usage notes what the response's end says, whichever attempt it is of.
func (o *bodyOwner) Usage(end []byte) { o.a.decodeUsage(end) }

// readHead reads until it is known that the client may be served with the response.
func (b *Body) readHead(ctx context.Context) *Error {
	err := b.s.Head()
	if err == nil {
		return nil
	}
	if f, ok := errors.AsType[*stream.Failure](err); !ok {
		return b.a.sendError(ctx, &b.a.out.Decode, "response", err)
	} else if f.Event != nil {
		return b.a.doubt(b.erroneous(f.Event))
	} else if f.Foreign {
		return b.a.cannotCarry(errForeign)
	}
	return b.failed(CodeDecodeFailed, err.Error())
}

// erroneous is an error event, as it would be without a stream.
func (b *Body) erroneous(data []byte) *Error {
	o := b.a.out.Decode
	o.Status = verdict.StatusOf(data)
	e := b.a.refused(&o, nil, data)
	if e.Code == CodeDecodeFailed {
		e.Message = "the decode engine reported an error instead of a response"
	}
	return e
}

func (b *Body) failed(code Code, message string) *Error {
	return &Error{Code: code, Leg: LegDecode, Phase: "response", Connector: b.a.f.name, Endpoint: b.a.s.Decode.ID,
		Status: b.status, Message: message}
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

// finalBody is a response that no engine streams.
func finalBody(a *attempt, response connector.Response) *Body {
	b := &Body{a: a, x: a.x, status: http.StatusOK, sse: a.s.Request.Stream && len(response.Events) > 0}
	body := response.Body
	if b.sse {
		b.header = http.Header{"Content-Type": {"text/event-stream; charset=utf-8"}, "Cache-Control": noCache,
			"X-Accel-Buffering": noBuffering}
		body = nil
		for _, event := range response.Events {
			body = sse.AppendEvent(body, nil, event)
		}
	} else {
		b.header = http.Header{"Content-Type": jsonType, "Content-Length": {strconv.Itoa(len(body))}}
	}
	b.s = stream.Of(body, b.sse, (*bodyOwner)(b))
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
		b.x.Stop(cause)
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
	if b.s == nil {
		return nil, io.EOF
	}
	b.a.silent.Stream()
	b.a.watch.Limit(b.a.f.limits.Idle)
	piece, err := b.s.Next()
	b.a.watch.Relax() // from here on the client may be slow, not the engine
	if err == nil || err == io.EOF {
		return piece, err
	}
	return b.breaks(piece, err)
}

// breaks is piece where the engine has broken the response, or has said in it that it gave up.
func (b *Body) breaks(piece []byte, err error) ([]byte, error) {
	e := b.broke(err)
	_, judged := errors.AsType[*stream.Failure](err) // of a stream that cannot be rescued
	if !judged && len(piece) == 0 && b.x.rescue.takeOver(b, e) {
		return b.piece()
	}
	b.err = e
	if errors.Is(err, resume.ErrGaveUp) && b.s.Resume.Fault() != nil { // as without rescue
		piece = sse.AppendEvent(nil, nil, b.s.Resume.Fault())
	}
	return piece, b.err
}

// broke is the error of a stream that broke.
func (b *Body) broke(err error) *Error {
	if f, judged := errors.AsType[*stream.Failure](err); judged {
		if f.Foreign {
			b.a.f.foreignSeen.Store(true)
		}
		return b.failed(CodeStreamBroken, err.Error())
	}
	if errors.Is(err, resume.ErrGaveUp) {
		return b.failed(CodeStreamBroken, errGaveUp)
	}
	e := b.a.sendError(b.a.ctx, &b.a.out.Decode, "stream", err)
	if e.Code == CodeDecodeFailed {
		e.Code = CodeStreamBroken
	}
	return e
}

// Read reads the response.
func (b *Body) Read(p []byte) (int, error) {
	b.lock()
	defer b.unlock()
	switch {
	case b.closed:
		return 0, errClosedBody
	case len(b.rest) == 0:
		piece, err := b.piece()
		if len(piece) == 0 {
			return 0, err
		}
		b.rest = piece
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
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
	if e == nil && !b.ended() {
		e = &Error{Code: CodeClientGone, Leg: LegDecode, Phase: "stream", Connector: b.a.f.name,
			Message: "the response was closed before its end"}
		if b.a.ctx.Err() != nil {
			e = b.a.f.whyEnded(b.a.ctx, LegDecode, "stream")
		}
	}
	b.drop()
	if !b.a.ended { // else a rescue has failed
		b.legEnds(e)
		b.recordStream()
		b.a.end(e)
	}
	b.x.end(e)
	for x := b.outer; x != nil; x = x.inner {
		x.end(e)
	}
}

// relayedResponse is the body of a response that the caller passes on by itself.
func relayedResponse(a *attempt, status int) *Body {
	return &Body{a: a, x: a.x, status: status}
}

// hostEnded notes how a response ended that a host has: by being forgotten or, if it was relayed, by the engine's
// giving up, or as err says; nil is whole.
func (b *Body) hostEnded(err error, gaveUp bool) {
	switch {
	case b.err != nil || b.closed:
	case gaveUp:
		b.err = b.failed(CodeStreamBroken, errGaveUp)
	case errors.Is(err, errForgotten):
		b.err = b.a.f.whyEnded(b.a.ctx, LegDecode, "stream")
	case b.s != nil || b.a.ctx.Err() != nil:
	case !serves(b.status):
		b.err = b.a.refused(&b.a.out.Decode, nil, nil)
	case err == nil:
		b.whole = true
	case !errors.Is(err, context.Canceled):
		b.err = b.failed(CodeStreamBroken, "the response broke on its way past the gateway")
	}
}

// ended reports whether the response has come to its end.
func (b *Body) ended() bool { return b.whole || b.s != nil && b.s.Ended() }

// legEnds records the end of the decode leg.
func (b *Body) legEnds(e *Error) {
	o := &b.a.out.Decode
	if o.End, o.Err = time.Now(), e; b.s != nil {
		o.ResponseBytes = b.s.Received()
	}
	b.a.legEnded(o, nil)
}

// discard gives up a response that nobody will see.
func (b *Body) discard(e *Error) {
	b.drop()
	b.legEnds(e)
}

// drop gives back connection and buffer.
func (b *Body) drop() {
	if b.rest = nil; b.s != nil {
		b.s.Close()
	}
}
