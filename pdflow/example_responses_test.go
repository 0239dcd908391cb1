// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/pdflow/responses"
	"github.com/pdkit/pdkit/transport"
)

// remembering makes a flow and the engines of a passthrough.Handler that share an index of responses.
func remembering(c connector.KVConnector, set *discovery.Set, picker pdflow.Picker,
	legs http.RoundTripper) (*pdflow.Flow, *passthrough.Engines, error) {
	index := responses.New(set, legs)
	flow, err := pdflow.New(c, picker, pdflow.WithTransport(legs), pdflow.WithResponses(index))
	engines := &passthrough.Engines{Set: set, Picker: picker, Transport: legs, Responses: index}
	return flow, engines, err
}

// A response, its follow-up, and the response again. Only the engine that made it has it.
func ExampleWithResponses() {
	prefill, decode, err := enginesim.Pair(enginesim.Config{}, enginesim.Config{KeepResponses: true})
	if err != nil {
		log.Fatal(err)
	}
	defer prefill.Close()
	defer decode.Close()
	set := exampleSet(prefill, decode)
	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	legs := transport.New(nil)
	defer legs.Close()
	flow, engines, err := remembering(conn, set, pick.New(set, pick.RoundRobin()), legs)
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Shutdown(context.Background())
	other, err := passthrough.New(func(string) (*passthrough.Engines, *pdflow.Error) { return engines, nil }, nil)
	if err != nil {
		log.Fatal(err)
	}
	ask := func(method, path, body string) (id string) {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(method, path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		flow.Middleware(other).ServeHTTP(w, r)
		text, _ := io.ReadAll(w.Body)
		fmt.Println(w.Code, w.Header().Get("X-PD-Mode")+gjson.GetBytes(text, "error.code").String())
		return gjson.GetBytes(text, "id").String()
	}
	id := ask(http.MethodPost, "/v1/responses", `{"input":"Hello","max_output_tokens":4}`)
	ask(http.MethodPost, "/v1/responses", `{"input":"More","max_output_tokens":4,"previous_response_id":"`+id+`"}`)
	ask(http.MethodGet, "/v1/responses/"+id, "")
	ask(http.MethodGet, "/v1/responses/resp_unknown", "")
	// Output:
	// 200 disaggregated
	// 200 aggregated
	// 200 aggregated
	// 404 response_not_found
}
