// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// maxBody is how much of a response is read so that its connection can be used again. A longer one closes it.
const maxBody = 4 << 10

// newRequest makes an endpoint's probe once; each probe takes a shallow copy.
func newRequest(base *url.URL, path string) *http.Request {
	u := *base
	u.Path += path
	u.RawPath = ""
	return &http.Request{
		Method: http.MethodGet, URL: &u, Host: u.Host,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{"User-Agent": {"pdkit-health"}},
	}
}

// probe asks t once and passes its verdict on. A probe that the end of the run cut short says nothing.
func (r *run) probe(t *target, buf []byte) {
	err := r.get(t, buf)
	if r.ctx.Err() != nil || t.gone.Load() {
		return
	}
	if err != nil {
		t.successes = 0
		t.failures++
		if t.failures >= r.o.Failures {
			t.down = true
			r.set.SetHealthy(t.id, false)
		}
		r.observe(t, err)
		return
	}
	t.failures = 0
	t.successes++
	if t.successes >= r.o.Successes {
		// Also when t was not down: the set may hold the verdict of an earlier run or of the URL before this one.
		r.set.SetHealthy(t.id, true)
		if t.down {
			t.down = false
			r.observe(t, nil)
		}
	}
}

func (r *run) observe(t *target, err error) {
	if r.o.Observe != nil {
		r.o.Observe(t.id, !t.down, err)
	}
}

// get returns nil for a response of status 200 to 299.
func (r *run) get(t *target, buf []byte) error {
	ctx, cancel := context.WithTimeout(r.ctx, r.o.Timeout)
	defer cancel()
	resp, err := r.o.Client.RoundTrip(t.request.WithContext(ctx))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for read := 0; read <= maxBody; {
		n, err := resp.Body.Read(buf)
		read += n
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("reading the response: %w", err)
		}
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("GET %s: status %d", t.request.URL.Path, resp.StatusCode)
	}
	return nil
}
