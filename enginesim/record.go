// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"net/http"
	"slices"
	"sync"

	"github.com/pdkit/pdkit/enginesim/internal/server"
)

// Request is one HTTP request as the engine received it.
type Request struct {
	Method, Path string
	Header       http.Header
	Body         []byte
	Process      int // that got it: see Config.APIServers
}

// requestLogBytes bounds the bodies that are kept.
const requestLogBytes = 64 << 20

// requestLog keeps the last requests.
type requestLog struct {
	limit int

	mu    sync.Mutex
	kept  []Request
	bytes int
}

func (l *requestLog) add(r *http.Request, body []byte) {
	if l.limit < 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.kept = append(l.kept, Request{Method: r.Method, Path: r.URL.Path, Header: r.Header.Clone(), Body: body,
		Process: server.ProcessOf(r)})
	l.bytes += len(body)
	for len(l.kept) > l.limit || l.bytes > requestLogBytes && len(l.kept) > 1 {
		l.bytes -= len(l.kept[0].Body)
		l.kept = slices.Delete(l.kept, 0, 1)
	}
}

// Requests gives the requests the engine received, oldest first: the last Config.KeepRequests of them. POST requests,
// and GET of a response; probes are not kept.
func (e *Engine) Requests() []Request {
	e.log.mu.Lock()
	defer e.log.mu.Unlock()
	return slices.Clone(e.log.kept)
}
