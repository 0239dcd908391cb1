// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Middleware and a Mux are ServeHTTP by another door.
func TestEachDoorOfTheHandlerKeepsAlive(t *testing.T) {
	slow := slowPrefill(20*time.Second, streaming(20*time.Second, io.EOF, begun))
	for name, door := range map[string]func(t *testing.T, f *pdflow.Flow) http.Handler{
		"Middleware": func(_ *testing.T, f *pdflow.Flow) http.Handler { return f.Middleware(http.NotFoundHandler()) },
		"Mux": func(t *testing.T, f *pdflow.Flow) http.Handler {
			m := newMux(t)
			require.NoError(t, m.SetRoutes(map[string]pdflow.Server{"": f}))
			return m.Middleware(http.NotFoundHandler())
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeTime(t, "p0 d0", slow, func(t *testing.T, f *fakeFleet, w *keptClient) {
				w.serves(door(t, f.flow), "/v1/completions")
				assert.Equal(t, keepAlive+begun+keepAlive, w.Body.String())
			})
		})
	}
}

// hosted is a host that calls Do, and has Send write what comes of it.
func hosted(t *testing.T, f *pdflow.Flow) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		resp, err := f.Do(context.WithoutCancel(r.Context()), &pdflow.Request{API: connector.APIOf(r.URL.Path),
			Header: r.Header, Body: body})
		if assert.NoError(t, err) {
			_ = resp.Send(w, r)
		}
	})
}

// Send writes while a stream is silent, and nothing before there is one.
func TestSendKeepsAClientAliveInMidStream(t *testing.T) {
	slow := slowPrefill(40*time.Second, streaming(40*time.Second, io.EOF, begun))
	inFakeTime(t, "p0 d0", slow, func(t *testing.T, f *fakeFleet, w *keptClient) {
		w.serves(hosted(t, f.flow), "/v1/completions")
		assert.Equal(t, []string{"40s: " + begun, "55s: " + keepAlive, "1m10s: " + keepAlive}, w.came)
		assert.Equal(t, "disaggregated", w.Result().Header.Get("X-Pd-Mode"))
		assert.Zero(t, w.unbound, "writes without a limit")
		assert.True(t, w.deadline.IsZero())
	})
	silent := func(r *http.Request) (*http.Response, error) {
		resp, err := heads(r)
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(strings.NewReader(begun), resp.Body), resp.Body}
		return resp, err
	}
	inFakeTime(t, "p0 d0", slowPrefill(40*time.Second, silent), func(t *testing.T, f *fakeFleet, w *keptClient) {
		w.write = func() error {
			if time.Since(w.start) > 50*time.Second {
				return errors.New("broken pipe")
			}
			return nil
		}
		w.serves(hosted(t, f.flow), "/v1/completions")
		assert.Equal(t, 55*time.Second, time.Since(w.start), "a client that cannot be written to has left")
		assert.Equal(t, pdflow.CodeClientGone, f.seen.list()[0].Err.Code)
	})
}
