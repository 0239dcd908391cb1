// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"

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
