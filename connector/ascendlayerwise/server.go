// SPDX-License-Identifier: Apache-2.0

package ascendlayerwise

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/internal/listen"
)

// callbackPath is what D appends to nothing: it is part of the URL that it is given.
const callbackPath = "/v1/metaserver"

const (
	maxCallback  = 4 << 20          // bytes: a million tokens in blocks of 16 take half a megabyte
	smallEnough  = 32 << 10         // bytes: what is larger is read only as long as few others are
	maxLarge     = 32               // of the larger ones, at once
	maxCallbacks = 16 << 10         // at once: an engine has 32 threads for them
	maxHold      = 15 * time.Minute // how long a callback waits for P at most; the flow's own limits are shorter
	maxRead      = 10 * time.Second
)

// servers are those of the process: connectors that name one address share its listener.
var servers listen.Shared[*server]

// acquire returns the server of an address, and starts it for the first who asks.
func acquire(ctx context.Context, address string) (*server, error) {
	s, err := servers.Acquire(ctx, address, serve)
	if err != nil {
		return nil, errors.New("ascendlayerwise: callbackListen cannot be listened on: " + cause(err))
	}
	return s, nil
}

func serve(ln net.Listener) *server {
	s := &server{ln: ln, waiters: newWaiters(), closing: make(chan struct{}), served: make(chan struct{})}
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: maxRead, ReadTimeout: maxRead, WriteTimeout: maxHold + maxRead, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	s.http.ErrorLog = nothingLogged
	go func() {
		defer close(s.served)
		if err := s.http.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			s.failed.Store(true)
		}
	}()
	return s
}

// cause says why listening failed without the address, which the configuration has.
func cause(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err.Error()
	}
	return "no such address"
}

// end stops a server that nobody uses any more. Whoever waits for P is answered at once.
func (s *server) end() {
	close(s.closing)
	_ = s.ln.Close()
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	if s.http.Shutdown(ctx) != nil {
		_ = s.http.Close()
	}
	<-s.served
}

// server takes callbacks on one address.
type server struct {
	*waiters
	ln      net.Listener
	http    *http.Server
	closing chan struct{}
	served  chan struct{}
	failed  atomic.Bool
	active  atomic.Int64
	large   atomic.Int64 // bodies above smallEnough that are being read
}

func (s *server) address() string { return s.ln.Addr().String() }

func (s *server) failure() error {
	if s.failed.Load() {
		return errors.New("ascendlayerwise: the callback server has stopped")
	}
	return nil
}

// ServeHTTP takes one callback and answers it when P has answered. The statuses are those of vllm-ascend's own proxy, where it has
// one; D reads none of them.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != callbackPath {
		answer(w, http.StatusNotFound, `{"detail":"no such path"}`)
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		answer(w, http.StatusMethodNotAllowed, `{"detail":"callbacks are posted"}`)
		return
	}
	if s.active.Add(1) > maxCallbacks {
		s.active.Add(-1)
		answer(w, http.StatusServiceUnavailable, `{"detail":"too many callbacks"}`)
		return
	}
	defer s.active.Add(-1)
	body, err := s.read(w, r)
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		answer(w, http.StatusRequestEntityTooLarge, `{"detail":"the callback is too large"}`)
		return
	}
	if errors.Is(err, errBusy) {
		answer(w, http.StatusServiceUnavailable, `{"detail":"too many large callbacks"}`)
		return
	}
	id, ok := callbackID(body)
	if err != nil || !ok {
		answer(w, http.StatusBadRequest, `{"detail":"not one JSON object with a request_id"}`)
		return
	}
	waiting := s.find(id)
	if waiting == nil {
		answer(w, http.StatusNotFound, `{"detail":"unknown request_id"}`)
		return
	}
	s.called(w, r, waiting, body)
}

var errBusy = errors.New("ascendlayerwise: too many large callbacks")

// read reads a callback's body. Nothing is known of its sender yet, so that all bodies together must not take much memory: the larger ones
// are few at a time.
func (s *server) read(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	limited := http.MaxBytesReader(w, r.Body, maxCallback)
	small, err := io.ReadAll(io.LimitReader(limited, smallEnough))
	if err != nil || len(small) < smallEnough {
		return small, err
	}
	if s.large.Add(1) > maxLarge {
		s.large.Add(-1)
		return nil, errBusy
	}
	defer s.large.Add(-1)
	rest, err := io.ReadAll(limited)
	return append(small, rest...), err
}

// called hands a callback to the session that waits for it, and holds the answer until P's is known. A repeated one, which D sends when a
// connection broke, starts nothing and is answered as the first.
func (s *server) called(w http.ResponseWriter, r *http.Request, waiting *waiter, body []byte) {
	blocks, err := checkCallback(body)
	if err == nil && blocks == 0 {
		answer(w, http.StatusOK, ok) // D has the whole prompt and does not wait; an empty list is more than P's engine can read
		return
	}
	waiting.ask(connector.Event{Body: body, At: time.Now()}, err)
	if err != nil {
		answer(w, http.StatusBadRequest, `{"detail":"the callback lacks what prefill needs"}`)
		return
	}
	limit := time.NewTimer(maxHold)
	defer limit.Stop()
	select {
	case <-waiting.over:
		if waiting.served {
			answer(w, http.StatusOK, ok)
		} else {
			answer(w, http.StatusBadGateway, `{"detail":"prefill failed"}`)
		}
	case <-limit.C:
		answer(w, http.StatusGatewayTimeout, `{"detail":"prefill has not ended"}`)
	case <-s.closing:
		answer(w, http.StatusServiceUnavailable, `{"detail":"shutting down"}`)
	case <-r.Context().Done(): // D has left
	}
}

const ok = `{"status":"ok"}`

func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}
