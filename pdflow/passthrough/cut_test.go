// SPDX-License-Identifier: Apache-2.0

package passthrough_test

import (
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
)

type unwrapping struct{ http.ResponseWriter }

func (u unwrapping) Unwrap() http.ResponseWriter { return u.ResponseWriter }

// opaque hides everything but the three methods of every ResponseWriter.
type opaque struct{ http.ResponseWriter }

// swallow recovers from every panic, http.ErrAbortHandler included.
func swallow(next http.Handler, wrap func(http.ResponseWriter) http.ResponseWriter) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() { _ = recover() }()
		next.ServeHTTP(wrap(w), r)
	})
}

// A response that breaks must look broken, whatever middleware does.
func TestAResponseThatBreaksIsCut(t *testing.T) {
	for name, wrap := range map[string]func(http.ResponseWriter) http.ResponseWriter{
		"unwraps": func(w http.ResponseWriter) http.ResponseWriter { return unwrapping{w} },
		"hides":   func(w http.ResponseWriter) http.ResponseWriter { return opaque{w} },
	} {
		for _, stream := range []bool{true, false} {
			for _, length := range []bool{true, false} {
				t.Run(fmt.Sprint(name, " stream=", stream, " length=", length), func(t *testing.T) {
					e := newEngine(t, func(r *http.Request) (*http.Response, error) {
						resp, err := streams(io.ErrUnexpectedEOF, time.Nanosecond)(r)
						if !stream {
							resp.Header.Set("Content-Type", "application/json")
						}
						if length {
							resp.Header.Set("Content-Length", "1000")
						}
						return resp, err
					})
					s := httptest.NewUnstartedServer(swallow(handler(t, e.find, nil), wrap))
					s.Config.ErrorLog = log.New(io.Discard, "", 0)
					s.Start()
					defer s.Close()
					text := ask(t, s.Listener.Addr().String())
					require.Contains(t, text, "data: x\n\n", "what was read goes out first")
					assert.Equal(t, pdflow.CodeStreamBroken, e.outcome(t).Err.Code)
					if length || name == "unwraps" {
						assert.False(t, strings.HasSuffix(text, "0\r\n\r\n"),
							"the last chunk would make it look whole: %q", text)
						return
					}
					assert.Contains(t, text, `"code":"stream_broken"`,
						"the connection is hidden: the last words tell it")
					assert.Equal(t, stream, strings.Contains(text, "data: {\"error\""))
				})
			}
		}
	}
}

// ask returns all that a server sends before it closes the connection.
func ask(t *testing.T, address string) string {
	t.Helper()
	c, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = io.WriteString(c, "GET /v1/responses/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	all, _ := io.ReadAll(c)
	return string(all)
}
