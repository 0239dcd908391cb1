// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// clients are different kinds of round trippers, each with its own connections.
func clients(t *testing.T) map[string]http.RoundTripper {
	http2 := new(http.Protocols)
	http2.SetUnencryptedHTTP2(true)
	netHTTP, netHTTP2 := &http.Transport{}, &http.Transport{Protocols: http2}
	t.Cleanup(netHTTP.CloseIdleConnections)
	t.Cleanup(netHTTP2.CloseIdleConnections)
	return map[string]http.RoundTripper{
		"Transport":              newTransport(t, nil),
		"Transport over HTTP/2":  newTransport(t, &Options{Protocols: http2}),
		"net/http's":             netHTTP,
		"net/http's over HTTP/2": netHTTP2,
	}
}

// bodyFirst reads the body before it connects, so that no body is left to refuse.
func bodyFirst(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		b, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		req = req.WithContext(req.Context())
		req.Body, req.GetBody = io.NopCloser(bytes.NewReader(b)), nil
		return next.RoundTrip(req)
	})
}

func TestARefusedRequestIsNotSent(t *testing.T) {
	errStale := errors.New("stale")
	for name, rt := range clients(t) {
		for kind, wrap := range map[string]func(http.RoundTripper) http.RoundTripper{
			"bare":                   func(rt http.RoundTripper) http.RoundTripper { return rt },
			"reading the body first": bodyFirst,
			"answering by itself": func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(req *http.Request) (*http.Response, error) {
					resp, err := next.RoundTrip(req)
					if err != nil {
						resp, err = &http.Response{StatusCode: http.StatusBadGateway, Body: http.NoBody}, nil
					}
					return resp, err
				})
			},
		} {
			t.Run(name+", "+kind, func(t *testing.T) {
				var served, accepted atomic.Int32
				s := newServer(t, func(http.ResponseWriter, *http.Request) { served.Add(1) }, counting(&accepted),
					func(s *httptest.Server) {
						s.Config.Protocols = new(http.Protocols)
						s.Config.Protocols.SetHTTP1(true)
						s.Config.Protocols.SetUnencryptedHTTP2(true)
					})

				refuse := true
				asked := 0
				ctx := BeforeSend(t.Context(), func(connected bool) error {
					if connected {
						if asked++; refuse {
							return errStale
						}
					}
					return nil
				})
				retrier := NewRetrier(wrap(rt), atOnce)
				for range 30 {
					_, err := retrier.Do(ctx, post(t, s.URL, "the body"))
					require.ErrorIs(t, err, errStale)
					assert.Equal(t, SentNothing, Classify(err))
				}
				assert.Equal(t, 30, asked, "a refused request is not tried again")
				refuse = false
				resp, err := retrier.Do(ctx, post(t, s.URL, "the body"))
				require.NoError(t, err)
				drain(t, resp)
				assert.Equal(t, 31, asked)
				s.Close() // after what came before
				assert.EqualValues(t, 1, served.Load())
				if strings.HasSuffix(name, "HTTP/2") {
					// net/http may dial again for a request that comes before it has put the connection into its pool.
					assert.Less(t, accepted.Load(), int32(10), "the connection carries other requests too")
				}
			})
		}
	}
}

// When the response has ended, a watched round tripper has left nothing in the request's context.
func TestAWatchedRequestLeavesNothingInItsContext(t *testing.T) {
	s := newServer(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	rt := &http.Transport{}
	defer rt.CloseIdleConnections()
	var inner *http.Request
	ctx := BeforeSend(t.Context(), func(bool) error { return nil })
	resp, err := Send(ctx, roundTripper(func(req *http.Request) (*http.Response, error) {
		inner = req
		return rt.RoundTrip(req)
	}), post(t, s.URL, "x"))
	require.NoError(t, err)
	require.NoError(t, inner.Context().Err())
	assert.Equal(t, "ok", drain(t, resp))
	require.Error(t, inner.Context().Err())
	require.NoError(t, ctx.Err())
}
