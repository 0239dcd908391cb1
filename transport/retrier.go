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

// The defaults of RetryPolicy.
const (
	defaultRetryMax    = 1
	defaultBackoffBase = 50 * time.Millisecond
	defaultBackoffMax  = 2 * time.Second
)

// RetryPolicy bounds the extra tries of a [Retrier]. The zero value means the defaults.
type RetryPolicy struct {
	// Max is the number of extra tries on the same engine. 0 means 1, a negative value none.
	Max int
	// BackoffBase and BackoffMax bound the wait before extra try n, counted from 0: a random time up to BackoffBase *
	// 2^n, and never more than BackoffMax. 0 means 50 ms and 2 s, a negative value no wait.
	BackoffBase, BackoffMax time.Duration
}

// Retrier sends requests, and sends a request again if provably no byte of it left (SentNothing). It returns a response
// of any status as it is; whether to heed Retry-After is up to the caller. It never repeats a request that may have
// been sent. It is safe for concurrent use.
type Retrier struct {
	rt      http.RoundTripper
	policy  RetryPolicy
	further *retryablehttp.Client
}

// NewRetrier returns a Retrier over rt, usually a [*Transport] or an instrumented round tripper over one. rt gets each
// try as a request of its own. The Retrier never closes rt's idle connections.
func NewRetrier(rt http.RoundTripper, policy RetryPolicy) *Retrier {
	policy.Max = max(orDefault(policy.Max, defaultRetryMax), 0)
	policy.BackoffBase = max(orDefault(policy.BackoffBase, defaultBackoffBase), 0)
	policy.BackoffMax = max(orDefault(policy.BackoffMax, defaultBackoffMax), 0)
	r := &Retrier{rt: rt, policy: policy}
	r.further = &retryablehttp.Client{ // without a logger, which would print URLs
		HTTPClient: &http.Client{Transport: furtherTries{r}},
		RetryMax:   policy.Max - 1,
		CheckRetry: func(ctx context.Context, _ *http.Response, _ error) (bool, error) {
			s, ok := ctx.(*sequence)
			return ok && s.resp == nil && !s.over && repeatable(s.Context, s.last), nil
		},
		Backoff:      func(_, _ time.Duration, _ int, _ *http.Response) time.Duration { return 0 }, // furtherTries wait
		ErrorHandler: retryablehttp.PassthroughErrorHandler,
	}
	return r
}

// Do sends req under ctx (req's own context is not used). Further tries read their body from req.GetBody and send
// req.ContentLength bytes of it; a request with a body but without GetBody is tried once. Bodies are not copied. The
// wait between tries ends with ctx, and a wait that would pass ctx's deadline is not begun. Errors are of type
// [*Error].
//
// The first try goes straight to the round tripper, and go-retryablehttp makes the further ones. Going through it from
// the start would cost each request 9 allocations, 400 bytes and less than a microsecond (BenchmarkRetrier).
func (r *Retrier) Do(ctx context.Context, req *http.Request) (*http.Response, error) {
	resp, err := Send(ctx, r.rt, req)
	if err == nil {
		return resp, nil
	}
	s := &sequence{Context: ctx, req: req, last: asError(ctx, err)}
	if r.policy.Max == 0 || !repeatable(ctx, s.last) || hasBody(req) && req.GetBody == nil {
		return nil, s.last
	}
	request := &retryablehttp.Request{Request: req.WithContext(s)}
	if hasBody(req) {
		// With a function as body, retryablehttp calls it for each try. It would read other readers into memory whole.
		// It is not called here.
		_ = request.SetBody(retryablehttp.ReaderFunc(func() (io.Reader, error) { return req.GetBody() }))
	}
	_, _ = r.further.Do(request) // its error is an *url.Error, which has the URL in its text
	switch {
	case s.resp != nil:
		return s.resp, nil
	case ctx.Err() != nil && s.last.Sent == SentNothing:
		cause := context.Cause(ctx)
		return nil, &Error{Sent: SentNothing, Kind: requestKind(ctx, cause), Err: cause}
	}
	return nil, s.last
}

func repeatable(ctx context.Context, err *Error) bool {
	return err.Sent == SentNothing && !err.final && ctx.Err() == nil
}

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }

// sequence is the context of one request's further tries.
type sequence struct {
	context.Context
	req   *http.Request
	tries int
	last  *Error
	over  bool // the next wait would pass the deadline
	resp  *http.Response
}

// furtherTries is the round tripper of go-retryablehttp's client. It must not have CloseIdleConnections: the library
// calls that after a failure, and it would empty the pool that all requests share.
type furtherTries struct{ r *Retrier }

// RoundTrip waits, then sends. It shows the HTTP client above it only that a response came. Otherwise that client would
// follow redirects, fail on a malformed Location and turn a URL's user into a header, none of which the first try does.
func (f furtherTries) RoundTrip(req *http.Request) (*http.Response, error) {
	s, ok := req.Context().(*sequence)
	if !ok || !s.wait(f.r.policy) {
		closeBody(req)
		return nil, errNotTried
	}
	// The caller's request knows its body's length.
	out := *s.req
	out.Body = req.Body
	resp, err := Send(s.Context, f.r.rt, &out)
	if err != nil {
		s.last = asError(s.Context, err)
		return nil, s.last
	}
	s.resp = resp
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: req}, nil
}

var errNotTried = errors.New("transport: not tried again")

// wait waits before the next try, and reports whether to make that try.
func (s *sequence) wait(p RetryPolicy) bool {
	d := p.wait(s.tries)
	s.tries++
	if deadline, ok := s.Deadline(); ok && time.Until(deadline) <= d {
		s.over = true
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.Done():
		return false
	}
}

// wait returns a random time before extra try n, so that requests that failed together are not sent again together.
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
