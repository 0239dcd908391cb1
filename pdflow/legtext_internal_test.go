// SPDX-License-Identifier: Apache-2.0

package pdflow

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/transport"
)

// A body that somebody may still read keeps its memory; one that was read to its end gives it to the next leg.
func TestALegsBodyKeepsItsMemoryWhileItIsRead(t *testing.T) {
	splice := func(prompt string) *legText {
		req, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
		require.NoError(t, err)
		text := new(legText)
		if pooled, ok := legTexts.Get().(*legText); ok {
			text = pooled
		}
		leg := connector.NewLeg(req)
		leg.Set("max_tokens", []byte("1"))
		require.NoError(t, leg.Splice(&text.Segments))
		return text
	}
	for _, whole := range []bool{false, true} {
		first := splice("mine")
		a, err := first.open()
		require.NoError(t, err)
		b, err := first.open()
		require.NoError(t, err)
		read, err := io.ReadAll(a)
		require.NoError(t, err)
		var begun [5]byte
		_, err = io.ReadFull(b, begun[:])
		require.NoError(t, err)
		if whole {
			rest, err := io.ReadAll(b)
			require.NoError(t, err)
			require.Equal(t, read, append(begun[:], rest...))
		}
		first.over()
		if whole {
			require.Zero(t, first.Len(), "nothing of a request stays in memory that waits for another")
			n, err := b.Read(begun[:])
			require.Zero(t, n)
			require.ErrorIs(t, err, io.EOF)
			continue
		}
		for range 10 { // would take the memory if it were free
			splice("another's")
		}
		rest := make([]byte, len(read))
		n, err := b.Read(rest)
		require.NoError(t, err)
		require.Equal(t, string(read), string(begun[:])+string(rest[:n]))
	}
}

// What over leaves behind is what the next leg starts with, so nothing of a request may be in it: neither its prompt, nor
// its client's key, nor its context.
func TestALegsMemoryHoldsNothingOfTheLastRequest(t *testing.T) {
	req, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"mine"}`))
	require.NoError(t, err)
	f := &Flow{tel: &telemetry{}}
	x := &exchange{f: f, call: call{req: req, header: http.Header{"Authorization": {"Bearer mine"}},
		door: newDoor(transport.New(nil))}}
	a := &attempt{x: x, f: f}
	to := discovery.Endpoint{ID: "p", URL: &url.URL{Scheme: "http", Host: "p:1"}}
	ctx := context.WithValue(t.Context(), legKey{}, "mine")

	leg := connector.NewLeg(req)
	leg.SetHeader("X-Own", "mine")
	r, text, e := a.request(ctx, to, leg, &LegOutcome{Leg: LegPrefill})
	require.Nil(t, e)
	require.Equal(t, "mine", r.Header.Get("X-Own"))
	require.Equal(t, "Bearer mine", r.Header.Get("Authorization"))
	first := r.Body
	_, err = io.Copy(io.Discard, first)
	require.NoError(t, err)
	text.over()
	require.Empty(t, text.header)
	require.Zero(t, text.url)
	require.Equal(t, http.Request{}, text.req)
	require.Zero(t, text.Len())
}
