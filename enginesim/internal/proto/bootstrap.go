// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Bootstrap is the HTTP server at which a prefill engine says who it is. A nil one is an engine without it.
type Bootstrap struct {
	setting string // the name of its port in Config.Extra
	ln      net.Listener
	server  *http.Server
	served  chan struct{}
}

// ListenBootstrap starts a bootstrap server, whose requests wait while the engine is frozen.
func ListenBootstrap(h *Host, setting string, port int, serve http.HandlerFunc) (*Bootstrap, error) {
	ln, err := net.Listen("tcp", h.Beside(port))
	if err != nil {
		return nil, err
	}
	b := &Bootstrap{setting: setting, ln: ln, served: make(chan struct{})}
	handle := func(w http.ResponseWriter, r *http.Request) {
		if !h.Pass() {
			panic(http.ErrAbortHandler)
		}
		serve(w, r)
	}
	b.server = &http.Server{
		Handler: http.HandlerFunc(handle), ReadHeaderTimeout: 30 * time.Second, IdleTimeout: h.KeepAlive,
		ErrorLog: core.Silent(),
	}
	go func() {
		defer close(b.served)
		_ = b.server.Serve(ln)
	}()
	return b, nil
}

// Close ends the server.
func (b *Bootstrap) Close() {
	if b != nil {
		_ = b.server.Close()
		<-b.served
	}
}

// Keeps are the settings with which Restart takes the same port again.
func (b *Bootstrap) Keeps() map[string]string {
	if b == nil {
		return nil
	}
	_, port, _ := net.SplitHostPort(b.ln.Addr().String())
	return map[string]string{b.setting: port}
}

// BootstrapURL is the server's base address, "" for none.
func (b *Bootstrap) BootstrapURL() string {
	if b == nil {
		return ""
	}
	return "http://" + b.ln.Addr().String()
}

// WriteJSON writes a response of a bootstrap server.
func WriteJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// NewClient is a client for an engine's own requests, which keeps no connection.
func NewClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

// GetJSON reads a JSON response of another engine's server into v.
func GetJSON(ctx context.Context, client *http.Client, url string, v any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return json.NewDecoder(resp.Body).Decode(v)
}
