// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// repeating is an engine that sends its first response on each connection once more, 3 ms late. From then on each
// request gets the response to the one before. As vLLM's do, the responses name their requests.
func repeating(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	var turns sync.Mutex
	write := func(r *http.Request) {
		text := fmt.Sprintf(`{"id":"cmpl-%s","choices":[{"index":0,"text":"ok","finish_reason":"length"}]}`,
			r.Header.Get("X-Request-Id"))
		turns.Lock()
		defer turns.Unlock()
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			len(text), text)
	}
	write(r)
	late := make(chan struct{})
	go func() {
		defer close(late)
		time.Sleep(3 * time.Millisecond)
		write(r)
	}()
	serveMore(conn, write)
	<-late
}

func serveMore(conn net.Conn, write func(*http.Request)) {
	in := bufio.NewReader(conn)
	for {
		r, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		time.Sleep(5 * time.Millisecond)
		write(r)
	}
}

// Clients follow each other at once, so that nothing comes while a connection is idle. None of them gets what another
// one asked for; whose response is somebody else's is served by another attempt.
func TestNoClientGetsTheResponseToAnother(t *testing.T) {
	for name, netHTTP := range map[string]bool{"own": false, "net/http": true} {
		t.Run(name, func(t *testing.T) {
			rt := transport.New(&transport.Options{NetHTTP: netHTTP})
			x := script(t, &fake{}, repeating, repeating, pdflow.WithTransport(rt),
				pdflow.WithRetry(config.Retry{MaxAttempts: 3}))
			t.Cleanup(func() { _ = rt.Close() })
			for n := range 60 {
				who := fmt.Sprint("client-", n)
				got := post(t, x.url, "/v1/completions", completion("hi", ""), "X-Request-Id", who)
				require.Equal(t, http.StatusOK, got.status, got.body)
				assert.Contains(t, got.body, `"cmpl-`+who+`"`)
			}
		})
	}
}
