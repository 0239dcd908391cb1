// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
)

// A balancer cuts connections on which nothing comes. While prefill takes its time, the client gets the head of its
// response and comments. It does not get X-PD-Mode, which nobody knew.
func ExampleWithKeepAlive() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	after := 100 * time.Millisecond // where a balancer waits 60 s: 15 s
	flow := exampleFlow(prefill, decode, pdflow.WithKeepAlive(after))
	defer flow.Shutdown(context.Background())
	prefill.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond})

	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodPost, "/v1/completions",
		strings.NewReader(`{"prompt":`+prompt+`,"max_tokens":3,"stream":true}`))
	r.Header.Set("Content-Type", "application/json")
	flow.ServeHTTP(w, r)

	first, rest, _ := strings.Cut(w.Body.String(), "\n\n")
	fmt.Println(w.Code, w.Header().Get("Content-Type"), first)
	fmt.Println("ends with [DONE]:", strings.HasSuffix(rest, "data: [DONE]\n\n"))
	// Output:
	// 200 text/event-stream; charset=utf-8 : keep-alive
	// ends with [DONE]: true
}

// A host that sends the legs by itself keeps its client alive by itself: a wait of Next ends with its context, and the
// next call goes on with it.
func ExampleSteps_Next() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())
	legs := &http.Transport{DisableCompression: true}
	defer legs.CloseIdleConnections()
	prefill.Inject(enginesim.Fault{Kind: enginesim.FaultDelay, Delay: 500 * time.Millisecond})

	ctx, w := context.Background(), httptest.NewRecorder()
	steps, err := flow.Begin(ctx, &pdflow.Request{API: connector.APICompletions,
		Body: []byte(`{"prompt":` + prompt + `,"max_tokens":3,"stream":true}`)})
	if err != nil {
		log.Fatal(err)
	}
	defer steps.End(nil)
	for {
		wait, stop := context.WithTimeout(ctx, 100*time.Millisecond) // where a balancer waits 60 s: 15 s
		step, resp, err := steps.Next(wait)
		stop()
		switch {
		case step != nil:
			go step.Send(legs)
		case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
			w.WriteString(": keep-alive\n\n") // the first one with the head, which is 200 from here on
			w.Flush()
		case err != nil: // an error event, and a cut connection
			log.Fatal(err)
		default:
			fmt.Println("kept alive:", strings.HasPrefix(w.Body.String(), ": keep-alive"), resp.Status)
			return
		}
	}
	// Output:
	// kept alive: true 200
}
