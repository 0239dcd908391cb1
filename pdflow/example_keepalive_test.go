// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

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
