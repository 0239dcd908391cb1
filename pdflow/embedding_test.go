// SPDX-License-Identifier: Apache-2.0

package pdflow_test

// What docs/embedding.md shows, compiled and run. TestPagesShowCodeThatRuns compares the two.

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

func recoverer(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			switch fault := recover(); fault {
			case nil:
			case http.ErrAbortHandler:
				panic(fault) // net/http cuts the connection
			default:
				http.Error(w, "internal error", http.StatusInternalServerError)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

type countingWriter struct {
	http.ResponseWriter
	bytes int64
}

func (c *countingWriter) Write(b []byte) (int, error) {
	n, err := c.ResponseWriter.Write(b)
	c.bytes += int64(n)
	return n, err
}

func (c *countingWriter) Unwrap() http.ResponseWriter { return c.ResponseWriter }

func readFirst(look func(body []byte) error, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 32<<20))
		if err == nil {
			err = look(body)
		}
		if err != nil {
			http.Error(w, "the body is refused", http.StatusBadRequest)
			return
		}
		r = r.Clone(r.Context())
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		next.ServeHTTP(w, r)
	})
}

func checkKeys(valid func(authorization string) bool, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !valid(r.Header.Get("Authorization")) {
			http.Error(w, "no valid key", http.StatusUnauthorized)
			return
		}
		r = r.Clone(r.Context())
		r.Header.Del("Authorization") // the client's key stays here
		r.Header.Del("X-Api-Key")
		next.ServeHTTP(w, r)
	})
}

func withEngineKey(engines http.RoundTripper, file string) http.RoundTripper {
	key, err := transport.KeyFile(file)
	if err != nil {
		log.Fatal(err)
	}
	return transport.WithHeader(engines, key)
}

func ownRequestID(r *http.Request) string {
	return r.Header.Get("X-Tenant") + "." + r.Header.Get("X-Sequence")
}

type legHeader struct{ next http.RoundTripper }

func (t legHeader) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if leg, ok := pdflow.LegFromContext(r.Context()); ok {
		r.Header.Set("X-Pool", string(leg.Leg)) // prefill or decode; "" for a connector's side call
		r.Header.Set("X-Attempt", strconv.Itoa(leg.Attempt))
	}
	return t.next.RoundTrip(r)
}

func overTLS() (*transport.Transport, error) {
	config, err := transport.TLSFiles("engines-ca.pem", "gateway.pem", "gateway-key.pem", "")
	if err != nil {
		return nil, err
	}
	return transport.New(&transport.Options{GetTLS: config}), nil
}

func server(handler http.Handler, config *tls.Config) *http.Server {
	return &http.Server{
		Handler:           handler,
		TLSConfig:         config,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		// No WriteTimeout: the flow bounds each write.
	}
}

func ownTransport() http.RoundTripper {
	return &http.Transport{
		MaxIdleConnsPerHost: 256,
		IdleConnTimeout:     4 * time.Second, // below the engines' own 5 s
		DisableCompression:  true,
	}
}

// A cut stream is an error for the client behind any middleware that recovers, one that swallows every panic included.
func Example_recoverer() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	swallow := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { _ = recover() }()
		flow.ServeHTTP(w, r)
	})
	for _, handler := range []http.Handler{recoverer(flow), swallow} {
		gateway := httptest.NewServer(handler)
		gateway.Config.ErrorLog = log.New(io.Discard, "", 0)
		decode.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 2})
		resp, err := http.Post(gateway.URL+"/v1/completions", "application/json",
			strings.NewReader(`{"prompt":`+prompt+`,"stream":true}`))
		if err != nil {
			log.Fatal(err)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		fmt.Println(resp.StatusCode, errors.Is(err, io.ErrUnexpectedEOF))
		resp.Body.Close()
		gateway.Close()
	}
	// Output:
	// 200 true
	// 200 true
}

// A writer that counts bytes must give access to the writer it wraps (Unwrap): the flow flushes streams through it.
func Example_wrappedWriter() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode)
	defer flow.Shutdown(context.Background())

	recorder := httptest.NewRecorder()
	counting := &countingWriter{ResponseWriter: recorder}
	r := httptest.NewRequest(http.MethodPost, "/v1/completions",
		strings.NewReader(`{"prompt":`+prompt+`,"max_tokens":2,"stream":true}`))
	r.Header.Set("Content-Type", "application/json")
	flow.ServeHTTP(counting, r)
	fmt.Println("counted all:", counting.bytes == int64(recorder.Body.Len()), "flushed:", recorder.Flushed)
	// Output:
	// counted all: true flushed: true
}

// Middleware around a flow: it strips a path prefix, reads the body first, removes the client's key and sets a request
// id of its own.
func Example_middleware() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	engines := transport.New(nil)
	defer engines.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithRequestID(ownRequestID),
		pdflow.WithTransport(legHeader{engines}))
	defer flow.Shutdown(context.Background())

	handler := http.StripPrefix("/llm", checkKeys(
		func(authorization string) bool { return authorization == "Bearer client" },
		readFirst(
			func(body []byte) error { return nil }, // a quota, a policy
			flow,
		),
	))
	for _, key := range []string{"Bearer client", "Bearer other"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/llm/v1/completions", strings.NewReader(`{"prompt":`+prompt+`}`))
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", key)
		r.Header.Set("X-Tenant", "tenant-7")
		r.Header.Set("X-Sequence", "42")
		handler.ServeHTTP(w, r)
		fmt.Println(w.Code, w.Header().Get("X-Request-Id"))
	}
	// Output:
	// 200 tenant-7.42
	// 401
}

// With checkKeys and engineKey, engines do not see the client's key.
func TestTheClientsKeyStaysAtTheGateway(t *testing.T) {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	engines := transport.New(nil)
	defer engines.Close()
	seen := make(chan string, 4)
	spy := roundTripper(func(r *http.Request) (*http.Response, error) {
		seen <- r.Header.Get("Authorization") + r.Header.Get("X-Api-Key")
		return engines.RoundTrip(r)
	})
	file := filepath.Join(t.TempDir(), "engine-key")
	require.NoError(t, os.WriteFile(file, []byte("engines-own\n"), 0o600))
	flow := exampleFlow(prefill, decode, pdflow.WithTransport(withEngineKey(spy, file)))
	defer flow.Shutdown(context.Background())

	handler := checkKeys(func(string) bool { return true }, flow)
	r := httptest.NewRequest(http.MethodPost, "/v1/completions", strings.NewReader(`{"prompt":`+prompt+`}`))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", "Bearer client")
	r.Header.Set("X-Api-Key", "client's")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	assert.Equal(t, http.StatusOK, w.Code)
	require.Len(t, seen, 2)
	assert.Equal(t, "Bearer engines-own", <-seen)
	assert.Equal(t, "Bearer engines-own", <-seen)
	assert.Equal(t, "Bearer client", r.Header.Get("Authorization"), "the server's request is left as it was")
}

// An observer counts the tokens of each model with the program's own counters.
func Example_accounts() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	accounts := pdflow.Observer{SessionEnd: func(_ context.Context, o *pdflow.Outcome) {
		if o.Final { // the last attempt of its request
			fmt.Println(o.Session.Model, o.Usage.Input, o.Usage.Output)
		}
	}}
	flow := exampleFlow(prefill, decode, pdflow.WithTelemetry(pdflow.Telemetry{Usage: true}),
		pdflow.WithObserver(accounts))
	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{"tiny": flow}); err != nil {
		log.Fatal(err)
	}
	examplePost(mux, `{"model":"tiny","max_tokens":3,"stream":true,"prompt":`+prompt+`}`)
	examplePost(mux, `{"model":"made up","prompt":`+prompt+`}`) // 404: in no account
	flow.Shutdown(context.Background())
	// Output:
	// tiny 43 3
}

// A round tripper of one's own carries the legs.
func Example_ownTransport() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()
	flow := exampleFlow(prefill, decode, pdflow.WithTransport(ownTransport()))
	defer flow.Shutdown(context.Background())
	fmt.Println(examplePost(flow, `{"prompt":`+prompt+`}`))

	_, err := overTLS()
	fmt.Println("TLS without its files is an error:", err != nil)
	s := server(flow, &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert})
	fmt.Println("streams have no end:", s.WriteTimeout == 0)
	// Output:
	// 200 disaggregated
	// TLS without its files is an error: true
	// streams have no end: true
}

// Clients ask for gpt-4o, and engines serve tiny. Each side reads its own name.
func ExampleWithModel() {
	prefill, decode := exampleEngines()
	defer prefill.Close()
	defer decode.Close()

	flow := exampleFlow(prefill, decode, pdflow.WithModel("tiny", "gpt-4o", "gpt-4o-mini"))
	defer flow.Shutdown(context.Background())

	mux, err := pdflow.NewMux()
	if err != nil {
		log.Fatal(err)
	}
	if err := mux.SetRoutes(map[string]pdflow.Server{"gpt-4o": flow}); err != nil { // and gpt-4o-mini by its name
		log.Fatal(err)
	}
	for _, model := range []string{"gpt-4o", "gpt-4o-mini", "tiny"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/completions",
			strings.NewReader(`{"model":"`+model+`","max_tokens":1,"prompt":`+prompt+`}`))
		r.Header.Set("Content-Type", "application/json")
		mux.ServeHTTP(w, r)
		var response struct{ Model string }
		_ = json.Unmarshal(w.Body.Bytes(), &response)
		fmt.Println(strings.TrimSpace(fmt.Sprint(w.Code, " ", response.Model)))
	}
	fmt.Println("the engines were asked for", legModel(prefill), "and", legModel(decode))
	// Output:
	// 200 gpt-4o
	// 200 gpt-4o-mini
	// 404
	// the engines were asked for tiny and tiny
}

// legModel is the model that the last leg to an engine names.
func legModel(e *enginesim.Engine) string {
	legs := e.Requests()
	var leg struct{ Model string }
	_ = json.Unmarshal(legs[len(legs)-1].Body, &leg)
	return leg.Model
}

var goBlock = regexp.MustCompile("(?s)```go\n(.*?)```")

// Each piece of Go in docs/embedding.md and in the README stands in an example of this package, so that it compiles and
// runs. The README's whole program is built by examples/nethttp.
func TestPagesShowCodeThatRuns(t *testing.T) {
	files, err := filepath.Glob("example*_test.go")
	require.NoError(t, err)
	var code strings.Builder
	for _, name := range append(files, "embedding_test.go") {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		code.Write(b)
	}
	for page, least := range map[string]int{"../docs/embedding.md": 6, "../README.md": 1} {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		blocks := goBlock.FindAllStringSubmatch(string(text), -1)
		assert.GreaterOrEqual(t, len(blocks), least, page)
		for _, block := range blocks {
			if !strings.HasPrefix(block[1], "package main\n") {
				found := strings.Contains(unindented(code.String()), unindented(block[1]))
				assert.True(t, found, "%s: no example has\n%s", page, block[1])
			}
		}
	}
}

func unindented(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}
