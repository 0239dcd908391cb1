// SPDX-License-Identifier: Apache-2.0

// Gin is a router on gin.Default() whose handler chooses the engines and sends each request with
//
//	Proxy(c *gin.Context, reqBody map[string]interface{}, prefillAddr, decodeAddr string) error
//
// in the shape of a Kthena connector. Gin middleware around it checks the client's key and limits its rate.
//
//	echo my-key > keys
//	go run ./examples/gin -keys keys -prefill 127.0.0.1:8100,127.0.0.1:8101 -decode 127.0.0.1:8200
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"log"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"
	"golang.org/x/time/rate"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func main() {
	var o options
	prefill := flag.String("prefill", "127.0.0.1:8100", "addresses of prefill engines, separated by commas")
	decode := flag.String("decode", "127.0.0.1:8200", "addresses of decode engines, separated by commas")
	keys := flag.String("keys", "keys", "file with the clients' keys, one a line")
	perSecond := flag.Float64("rate", 10, "requests a second for each key")
	flag.BoolVar(&o.forwardKey, "forward-key", false, "send the client's key to the engines, too")
	listen := flag.String("listen", "127.0.0.1:8000", "where clients connect")
	flag.Parse()
	text, err := os.ReadFile(*keys)
	if err != nil {
		log.Fatal(err)
	}
	o.prefill, o.decode = strings.Split(*prefill, ","), strings.Split(*decode, ",")
	o.keys, o.rate, o.burst = strings.Fields(string(text)), rate.Limit(*perSecond), 10
	gin.SetMode(gin.ReleaseMode)
	r, err := newRouter(&o)
	if err != nil {
		log.Fatal(err)
	}
	server := http.Server{Addr: *listen, Handler: r.handler(&o), ReadHeaderTimeout: 10 * time.Second}
	log.Fatal(server.ListenAndServe())
}

type options struct {
	prefill, decode []string // host:port
	keys            []string
	rate            rate.Limit // of requests of one key
	burst           int
	forwardKey      bool // to the engines
}

// router sends each request over the next pair of engines.
type router struct {
	flow            *pdflow.Flow
	prefill, decode []string
	next            atomic.Uint64
}

func newRouter(o *options) (*router, error) {
	conn, err := nixl.New(nil)
	if err != nil {
		return nil, err
	}
	flow, err := pdflow.New(conn, pick.Func(noPick))
	return &router{flow: flow, prefill: o.prefill, decode: o.decode}, err
}

// noPick is for a flow whose callers name the pair: the flow never calls it for those requests.
func noPick(context.Context, *pdflow.PickInput) (pdflow.Pick, error) {
	return pdflow.Pick{}, pdflow.CodeNoEndpoint
}

func (r *router) handler(o *options) http.Handler {
	engine := gin.Default() // its recovery swallows http.ErrAbortHandler; Send does not rely on that panic
	engine.Use(authenticate(o.keys, o.forwardKey), limit(o.rate, o.burst))
	for _, api := range connector.APIs() {
		engine.POST(api.Path(), r.serve)
	}
	return engine
}

// maxBody is the largest body that is read, in bytes.
const maxBody = 32 << 20

// serve tries two pairs, and answers with the last error if both fail before anything was written.
func (r *router) serve(c *gin.Context) {
	in := pdflow.Request{Header: c.Request.Header}
	c.Header("X-Request-Id", in.ID()) // errors have it, too
	deadlines := http.NewResponseController(c.Writer)
	_ = deadlines.SetReadDeadline(time.Now().Add(time.Minute))
	decoder := json.NewDecoder(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	decoder.UseNumber() // a seed of 64 bits would lose digits as a float64
	var body map[string]any
	if err := decoder.Decode(&body); err != nil || body == nil || decoder.More() {
		// The deadline stays: it bounds what is left of the body.
		e := &pdflow.Error{Code: pdflow.CodeInvalid, Message: "the body must be one JSON object of at most 32 MiB"}
		e.Send(c.Writer, c.Request)
		return
	}
	_ = deadlines.SetReadDeadline(time.Time{})
	var fault *pdflow.Error
	for range 2 {
		n := int(r.next.Add(1) % (1 << 30))
		err := r.Proxy(c, body, r.prefill[n%len(r.prefill)], r.decode[n%len(r.decode)])
		if err == nil || c.Writer.Written() {
			return // Send has written the response, or has cut it
		}
		if !errors.As(err, &fault) {
			fault = &pdflow.Error{Code: pdflow.CodeInternal, Message: "the gateway failed", Err: err}
		}
		if !fault.EngineFault() || fault.Code == pdflow.CodeTimeout {
			break // another pair would say the same, or nobody waits any more
		}
	}
	fault.Send(c.Writer, c.Request)
}

// Proxy serves the request over a pair of engines. After an error the caller may try another pair, or write the error,
// unless something was written (c.Writer.Written()).
func (r *router) Proxy(c *gin.Context, reqBody map[string]any, prefillAddr, decodeAddr string) error {
	body, err := json.Marshal(reqBody)
	if err != nil {
		return err
	}
	prefill, err := discovery.New("http://"+prefillAddr, discovery.RolePrefill)
	if err != nil {
		return err
	}
	decode, err := discovery.New("http://"+decodeAddr, discovery.RoleDecode)
	if err != nil {
		return err
	}
	resp, err := r.flow.Do(c.Request.Context(), &pdflow.Request{
		API:       connector.APIOf(c.Request.URL.Path),
		Header:    c.Request.Header,
		Body:      body,
		RequestID: c.Writer.Header().Get("X-Request-Id"), // "" has Do choose one
		Pick:      &pdflow.Pick{Prefill: prefill, Decode: decode},
	})
	if err != nil {
		return err
	}
	return resp.Send(c.Writer, c.Request)
}
