// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"

	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/pdkit/pdkit/pdflow"
)

// running is one request that a flow runs. Only the goroutine of run sends to Envoy.
type running struct {
	s        *Server
	envoy    stream
	r        *http.Request // the client's, without its body
	streamed bool          // the client wants a stream
	bodySeen bool          // Envoy shows the response's body, and so its end, and takes another in its place

	cancel context.CancelFunc
	steps  *pdflow.Steps
	given  *pdflow.Step                       // decode, once Envoy has it
	head   *extproc.HttpHeaders               // of decode's response, once it has come
	rename func([]byte, bool) ([]byte, error) // of pdflow.Response
	legs   sync.WaitGroup                     // those that the server sends
}

// next is what the flow wants: one of the three.
type next struct {
	step *pdflow.Step
	resp *pdflow.Response
	err  error
}

// message is what Envoy says: one of the two.
type message struct {
	m   *extproc.ProcessingRequest
	err error
}

// run runs a request until its response is given, or until Envoy has passed it on.
func (x *running) run(flow *pdflow.Flow, in *pdflow.Request) error {
	// Not the stream's own context: Envoy resets the stream also after a response that went through whole.
	ctx, cancel := context.WithCancel(context.WithoutCancel(x.envoy.Context()))
	defer x.legs.Wait()
	defer cancel()
	x.cancel = cancel
	steps, err := flow.Begin(ctx, in)
	if err != nil {
		return fail(x.envoy, x.r, invalid(err))
	}
	defer steps.End(context.Canceled) // where nothing better is known
	if x.steps = steps; x.streamed && x.bodySeen {
		steps.Renames()
	}
	wanted, inbox := make(chan next), make(chan message)
	go x.pump(ctx, wanted)
	go x.receive(ctx, inbox)
	for {
		select {
		case n := <-wanted:
			switch {
			case n.err != nil:
				return x.fail(n.err)
			case n.step != nil:
				if e, err := x.take(n.step); e != nil {
					steps.End(context.Canceled)
					return x.fail(e)
				} else if err != nil {
					return err
				}
			case n.resp.Body != nil:
				return x.whole(n.resp)
			default:
				x.rename = n.resp.Rename
				if err := x.envoy.Send(respond(x.ownHeader(n.resp), x.rename != nil)); err != nil {
					return err
				}
				return x.follow(ctx, inbox)
			}
		case in := <-inbox:
			if in.err != nil {
				return nil // the client left
			}
			if head := in.m.GetResponseHeaders(); head != nil && x.given != nil {
				x.head = head
				_ = x.given.Relay(statusOf(head)) // it is relayable; now run waits for the flow
			} else if err := x.proceed(in.m); err != nil {
				return err
			}
		}
	}
}

// proceed lets a message through, but no bytes after the client's body: Envoy would add them to decode's leg, behind
// its Content-Length, where the engine reads the next request.
func (x *running) proceed(m *extproc.ProcessingRequest) error {
	if _, more := m.Request.(*extproc.ProcessingRequest_RequestBody); more {
		return errStreamed
	}
	if x.rename == nil {
		return x.envoy.Send(proceed(m))
	}
	switch body := m.GetResponseBody(); {
	case body != nil:
		changed, err := x.rename(body.Body, body.EndOfStream)
		if err != nil {
			x.steps.End(err)
			return errBroken
		}
		return x.envoy.Send(replace(changed))
	case m.GetResponseTrailers() != nil: // nothing can follow them
		if rest, err := x.rename(nil, true); err != nil || len(rest) > 0 {
			x.steps.End(errBroken)
			return errBroken
		}
	}
	return x.envoy.Send(proceed(m))
}

// errBroken has Envoy cut a response whose head has gone to the client.
var errBroken = status.Error(codes.Aborted, "the response cannot be passed on")

// pump gives run what the flow wants.
func (x *running) pump(ctx context.Context, to chan<- next) {
	for {
		var n next
		n.step, n.resp, n.err = x.steps.Next(ctx)
		select {
		case to <- n:
		case <-ctx.Done():
		}
		if n.step == nil {
			return
		}
	}
}

// receive gives run what Envoy says. It ends with the gRPC stream.
func (x *running) receive(ctx context.Context, to chan<- message) {
	for {
		m, err := x.envoy.Recv()
		select {
		case to <- message{m, err}:
		case <-ctx.Done():
		}
		if err != nil {
			return
		}
	}
}

// take sends a step, or gives it to Envoy. An *pdflow.Error is one for the client.
func (x *running) take(step *pdflow.Step) (*pdflow.Error, error) {
	switch {
	case x.given != nil && x.given.Context().Err() != nil:
		return errLate, nil
	case step.Leg == pdflow.LegDecode && step.Relayable():
		req, err := step.Take()
		if err != nil {
			return nil, nil //nolint:nilerr,nilnil // too late: the flow says what follows
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		x.given = step
		return nil, x.envoy.Send(decodeLeg(x.r.Header, step, body))
	case step.Leg == pdflow.LegDecode && x.streamed:
		if x.steps.Renames(); step.Relayable() { // it is the model's name alone
			return errNamed, nil
		}
		return errStream, nil
	}
	x.legs.Go(func() {
		if req, err := step.Take(); err != nil {
			step.Done(nil, err)
		} else {
			step.Done(x.s.send.RoundTrip(req)) //nolint:bodyclose // the flow closes it
		}
	})
	return nil, nil
}

var (
	// errLate: prefill failed and the flow has begun to try another pair, but Envoy cannot be given a second decode
	// leg.
	errLate = &pdflow.Error{Code: pdflow.CodePrefillFailed, Leg: pdflow.LegPrefill, Phase: "response",
		Message: "the prefill engine failed while decode was waiting for it"}
	// errStream: the flow must read decode's response, and Envoy takes a response of the server's only whole.
	errStream = &pdflow.Error{Code: pdflow.CodeUnsupported, Param: "stream",
		Message: "this connector's response cannot be streamed here; send the request without it"}
	// errNamed: Envoy does not show the response, in which the model's name is to be changed.
	errNamed = &pdflow.Error{Code: pdflow.CodeUnsupported, Param: "stream",
		Message: "a response by this model name cannot be streamed here, since processing_mode.response_body_mode is " +
			"not STREAMED; send the request without it"}
)

// follow waits until Envoy has passed the response on.
func (x *running) follow(ctx context.Context, inbox <-chan message) error {
	keep := time.NewTicker(time.Minute)
	defer keep.Stop()
	whole := !x.bodySeen || x.head.EndOfStream
	for {
		select {
		case in := <-inbox:
			switch {
			case in.err != nil && whole:
				x.steps.End(nil)
				return nil
			case in.err != nil:
				return nil // the client left, or decode broke: Envoy does not say which
			}
			body := in.m.GetResponseBody()
			last := body.GetEndOfStream() || in.m.GetResponseTrailers() != nil
			if body != nil || last {
				if err := x.given.Passed(body.GetBody(), last); err != nil {
					return x.fail(err) // of a response that has begun: Envoy cuts it
				}
			}
			whole = whole || last
			if err := x.proceed(in.m); err != nil {
				return err
			}
		case <-keep.C:
			_, _, _ = x.steps.Next(ctx) // a long stream is not a forgotten one
		}
	}
}

// whole gives Envoy a response that the flow has read: P's own, or one that the connector has changed.
func (x *running) whole(resp *pdflow.Response) error {
	defer context.AfterFunc(x.envoy.Context(), x.cancel)() // the client may leave
	w := newRecorder()
	maps.Copy(w.header, resp.Header)
	maps.Copy(w.header, x.ownHeader(resp))
	w.status = resp.Status
	n, err := io.Copy(&w.body, io.LimitReader(resp.Body, x.s.maxBody+1))
	if err == nil && n > x.s.maxBody {
		err = &pdflow.Error{Code: pdflow.CodeDecodeFailed, Leg: pdflow.LegDecode, Phase: "response",
			Message: "the decode engine's response is too large"}
	}
	if err != nil {
		return x.fail(err)
	}
	if err := x.envoy.Send(w.immediate("final")); err != nil {
		return err
	}
	x.steps.End(nil)
	return nil
}

// ownHeader is what pdflow's handler adds to each response.
func (x *running) ownHeader(resp *pdflow.Response) http.Header {
	return http.Header{"X-Request-Id": {resp.RequestID}, "X-Pd-Mode": {string(resp.Mode)}}
}

// fail gives Envoy the flow's error. Envoy then ends what it has sent of the decode leg.
func (x *running) fail(err error) error {
	if errors.Is(err, pdflow.CodeClientGone) {
		return nil
	}
	w := newRecorder()
	x.steps.WriteError(w, x.r, err)
	code := pdflow.CodeInternal
	if e, ok := errors.AsType[*pdflow.Error](err); ok {
		code = e.Code
	}
	return x.envoy.Send(w.immediate(code))
}

func statusOf(head *extproc.HttpHeaders) int {
	for _, h := range head.GetHeaders().GetHeaders() {
		if h.Key == ":status" {
			n, _ := strconv.Atoi(valueOf(h))
			return n
		}
	}
	return 0
}
