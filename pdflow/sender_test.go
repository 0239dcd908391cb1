// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"context"
	"io"
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/transport"
)

// tagging sets a header in place, as many round trippers do.
type tagging struct{ next http.RoundTripper }

func (t tagging) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("X-Tag", r.URL.Host)
	return t.next.RoundTrip(r)
}

// Under the race detector this fails if two legs that run together share a header map.
func TestEachLegHasAHeaderOfItsOwn(t *testing.T) {
	tr := transport.New(nil)
	defer tr.Close()
	engine := func(_ *scripted, w http.ResponseWriter, r *http.Request, _ string) {
		assert.Equal(t, r.Host, r.Header.Get("X-Tag"), "the header of this leg")
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(ok))
	}
	x := script(t, &fake{order: connector.Together}, engine, engine, pdflow.WithTransport(tagging{tr}))
	for range 20 {
		assert.Equal(t, http.StatusOK, post(t, x.url, "/v1/completions", completion("hi", "")).status)
	}
}

// A round tripper of the host can ask which leg it sends.
func TestARoundTripperLearnsItsLeg(t *testing.T) {
	tr := transport.New(nil)
	defer tr.Close()
	spy := &legSpy{next: tr}
	side := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") }))
	x := script(t, &preparing{url: side}, answer(ok), answer(ok), pdflow.WithTransport(spy))
	require.Equal(
		t, http.StatusOK, post(t, x.url, "/v1/completions", completion("hi", ""), "X-Request-Id", "mine").status,
	)
	require.Len(t, spy.seen, 3)
	for i, want := range []pdflow.LegKind{"", pdflow.LegPrefill, pdflow.LegDecode} {
		assert.Equal(t, want, spy.seen[i].Leg)
		assert.Equal(t, "mine", spy.seen[i].RequestID)
		assert.Equal(t, "fake", spy.seen[i].Connector)
		assert.Equal(t, 1, spy.seen[i].Attempt)
		assert.Equal(t, spy.seen[0].SessionID, spy.seen[i].SessionID)
	}
	assert.Equal(t, x.pair.Decode.ID, spy.seen[2].Endpoint)
	_, ok := pdflow.LegFromContext(context.Background())
	assert.False(t, ok)
}

type legSpy struct {
	next http.RoundTripper
	seen []pdflow.LegInfo
}

func (s *legSpy) RoundTrip(r *http.Request) (*http.Response, error) {
	if leg, ok := pdflow.LegFromContext(r.Context()); ok {
		s.seen = append(s.seen, leg)
	}
	return s.next.RoundTrip(r)
}
