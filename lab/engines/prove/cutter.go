// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// cutter is a proxy in front of a decode engine that breaks a stream at an exact place, as an engine does that dies
// there: nothing but the connection's end tells it.
type cutter struct {
	url    string
	engine string
	server *http.Server
	next   *cut
}

// cut is where the next stream breaks, of all the cutters that share it.
type cut struct {
	mu     sync.Mutex
	armed  bool
	struck bool
	after  int  // events that still pass
	half   bool // and half of the one behind them
}

// arm lets the next stream break.
func (c *cut) arm(after int, half bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.armed, c.struck, c.after, c.half = true, false, after, half
}

// happened reports whether a stream was broken since arm.
func (c *cut) happened() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.struck
}

func (c *cut) take() (after int, half, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ok, c.armed = c.armed, false
	return c.after, c.half, ok
}

func (c *cut) strike() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.struck = true
}

func newCutter(engine string, next *cut) (*cutter, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	c := &cutter{url: "http://" + listener.Addr().String(), engine: engine, next: next}
	c.server = &http.Server{Handler: c, ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = c.server.Serve(listener) }() // ends with close
	return c, nil
}

func (c *cutter) close() { _ = c.server.Close() }

// ServeHTTP passes a request on.
func (c *cutter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	request, err := http.NewRequestWithContext(r.Context(), r.Method, c.engine+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return
	}
	request.Header = r.Header
	got, err := plain.Do(request)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer got.Body.Close()
	w.Header().Set("Content-Type", got.Header.Get("Content-Type"))
	w.WriteHeader(got.StatusCode)
	after, half, broken := 0, false, false
	if r.Method == http.MethodPost && bytes.Contains(body, []byte(`"return_token_ids":true`)) {
		after, half, broken = c.next.take()
	}
	lines := bufio.NewReader(got.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if broken && after == 0 && (!half || len(line) > 1) {
			c.next.strike()
			if half {
				_, _ = w.Write(line[:len(line)/2])
			}
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		if len(line) == 1 {
			after--
		}
		_, _ = w.Write(line)
		if len(line) <= 1 {
			_ = http.NewResponseController(w).Flush()
		}
		if err != nil {
			return
		}
	}
}
