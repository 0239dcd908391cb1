// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net"
	"net/http"
	"strconv"
	"time"
)

// bootstrap is the HTTP server at which a Mooncake prefill engine says who it is.
type bootstrap struct {
	ln     net.Listener
	server *http.Server
	served chan struct{}
}

func (c *mooncake) listenBootstrap(port int) (*bootstrap, error) {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return nil, err
	}
	b := &bootstrap{ln: ln, served: make(chan struct{})}
	b.server = &http.Server{Handler: http.HandlerFunc(c.answerQuery), ReadHeaderTimeout: 30 * time.Second, IdleTimeout: c.node.cfg.KeepAlive, ErrorLog: silent()}
	go func() {
		defer close(b.served)
		_ = b.server.Serve(ln)
	}()
	return b, nil
}

func (b *bootstrap) close() {
	_ = b.server.Close()
	<-b.served
}

// answerQuery answers GET /query as recorded (capture mooncake/00).
func (c *mooncake) answerQuery(w http.ResponseWriter, r *http.Request) {
	if !c.node.gate.pass() {
		panic(http.ErrAbortHandler)
	}
	type rank struct {
		EngineID string                       `json:"engine_id"`
		Workers  map[string]map[string]string `json:"worker_addr"`
	}
	h := w.Header()
	h.Set("Server", "uvicorn")
	h.Set("Content-Type", "application/json")
	var body []byte
	status := http.StatusOK
	switch {
	case r.URL.Path != "/query":
		status, body = http.StatusNotFound, []byte(`{"detail":"Not Found"}`)
	case r.Method != http.MethodGet:
		status, body = http.StatusMethodNotAllowed, []byte(`{"detail":"Method Not Allowed"}`)
	default:
		ranks := map[string]rank{}
		for i := range c.ranks {
			ranks[itoa(i)] = rank{c.engine(i), map[string]map[string]string{"0": {"0": "tcp://" + c.sideAddress()}}}
		}
		body = encode(ranks)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}
