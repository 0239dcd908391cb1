// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net"
	"net/http"
	"strconv"
	"time"
)

// bootstrap is the HTTP server at which a prefill engine says who it is. A nil one is an engine without it.
type bootstrap struct {
	setting string // the name of its port in Config.Extra
	ln      net.Listener
	server  *http.Server
	served  chan struct{}
}

// listenBootstrap starts a bootstrap server, whose requests wait while the engine is frozen.
func listenBootstrap(h *host, setting string, port int, serve http.HandlerFunc) (*bootstrap, error) {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	b := &bootstrap{setting: setting, ln: ln, served: make(chan struct{})}
	handle := func(w http.ResponseWriter, r *http.Request) {
		if !h.pass() {
			panic(http.ErrAbortHandler)
		}
		serve(w, r)
	}
	b.server = &http.Server{
		Handler: http.HandlerFunc(handle), ReadHeaderTimeout: 30 * time.Second, IdleTimeout: h.keepAlive, ErrorLog: silent(),
	}
	go func() {
		defer close(b.served)
		_ = b.server.Serve(ln)
	}()
	return b, nil
}

func (b *bootstrap) close() {
	if b != nil {
		_ = b.server.Close()
		<-b.served
	}
}

// keeps are the settings with which Restart takes the same port again.
func (b *bootstrap) keeps() map[string]string {
	if b == nil {
		return nil
	}
	_, port, _ := net.SplitHostPort(b.ln.Addr().String())
	return map[string]string{b.setting: port}
}

// bootstrapURL is the server's base address, "" for none.
func (b *bootstrap) bootstrapURL() string {
	if b == nil {
		return ""
	}
	return "http://" + b.ln.Addr().String()
}

// answerJSON writes a response of a bootstrap server.
func answerJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
