// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/intake"
	"github.com/pdkit/pdkit/internal/resume"
	"github.com/pdkit/pdkit/internal/sse"
)

// WithRescue lets a stream outlive its decode engine: when that dies, breaks the connection, gives the request up or
// stays silent for longer than Timeouts.Idle in mid-stream, a new pair goes on with the tokens that the client has, and
// the client's stream goes on, no byte repeated and none missing. A request's stream is rescued at most perRequest
// times. Default, and 0: never.
//
// Only greedy streams of chats and completions with one choice are rescued, and only if the engine tells token ids as
// vLLM does (return_token_ids, which the flow asks for and takes out again); docs/reliability/rescue.md has the whole
// list. What is not rescued ends as it does without this option. Streams of [Flow.Begin] are never rescued, since their
// caller sends the legs and has sent the last one, nor are those with a Pick of the caller's, which get one attempt.
//
// A rescued stream costs a second prefill of its prompt; while a stream runs, the flow holds its token ids, 4 bytes
// for each. When a decode engine dies with many streams, a flow sends each prefill engine at most four of them at a
// time, hedged prefills apart. The others wait, if Timeouts.Prefill and Timeouts.Idle are limits, for no longer than
// both together since the stream broke. Rescues are not counted in Retry.Budget; their retries and hedged prefills are.
func WithRescue(perRequest int) Option {
	return optionFunc(func(o *options) error {
		o.rescues = perRequest
		return needs("WithRescue", perRequest >= 0, "a number that is not negative")
	})
}

// rescue is what an exchange needs to let its stream go on at another pair.
type rescue struct {
	plan   *plan
	reason string         // not "": why the request allows none
	left   int            // rescues
	from   *resume.Stream // not nil: the stream as it was cut, while another pair is tried
	since  time.Time      // when from was cut
	place  *rescuePlace   // of the current attempt
}

// askTokens asks D for the ids of its tokens, if its stream may be rescued.
func (a *attempt) askTokens(leg *connector.Leg) {
	x := a.x
	if a.f.opts.rescues == 0 || x.door.steps != nil || x.given != nil || !x.req.Stream {
		return
	}
	if x.rescue == nil {
		x.rescue = &rescue{left: a.f.opts.rescues}
		x.rescue.plan, x.rescue.reason = planOf(x.req)
	}
	if x.rescue.plan != nil {
		leg.Set("return_token_ids", jsonTrue)
	}
}

// follow puts the reader that keeps the tokens before the client's end of the stream.
func (b *Body) follow() {
	r := b.a.x.rescue
	if r == nil || r.plan == nil || !b.sse || b.status != 200 {
		return
	}
	if r.from == nil {
		b.tokens = resume.New(r.plan.config(b.a))
	} else {
		b.tokens, _ = r.from.Next()
	}
	b.tokens.Deciding = b.deciding()
	b.src = b.tokens.Reader(b.src)
}

// broke is the error of a stream that broke.
func (b *Body) broke(err error) *Error {
	if errors.Is(err, resume.ErrGaveUp) {
		return b.failed(CodeStreamBroken, "the decode engine aborted the request")
	}
	e := b.a.sendError(b.a.ctx, LegDecode, "stream", err)
	if e.Code == CodeDecodeFailed {
		e.Code = CodeStreamBroken
	}
	return e
}

// rescued lets the response go on at another pair after e, and reports whether it does. Its new head is in the buffer
// then.
func (b *Body) rescued(e *Error) bool {
	x := b.a.x
	r := x.rescue
	if r == nil || !e.EngineFault() || x.base.Err() != nil {
		return false
	}
	reason := r.reason
	if b.tokens != nil {
		r.from = b.tokens
		_, reason = r.from.Next()
	}
	switch {
	case reason == "" && b.tokens == nil:
		reason = "no_stream"
	case reason == "" && r.left == 0:
		reason = "too_often"
	}
	if reason != "" {
		b.a.f.tel.rescue(x, "refused", reason)
		return false
	}
	r.left--
	if b.tokens.Over() {
		b.src, b.n = io.MultiReader(), copy(b.buf, "data: "+string(sse.Done)+"\n\n")
		b.eof = true
		b.a.decodeUsage(b.tail.End(nil))
		b.a.f.tel.rescue(x, "rescued", e.Code.Error())
		return true
	}
	next, failure := b.goOn(e)
	if failure != nil {
		b.a.f.tel.rescue(x, "failed", string(failure.Code))
		return false
	}
	b.take(next)
	b.a.f.tel.rescue(x, "rescued", e.Code.Error())
	return true
}

// goOn ends the attempt that failed with e, and asks other pairs to go on.
func (b *Body) goOn(e *Error) (next *Body, failure *Error) {
	old, x := b.a, b.a.x
	defer func() {
		if r := recover(); r != nil { // of a picker, a connector or an observer
			failure = &Error{Code: CodeInternal, Phase: "rescue", Connector: x.f.name, Message: "the gateway failed",
				Err: fmt.Errorf("panic: %v", r)}
			for _, a := range []*attempt{x.beside, x.current.Load()} {
				if a != nil && !a.over {
					a.end(failure)
				}
			}
			x.beside = nil
		}
	}()
	_, done := old.step(x.base, "rescue", "")
	defer func() { done(failure) }()
	b.release()
	b.ended(e)
	old.f.tel.streamed(b)
	old.isFinal = false
	old.end(e)
	x.avoid = append(x.avoid, old.failed(e)...)
	s, _ := x.rescue.from.Next()
	length := 0
	x.renew()
	if x.rescue.plan.limit == 0 {
		if length, failure = old.contextLength(); failure != nil {
			if x.ctx.Err() != nil {
				failure = old.f.ended(x.ctx, LegPrefill, "rescue")
			}
			return nil, failure
		}
	}
	req, err := x.rescue.plan.request(s, length, old.f.opts.telemetry.Usage)
	if err == nil {
		req, err = req.Without(old.f.traits.Members)
	}
	if err != nil {
		return nil, invalid(err)
	}
	x.goOnWith(req)
	x.before, x.rescue.since = old.s.Attempt, time.Now()
	for n := 1; ; n++ {
		next, failure = x.attempt(old.s.Attempt+n, ModeDisaggregated)
		if failure == nil {
			break
		}
		if x.again && x.backoff(n) == nil {
			continue
		}
		if !x.thenDecodesAlone(ModeDisaggregated, failure) {
			return nil, failure
		}
		if next, failure = x.attempt(old.s.Attempt+n+1, ModeFallback); failure != nil {
			return nil, failure
		}
		break
	}
	next.a.out.Resumed = s.Tokens()
	x.phase.Store(phaseStream)
	return next, nil
}

// contextLength asks P how many tokens fit into its context.
func (a *attempt) contextLength() (int, *Error) {
	failure := &Error{Code: CodePrefillFailed, Leg: LegPrefill, Phase: "rescue", Connector: a.f.name,
		Endpoint: a.s.Prefill.ID, Message: "the prefill engine does not tell its context length"}
	if a.s.Prefill.URL == nil {
		return 0, failure
	}
	ctx, stop := context.WithTimeout(a.x.ctx, 2*time.Second)
	defer stop()
	u := a.s.Prefill.URL.JoinPath("/v1/models")
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return 0, failure
	}
	a.x.fillHeader(r.Header, nil)
	resp, err := a.caller(ctx)(r)
	if err != nil {
		return 0, failure
	}
	defer resp.Body.Close()
	body, err := intake.ReadAll(resp.Body, resp.ContentLength, maxErrorBody, nil)
	n := int(gjson.GetBytes(body, "data.0.max_model_len").Int())
	if err != nil || !serves(resp.StatusCode) || n <= 0 {
		return 0, failure
	}
	return n, nil
}

// goOnWith lets further attempts send another request than the client's.
func (x *exchange) goOnWith(req *connector.ClientRequest) {
	x.f.live.mu.Lock()
	defer x.f.live.mu.Unlock()
	x.req = req
}

// take makes b go on with what another body has. What the client has seen of b stays as it is.
func (b *Body) take(next *Body) {
	b.a, b.resp, b.src, b.tokens, b.unframed = next.a, next.resp, next.src, next.tokens, next.unframed
	b.pooled, b.bulk, b.buf, b.n, b.first = next.pooled, next.bulk, next.buf, next.n, nil
	b.waits = next.waits
	b.received, b.eof, b.full, b.smallReads = next.received, next.eof, false, 0
}
