// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/http"
	"time"
)

// Retries are made here, and not by go-retryablehttp, which the design names: of what that adds to a loop nothing fits
// a leg, and all of it has to be switched off. It repeats what may have been sent, and statuses; it follows redirects
// by its http.Client, with the prompt; it closes the idle connections of all requests when it gives up; it waits as
// long as an engine's Retry-After says; and its errors hold URLs (docs/go-facts.md).

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
	rt     http.RoundTripper
	policy RetryPolicy
}

// NewRetrier returns a Retrier over rt, usually a [*Transport] or an instrumented round tripper over one. rt gets each
// try as a request of its own. The Retrier never closes rt's idle connections.
func NewRetrier(rt http.RoundTripper, policy RetryPolicy) *Retrier {
	policy.Max = max(cmp.Or(policy.Max, defaultRetryMax), 0)
	policy.BackoffBase = max(cmp.Or(policy.BackoffBase, defaultBackoffBase), 0)
	policy.BackoffMax = max(cmp.Or(policy.BackoffMax, defaultBackoffMax), 0)
	return &Retrier{rt: rt, policy: policy}
}

// Do sends req under ctx (req's own context is not used). Further tries read their body from req.GetBody, which is
// called before the wait, and send req.ContentLength bytes of it; a request with a body but without GetBody is tried
// once. Bodies are not copied. The wait between tries ends with ctx, and a wait that would pass ctx's deadline is not
// begun. Errors are of type [*Error].
func (r *Retrier) Do(ctx context.Context, req *http.Request) (*http.Response, error) {
	for n := 0; ; n++ {
		resp, err := Send(ctx, r.rt, req)
		if err == nil {
			return resp, nil
		}
		last := asError(ctx, err)
		if n == r.policy.Max || !repeatable(ctx, last) || hasBody(req) && req.GetBody == nil {
			return nil, last
		}
		again := *req
		if hasBody(req) { // before the wait, so that the caller knows that nothing is on its way meanwhile
			if again.Body, err = req.GetBody(); err != nil {
				return nil, last
			}
		}
		if !r.policy.pause(ctx, n) {
			closeBody(&again)
			return nil, last
		}
		if ctx.Err() != nil {
			closeBody(&again)
			cause := context.Cause(ctx)
			return nil, &Error{Sent: SentNothing, Kind: requestKind(ctx, cause), Err: cause}
		}
		req = &again
	}
}

func repeatable(ctx context.Context, err *Error) bool {
	return err.Sent == SentNothing && !err.final && ctx.Err() == nil
}

func hasBody(req *http.Request) bool { return req.Body != nil && req.Body != http.NoBody }

// pause waits before extra try n, or until ctx ends. It returns false at once if the wait would pass ctx's deadline.
func (p RetryPolicy) pause(ctx context.Context, n int) bool {
	d := p.wait(n)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return true
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
