// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"time"
)

// intercept is a reverse proxy in front of an engine, where a fault can be caused at an exact moment between the legs.
// It passes everything on byte for byte. It keeps no connection, so the gateway dials for every leg.
type intercept struct {
	url    string
	server *http.Server
	door   *shutListener

	mu     sync.Mutex
	before func() error // runs before the next request for tokens goes to the engine; an error drops the connection
	after  func()       // runs after the engine's next response was read, before the gateway gets a byte of it
}

func newIntercept(engine string) (*intercept, error) {
	target, err := url.Parse(engine)
	if err != nil {
		return nil, err
	}
	door, err := newShutListener()
	if err != nil {
		return nil, err
	}
	i := &intercept{url: "http://" + door.Addr().String(), door: door}
	proxy := &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:      &http.Transport{DisableKeepAlives: true, DisableCompression: true},
		FlushInterval:  -1,
		ModifyResponse: i.holdAnswer,
		ErrorLog:       log.New(io.Discard, "", 0), // engines are killed on purpose here
		// If the engine breaks a response off, the proxy breaks it off for the gateway.
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	i.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if before := take(i, &i.before); before != nil && before() != nil {
				panic(http.ErrAbortHandler)
			}
		}
		// Else net/http's server may take the body's end from the proxy, which then breaks the response off.
		_ = http.NewResponseController(w).EnableFullDuplex()
		proxy.ServeHTTP(w, r)
	}), ErrorLog: proxy.ErrorLog, ReadHeaderTimeout: 10 * time.Second}
	i.server.SetKeepAlivesEnabled(false)
	go func() { _ = i.server.Serve(door) }() // ends with close
	return i, nil
}

func (i *intercept) close() {
	i.door.open()
	_ = i.server.Close()
}

// beforeRequest and afterAnswer set a hook for the next request.
func (i *intercept) beforeRequest(hook func() error) { put(i, &i.before, hook) }
func (i *intercept) afterAnswer(hook func())         { put(i, &i.after, hook) }

func put[T any](i *intercept, place *T, hook T) {
	i.mu.Lock()
	defer i.mu.Unlock()
	*place = hook
}

func take[T any](i *intercept, place *T) T {
	i.mu.Lock()
	defer i.mu.Unlock()
	var none T
	hook := *place
	*place = none
	return hook
}

func (i *intercept) holdAnswer(response *http.Response) error {
	if response.Request.Method != http.MethodPost {
		return nil
	}
	after := take(i, &i.after)
	if after == nil {
		return nil
	}
	content, err := io.ReadAll(response.Body)
	_ = response.Body.Close()
	if err != nil {
		return err
	}
	response.Body = io.NopCloser(bytes.NewReader(content))
	after()
	return nil
}
