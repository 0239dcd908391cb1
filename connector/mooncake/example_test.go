// SPDX-License-Identifier: Apache-2.0

package mooncake_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"strings"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/mooncake"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/internal/contract"
)

// Before the legs the connector asks P's bootstrap server for P's engine id, which is new at each start. Then both legs
// go out at once.
func ExampleNew() {
	c, err := mooncake.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	r, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"Hello","max_tokens":8}`))
	if err != nil {
		log.Fatal(err)
	}
	p, err := discovery.New("http://10.0.0.5:8000", discovery.RolePrefill)
	if err != nil {
		log.Fatal(err)
	}
	s := contract.NewSession(r, "client-7", p, discovery.Endpoint{})
	prepared, err := c.Prepare(context.Background(), s, func(r *http.Request) (*http.Response, error) {
		fmt.Println(r.Method, r.URL)
		body := `{"0":{"engine_id":"e-1","worker_addr":{"0":{"0":"tcp://10.0.0.5:7001"}}}}`
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(body))}, nil
	})
	if err != nil {
		log.Fatal(err)
	}
	s.Prepared = prepared

	decode := contract.NewLeg(r)
	if err := c.Decode(context.Background(), s, nil, decode); err != nil {
		log.Fatal(err)
	}
	params, _ := decode.Current(connector.ParamsMember)
	fmt.Println(strings.Contains(string(params), `"remote_engine_id":"e-1"`))
	fmt.Println(strings.Contains(string(params), `"remote_bootstrap_addr":"http://10.0.0.5:8998"`))
	// Output:
	// GET http://10.0.0.5:8998/query
	// true
	// true
}
