// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"

	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/static"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/passthrough"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// A whole server: inference goes over pairs of engines, all else to a decode engine.
func Example() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/v1/models" {
			_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"tiny"}]}`)
			return
		}
		_, _ = io.WriteString(w, `{"count":2}`)
	}))
	defer engine.Close()
	set := exampleSet(engine.URL)
	legs := transport.New(nil)
	defer legs.Close()
	picker := pick.New(set, pick.RoundRobin())
	conn, err := nixl.New(nil)
	if err != nil {
		log.Fatal(err)
	}
	flow, err := pdflow.New(conn, picker, pdflow.WithTransport(legs))
	if err != nil {
		log.Fatal(err)
	}
	defer flow.Shutdown(context.Background())

	engines := &passthrough.Engines{Set: set, Picker: picker, Transport: legs, Members: conn.Traits().Members}
	other, err := passthrough.New(func(string) (*passthrough.Engines, *pdflow.Error) { return engines, nil }, nil)
	if err != nil {
		log.Fatal(err)
	}
	server := flow.Middleware(other)

	fmt.Println(exampleAsk(server, http.MethodGet, "/v1/models", ""))
	fmt.Println(exampleAsk(server, http.MethodPost, "/tokenize", `{"model":"tiny","prompt":"Hello"}`))
	fmt.Println(exampleAsk(server, http.MethodPost, "/sleep", "")[:30])
	// Output:
	// 200 {"data":[{"id":"tiny"}],"object":"list"}
	// 200 {"count":2}
	// 404 {"error":{"code":"not_foun
}

// A policy: clients may count tokens and list models, and nothing else passes.
func ExampleOptions() {
	none := func(string) (*passthrough.Engines, *pdflow.Error) { return nil, nil }
	other, err := passthrough.New(none, &passthrough.Options{Allow: func(r *http.Request) bool {
		return r.URL.Path == "/v1/models" || r.URL.Path == "/v1/messages/count_tokens"
	}})
	if err != nil {
		log.Fatal(err)
	}
	own := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "the host's own") })
	fmt.Println(exampleAsk(other.Middleware(own), http.MethodPost, "/tokenize", `{}`))
	fmt.Println(exampleAsk(other.Middleware(own), http.MethodPost, "/v1/messages/count_tokens", `{"model":"huge"}`))
	// Output:
	// 200 the host's own
	// 404 {"error":{"message":"model: no such model is served here","type":"not_found_error"},"type":"error"}
}

// exampleSet is a set that knows one decode engine.
func exampleSet(url string) *discovery.Set {
	e, err := discovery.New(url, discovery.RoleDecode)
	if err != nil {
		log.Fatal(err)
	}
	set, err := static.NewSet(e)
	if err != nil {
		log.Fatal(err)
	}
	return set
}

func exampleAsk(h http.Handler, method, path, body string) string {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return fmt.Sprint(w.Code, " ", w.Body)
}
