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
	"github.com/pdkit/pdkit/internal/relisten"
)

// callbackPath is a part of the URL that D gets. D itself appends nothing to that URL.
const callbackPath = "/v1/metaserver"

const (
	maxCallback  = 4 << 20          // bytes: a million tokens in blocks of 16 take half a megabyte
	smallEnough  = 32 << 10         // bytes: only maxLarge bodies above this size are read at once
	maxLarge     = 32               // how many larger bodies are read at once
	maxCallbacks = 16 << 10         // how many callbacks are served at once: an engine has 32 threads for them
	maxHold      = 15 * time.Minute // the longest wait of a callback for P; the flow's own limits are shorter
	maxRead      = 10 * time.Second
)

// servers are the callback servers of this process: connectors that name the same address share one.
var servers listen.Shared[*server]

// acquire returns the server of an address. For the first caller it starts the server.
func acquire(ctx context.Context, address string) (*server, error) {
	s, err := servers.Acquire(ctx, address, serve)
	if err != nil {
		return nil, errors.New("ascendlayerwise: callbackListen cannot be listened on: " + cause(err))
	}
	return s, nil
}

func serve(ln *relisten.Listener) *server {
	s := &server{ln: ln, waiters: newWaiters(), closing: make(chan struct{}), served: make(chan struct{})}
	s.http = &http.Server{Handler: s, ReadHeaderTimeout: maxRead, ReadTimeout: maxRead, WriteTimeout: maxHold + maxRead,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	s.http.ErrorLog = nothingLogged
	go func() {
		defer close(s.served)
		_ = s.http.Serve(ln) // it ends by end
	}()
	return s
}

// cause says why listening failed. It leaves out the address, which the configuration has.
func cause(err error) string {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return op.Err.Error()
	}
	return "no such address"
}

// end stops a server that has no users any more. It answers the callbacks that wait for P at once.
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

// server receives callbacks at one address.
type server struct {
	*waiters
	ln      *relisten.Listener
	http    *http.Server
	closing chan struct{}
	served  chan struct{}
	active  atomic.Int64
	large   atomic.Int64 // bodies larger than smallEnough that are being read
}

func (s *server) address() string { return s.ln.Addr().String() }

func (s *server) failure() error {
	if err := s.ln.Err(); err != nil {
		return errors.New("ascendlayerwise: the callback listener has failed and is being restarted: " + cause(err))
	}
	return nil
}

// ServeHTTP receives one callback and answers it when P has answered. The statuses are those of vllm-ascend's own
// proxy, if it has one for the case; D ignores them all.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != callbackPath {
		respond(w, http.StatusNotFound, `{"detail":"no such path"}`)
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		respond(w, http.StatusMethodNotAllowed, `{"detail":"callbacks are posted"}`)
		return
	}
	if s.active.Add(1) > maxCallbacks {
		s.active.Add(-1)
		respond(w, http.StatusServiceUnavailable, `{"detail":"too many callbacks"}`)
		return
	}
	defer s.active.Add(-1)
	body, err := s.read(w, r)
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		respond(w, http.StatusRequestEntityTooLarge, `{"detail":"the callback is too large"}`)
		return
	}
	if errors.Is(err, errBusy) {
		respond(w, http.StatusServiceUnavailable, `{"detail":"too many large callbacks"}`)
		return
	}
	id, ok := callbackID(body)
	if err != nil || !ok {
		respond(w, http.StatusBadRequest, `{"detail":"not one JSON object with a request_id"}`)
		return
	}
	waiting := s.find(id)
	if waiting == nil {
		respond(w, http.StatusNotFound, `{"detail":"unknown request_id"}`)
		return
	}
	s.called(w, r, waiting, body)
}

var errBusy = errors.New("ascendlayerwise: too many large callbacks")

// read reads a callback's body. Its sender is not known yet, so all bodies together must not take much memory: only
// maxLarge of the larger ones are read at once.
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

// called gives a callback to the session that waits for it, and answers the callback when P has answered. If D repeats
// a callback because a connection broke, the repeated one starts nothing and gets the same response.
func (s *server) called(w http.ResponseWriter, r *http.Request, waiting *waiter, body []byte) {
	blocks, err := checkCallback(body)
	if err == nil && blocks == 0 {
		respond(w, http.StatusOK, ok) // D has the whole prompt and does not wait; P's engine cannot read an empty list
		return
	}
	waiting.ask(connector.Event{Body: body, At: time.Now()}, err)
	if err != nil {
		respond(w, http.StatusBadRequest, `{"detail":"the callback lacks what prefill needs"}`)
		return
	}
	limit := time.NewTimer(maxHold)
	defer limit.Stop()
	select {
	case <-waiting.over:
		if waiting.served {
			respond(w, http.StatusOK, ok)
		} else {
			respond(w, http.StatusBadGateway, `{"detail":"prefill failed"}`)
		}
	case <-limit.C:
		respond(w, http.StatusGatewayTimeout, `{"detail":"prefill has not ended"}`)
	case <-s.closing:
		respond(w, http.StatusServiceUnavailable, `{"detail":"shutting down"}`)
	case <-r.Context().Done(): // D has left
	}
}

const ok = `{"status":"ok"}`

func respond(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}
