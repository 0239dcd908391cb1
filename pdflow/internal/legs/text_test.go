// SPDX-License-Identifier: Apache-2.0

package legs

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/internal/contract"
)

// A body that somebody may still read keeps its memory; one that was read to its end gives it to the next leg.
func TestALegsBodyKeepsItsMemoryWhileItIsRead(t *testing.T) {
	splice := func(prompt string) *Text {
		req, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"`+prompt+`"}`))
		require.NoError(t, err)
		text := new(Text)
		if pooled, ok := texts.Get().(*Text); ok {
			text = pooled
		}
		leg := contract.NewLeg(req)
		leg.Set("max_tokens", []byte("1"))
		require.NoError(t, contract.Leg(leg).Splice(&text.Segments))
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
		first.Drop()
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

// What Drop leaves behind is what the next leg starts with, so nothing of a request may be in it: neither its prompt,
// nor its client's key, nor its context.
func TestALegsMemoryHoldsNothingOfTheLastRequest(t *testing.T) {
	req, err := connector.ParseRequest(connector.APICompletions, []byte(`{"prompt":"mine"}`))
	require.NoError(t, err)
	to := &url.URL{Scheme: "http", Host: "p:1"}
	r, text, err := Request(context.WithValue(t.Context(), key{}, "mine"), contract.NewLeg(req), to, true)
	require.NoError(t, err)
	require.Equal(t, "http://p:1/v1/completions", r.URL.String())
	r.Header.Set("Authorization", "Bearer mine")
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err)
	text.Drop()
	require.Empty(t, text.header)
	require.Zero(t, text.url)
	require.Equal(t, http.Request{}, text.req)
	require.Zero(t, text.Len())

	again, text, err := Request(t.Context(), contract.NewLeg(req), to, true)
	require.NoError(t, err)
	again.Header.Set("Authorization", "Bearer mine")
	text.Drop() // keeps its memory, which nobody has read
	require.Equal(t, "Bearer mine", again.Header.Get("Authorization"))
}

type key struct{}
