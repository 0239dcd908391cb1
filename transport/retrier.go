// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/hashicorp/go-retryablehttp"
)

// Defaults of [RetryPolicy].
const (
	DefaultRetryMax    = 1
	DefaultBackoffBase = 50 * time.Millisecond
	DefaultBackoffMax  = 2 * time.Second
)

// RetryPolicy bounds the extra tries of a [Retrier]. The zero value means the
// defaults.
type RetryPolicy struct {
	// Max is the number of extra tries on the same engine. 0 means
	// DefaultRetryMax, a negative value none.
	Max int
	// BackoffBase and BackoffMax bound the wait before extra try n, counted
	// from 0: a random time up to BackoffBase * 2^n, and never more than
	// BackoffMax. 0 means the default, a negative value no wait.
	BackoffBase, BackoffMax time.Duration
}

// Retrier sends requests, and sends again those of which provably nothing left
// (NotSent). An answer of any status is handed back as it came; Retry-After is
// the caller's to judge. A request that may have been sent is never repeated.
// It is safe for concurrent use.
type Retrier struct {
	rt     http.RoundTripper
	policy RetryPolicy
}

// NewRetrier returns a Retrier over rt, usually a [*Transport] or an
// instrumented round tripper over one. rt sees each try as a request of its
// own. Its idle connections are never closed by the Retrier.
func NewRetrier(rt http.RoundTripper, policy RetryPolicy) *Retrier {
	policy.Max = max(orDefault(policy.Max, DefaultRetryMax), 0)
	policy.BackoffBase = max(orDefault(policy.BackoffBase, DefaultBackoffBase), 0)
	policy.BackoffMax = max(orDefault(policy.BackoffMax, DefaultBackoffMax), 0)
	return &Retrier{rt: rt, policy: policy}
}

// Do sends req under ctx (req's own context is not used). Further tries read
// their body from req.GetBody and send req.ContentLength bytes of it; a request
// with a body but without GetBody is tried once. Bodies are not copied. The
// wait between tries ends with ctx, and a wait that would pass ctx's deadline
// is not begun. Errors are of type [*Error].
//
// The first try goes straight to the round tripper, and go-retryablehttp takes
// over, with the same body and header, after it has failed. Going through it
// from the start would cost each request 9 allocations, 400 bytes and less than
// a microsecond (BenchmarkRetrier), and an HTTP client's handling of answers.
func (r *Retrier) Do(ctx context.Context, req *http.Request) (*http.Response, error) {
	resp, err := r.try(ctx, req)
	if err == nil {
		return resp, nil
	}
	failed := asError(ctx, err)
	if r.policy.Max == 0 || !repeatable(ctx, failed) || !rewindable(req) {
		return nil, failed
	}
	return r.again(ctx, req, failed)
}

func (r *Retrier) try(ctx context.Context, req *http.Request) (*http.Response, error) {
	return Send(ctx, r.rt, req)
}

func repeatable(ctx context.Context, err *Error) bool {
	return err.Sent == NotSent && !err.final && ctx.Err() == nil
}

func rewindable(req *http.Request) bool {
	return !hasBody(req) || req.GetBody != nil
}

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }

// again runs the further tries on go-retryablehttp (v0.7.8), with the settings
// that make it fit: no logger (it would print URLs), errors passed through, no
// retry of answers, its own HTTP client reduced to this package's sequence.
func (r *Retrier) again(ctx context.Context, req *http.Request, first *Error) (*http.Response, error) {
	s := &sequence{retrier: r, ctx: ctx, req: req, last: first, replay: true}
	client := &retryablehttp.Client{
		HTTPClient:   &http.Client{Transport: s},
		Logger:       nil,
		RetryMax:     r.policy.Max,
		CheckRetry:   s.check,
		Backoff:      s.backoff,
		ErrorHandler: retryablehttp.PassthroughErrorHandler,
	}
	// The clone's fields are set by the library; header and URL stay shared.
	request := &retryablehttp.Request{Request: req.WithContext(ctx)}
	if hasBody(req) {
		// A function as body is called anew for each try. Other readers would
		// be read into memory whole.
		if err := request.SetBody(retryablehttp.ReaderFunc(s.rewind)); err != nil {
			return nil, &Error{Sent: NotSent, Kind: Other, Err: err, final: true}
		}
	}
	_, err := client.Do(request)
	if s.resp != nil {
		return s.resp, nil
	}
	if ctx.Err() != nil && s.last.Sent == NotSent {
		cause := context.Cause(ctx)
		return nil, &Error{Sent: NotSent, Kind: requestKind(ctx, cause), Err: cause}
	}
	if failed, ok := errors.AsType[*Error](err); ok {
		return nil, failed
	}
	return nil, s.last
}

// sequence is one request's further tries. It stands between go-retryablehttp's
// HTTP client and the round tripper, and has no CloseIdleConnections: after a
// failure the library calls it, which would drop the pool that all requests
// share.
type sequence struct {
	retrier *Retrier
	ctx     context.Context
	req     *http.Request
	last    *Error
	wait    time.Duration
	tries   int
	replay  bool // the first try was made before the library was asked
	resp    *http.Response
}

// RoundTrip reports the first try's failure without sending, then sends. The
// HTTP client is shown only that an answer came: it would follow redirects,
// fail on a malformed Location and turn a URL's user into a header, none of
// which the first try does.
func (s *sequence) RoundTrip(req *http.Request) (*http.Response, error) {
	if s.replay {
		s.replay = false
		closeBody(req)
		return nil, s.last
	}
	// SetBody takes the length from a Len method and leaves 0 without one, for
	// which the body would be read into memory or sent chunked; the caller's
	// request knows better.
	out := *s.req
	out.Body = req.Body
	resp, err := s.retrier.try(s.ctx, &out)
	if err != nil {
		s.last = asError(s.ctx, err)
		return nil, s.last
	}
	s.resp = resp
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: req}, nil
}

func (s *sequence) rewind() (io.Reader, error) { return s.req.GetBody() }

// check decides on the wait too, since a wait beyond the deadline is a reason
// to stop.
func (s *sequence) check(ctx context.Context, resp *http.Response, err error) (bool, error) {
	if err == nil || resp != nil || !repeatable(ctx, s.last) {
		return false, nil
	}
	s.wait = s.retrier.policy.wait(s.tries)
	s.tries++
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= s.wait {
		return false, nil
	}
	return true, nil
}

func (s *sequence) backoff(_, _ time.Duration, _ int, _ *http.Response) time.Duration { return s.wait }

// wait returns a random time before extra try n, so that requests which failed
// together do not come back together.
func (p RetryPolicy) wait(n int) time.Duration {
	limit := p.BackoffBase
	for range n {
		if limit >= p.BackoffMax/2 {
			limit = p.BackoffMax
			break
		}
		limit *= 2
	}
	limit = min(limit, p.BackoffMax)
	if limit <= 0 {
		return 0
	}
	return rand.N(limit + 1) //nolint:gosec // jitter, guards nothing
}
