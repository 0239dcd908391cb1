// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/examples/clients/clientstest"
	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// What the libraries raise says whether they took a cut response for whole.
func TestClientLibrariesSeeACut(t *testing.T) {
	libraries := clientstest.Start(t)
	for name, c := range map[string]struct {
		around func(http.Handler) http.Handler
		cut    string // the error of a cut stream
	}{"gin.Default()": {plain, "APIConnectionError"}, "a writer without Unwrap": {hiding, "APIError"}} {
		for _, api := range []string{"completions", "chat", "messages"} {
			t.Run(name+", "+api, func(t *testing.T) {
				w := start(t, options{}, c.around)
				for _, stream := range []bool{false, true} {
					text, failure := libraries.Ask(t, w.url, api, stream)
					require.Empty(t, failure)
					require.NotEmpty(t, text)
					w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
					cut, failure := libraries.Ask(t, w.url, api, stream)
					require.NotEmpty(t, failure, "%q was taken for whole", cut)
					if stream && api != "messages" { // Anthropic's library has other names
						require.Equal(t, c.cut, failure)
						require.NotEmpty(t, cut)
					}
				}
			})
		}
	}
}
