// SPDX-License-Identifier: Apache-2.0

package paced

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim/model"
	"github.com/pdkit/pdkit/pdflow"
)

// Client sends the i-th request of a load and returns its response. The error is [pdflow.CodeOverloaded] if it was
// refused.
type Client func(ctx context.Context, i int, body []byte) (io.ReadCloser, error)

// Calls sends requests by calling a flow. RequestID is the place in the load.
func Calls(flow *pdflow.Flow) Client {
	return func(ctx context.Context, i int, body []byte) (io.ReadCloser, error) {
		resp, err := flow.Do(ctx, &pdflow.Request{API: connector.APICompletions, Body: body,
			RequestID: strconv.Itoa(i)})
		if err != nil {
			return nil, err
		}
		return resp.Body, nil
	}
}

// Posts sends requests over HTTP, to a gateway or an engine.
func Posts(base string, c *http.Client) Client {
	return func(ctx context.Context, _ int, body []byte) (io.ReadCloser, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/completions", bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := c.Do(req)
		if err != nil {
			return nil, err
		}
		switch resp.StatusCode {
		case http.StatusOK:
			return resp.Body, nil
		case http.StatusServiceUnavailable:
			err = pdflow.CodeOverloaded
		default:
			err = errors.New("the answer was " + resp.Status)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		return nil, errors.Join(err, resp.Body.Close())
	}
}

// Offer sends each request when its time has come, whether or not others have their responses, and has read the
// response. seen is told what became of the i-th: when it was sent, and with which error it ended; a client whose
// patience (0: endless) is over leaves. Calls of seen do not overlap, and all have returned when Offer does.
func Offer(
	ctx context.Context, load []Request, patience time.Duration, send Client, read func(i int, from io.Reader) error,
	seen func(i int, sent time.Time, err error),
) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	begun := time.Now()
	for i := range load {
		timer := time.NewTimer(time.Duration(load[i].At*float64(time.Second)) - time.Since(begun))
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			sent := time.Now()
			ctx, leave := ctx, context.CancelFunc(func() {})
			if patience > 0 {
				ctx, leave = context.WithTimeout(ctx, patience)
			}
			defer leave()
			from, err := send(ctx, i, load[i].Body)
			if err == nil {
				err = read(i, from)
				_ = from.Close()
			}
			if ctx.Err() != nil {
				err = ctx.Err()
			}
			mu.Lock()
			defer mu.Unlock()
			seen(i, sent, err)
		})
	}
	wg.Wait()
	return ctx.Err()
}

// Result is what clients saw of a load, in seconds, by request. A request that was refused has no times.
type Result struct {
	TTFT, TPOT []float64
	Refused    int
	Gaps       model.Histogram
}

// Play offers a load and notes when tokens come.
func Play(ctx context.Context, send Client, load []Request) (*Result, error) {
	r := &Result{TTFT: make([]float64, len(load)), TPOT: make([]float64, len(load))}
	tokens := make([][]time.Time, len(load))
	var failed error
	begun := time.Now()
	read := func(i int, from io.Reader) (err error) {
		tokens[i], err = Arrivals(from, nil)
		if err == nil && len(tokens[i]) != load[i].Output {
			err = fmt.Errorf("%d tokens came in place of %d", len(tokens[i]), load[i].Output)
		}
		return err
	}
	err := Offer(ctx, load, 0, send, read, func(i int, _ time.Time, err error) {
		if errors.Is(err, pdflow.CodeOverloaded) {
			r.Refused++
			return
		} else if err != nil {
			failed = err
			return
		}
		came := tokens[i]
		first, last := came[0].Sub(begun).Seconds(), came[len(came)-1].Sub(begun).Seconds()
		r.TTFT[i], r.TPOT[i] = first-load[i].At, (last-first)/float64(max(load[i].Output-1, 1))
		for k := 1; k < len(came); k++ {
			r.Gaps.Add(came[k].Sub(came[k-1]).Seconds(), 1)
		}
	})
	return r, errors.Join(failed, err)
}

// Arrivals are when the tokens of a streamed completion came. An engine that is behind sends several in one event.
// heard is told how many there are, if it is not nil.
func Arrivals(events io.Reader, heard func(tokens int)) (tokens []time.Time, err error) {
	lines := bufio.NewScanner(events)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, _ := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		now := time.Now()
		for range gjson.GetBytes(data, "choices.0.token_ids.#").Int() {
			tokens = append(tokens, now)
			if heard != nil {
				heard(len(tokens))
			}
		}
	}
	return tokens, lines.Err()
}
