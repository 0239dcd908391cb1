// SPDX-License-Identifier: Apache-2.0

package pdflow_test

// Requests whose legs the program sends: Flow.Begin, Steps and Step.

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// The flow says which leg to send, where and when; the program sends it.
func ExampleFlow_Begin() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())
	legs := &http.Transport{DisableCompression: true}
	defer legs.CloseIdleConnections()

	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 32<<20))
		if err != nil {
			http.Error(w, "the body is refused", http.StatusBadRequest)
			return
		}
		in := &pdflow.Request{API: connector.APIOf(r.URL.Path), Header: r.Header, Body: body}
		steps, err := flow.Begin(r.Context(), in)
		if e, ok := errors.AsType[*pdflow.Error](err); ok {
			e.Send(w, r)
			return
		}
		defer steps.End(nil) // whatever happens: it cancels the legs that run, and records the outcome
		for {
			step, resp, err := steps.Next(r.Context())
			if err != nil {
				steps.WriteError(w, r, err)
				return
			}
			if resp != nil {
				_ = resp.Send(w, r) // after an error the client's connection is cut
				return
			}
			go step.Send(legs) // an http.RoundTripper; in a goroutine of its own: legs may run together
		}
	})
	fmt.Println(examplePost(handler, `{"prompt":`+prompt+`}`))
	fmt.Println(examplePost(handler, `{"prompt":7`))
	// Output:
	// 200 disaggregated
	// 400
}

// byHand sends a leg with an http.Client, which wants a whole request.
func byHand(client *http.Client, step *pdflow.Step) {
	req, err := step.Take() // takes the step: it can be sent once, and decode only within its handoff's lease
	if err != nil {
		step.Done(nil, err)
		return
	}
	step.Done(client.Do(req)) // the flow reads the response's body, and closes it
}

// A host that has no RoundTripper takes a step as a request, or reads its bytes, and tells by Done what came of
// it.
func ExampleSteps() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer client.CloseIdleConnections()

	ctx := context.Background()
	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` + prompt + `}`)}
	steps, err := flow.Begin(ctx, in)
	if err != nil {
		log.Fatal(err)
	}
	defer steps.End(nil)
	for {
		step, resp, err := steps.Next(ctx)
		if err != nil {
			log.Fatal(err)
		}
		if resp != nil {
			fmt.Println(resp.Status, resp.Mode)
			_, _ = io.Copy(io.Discard, resp.Body) // to its end: otherwise the outcome is a client that left
			break
		}
		fmt.Println(step.Leg, step.Method, step.URL.Path, "may be sent late:", step.Expires.IsZero())
		go byHand(client, step)
	}
	// Output:
	// prefill POST /v1/completions may be sent late: true
	// decode POST /v1/completions may be sent late: false
	// 200 disaggregated
}

// A program whose responses go another way, as through an Envoy, passes decode's on by itself: Relay in place of Done.
func ExampleStep_Relay() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())
	legs := &http.Transport{DisableCompression: true}
	defer legs.CloseIdleConnections()

	ctx := context.Background()
	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` + prompt + `}`)}
	steps, err := flow.Begin(ctx, in)
	if err != nil {
		log.Fatal(err)
	}
	first, _, err := steps.Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	go first.Send(legs)
	second, _, err := steps.Next(ctx)
	if err != nil {
		log.Fatal(err)
	}
	req, err := second.Take()
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(req.Body)
	fmt.Println(second.Leg, "has its handoff:", strings.Contains(string(body), "remote_block_ids"), err)

	// Here the program sends the body to second.URL. Once the engine has answered with a status:
	fmt.Println(second.Relay(http.StatusOK))
	_, resp, err := steps.Next(ctx)
	fmt.Println(resp.Mode, "without a body:", resp.Body == nil, err)
	steps.End(nil) // at the end of the response, with its error if it broke
	// Output:
	// decode has its handoff: true <nil>
	// <nil>
	// disaggregated without a body: true <nil>
}

// A request that its host has forgotten ends by itself, and frees what it holds.
func ExampleFlow_Begin_forgotten() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithTimeouts(config.Timeouts{Steps: 20 * time.Millisecond}))
	defer flow.Shutdown(context.Background())

	ctx := context.Background()
	in := &pdflow.Request{API: connector.APICompletions, Body: []byte(`{"prompt":` + prompt + `}`)}
	steps, err := flow.Begin(ctx, in)
	if err != nil {
		log.Fatal(err)
	}
	step, _, err := steps.Next(ctx)
	if err == nil { // else so much time has passed already
		<-step.Context().Done() // a host that never calls again
		_, _, err = steps.Next(ctx)
	}
	fmt.Println(errors.Is(err, pdflow.CodeForgotten))
	// Output:
	// true
}
