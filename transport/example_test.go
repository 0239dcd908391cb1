// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/pdkit/pdkit/transport"
)

// A transport is an http.RoundTripper whose errors say whether the request may have reached the engine.
func ExampleNew() {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "tokens")
	}))
	defer engine.Close()
	engines := transport.New(nil)
	defer engines.Close()

	post := func(url string) (*http.Response, error) {
		r, err := http.NewRequestWithContext(context.Background(), http.MethodPost, url, strings.NewReader(`{}`))
		if err != nil {
			return nil, err
		}
		return engines.RoundTrip(r)
	}
	resp, err := post(engine.URL)
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	fmt.Println(resp.StatusCode, string(body), err)

	_, err = post("http://127.0.0.1:1") // where nobody listens
	fmt.Println("may be sent elsewhere:", transport.Classify(err) == transport.SentNothing)
	// Output:
	// 200 tokens <nil>
	// may be sent elsewhere: true
}

// A server of streams reads and writes its clients' connections at less cost behind this listener.
func ExampleNewListener() {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	listener := transport.NewListener(tcp)
	server := &http.Server{
		ReadHeaderTimeout: 10 * time.Second,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "hello") // a pdflow.Flow in place of this
		}),
	}
	defer server.Close()
	go func() { _ = server.Serve(listener) }() // returns when the server is closed

	resp, err := http.Get("http://" + listener.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	fmt.Println(string(text), err)
	// Output: hello <nil>
}
