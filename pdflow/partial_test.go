// SPDX-License-Identifier: Apache-2.0

package pdflow_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

// No leg asks for a part of a response, so a 206 holds nobody knows which part: it is garbage.
func TestAPartialResponseIsNotPassedOn(t *testing.T) {
	partial := refuses(http.StatusPartialContent, ok)
	for name, c := range map[string]struct {
		p, d handler
		code string
	}{
		"of P": {partial, answer(ok), "prefill_failed"},
		"of D": {answer(ok), partial, "decode_failed"},
	} {
		t.Run(name, func(t *testing.T) {
			r := post(t, script(t, &fake{}, c.p, c.d).url, "/v1/completions", completion("a", ""))
			require.Equal(t, http.StatusBadGateway, r.status, r.body)
			_, code := r.fault(t)
			require.Equal(t, c.code, code)
		})
	}
}
