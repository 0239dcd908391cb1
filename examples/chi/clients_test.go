// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/examples/clients/clientstest"
	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// What the libraries raise says whether they took a cut response for whole.
func TestClientLibrariesSeeACut(t *testing.T) {
	libraries := clientstest.Start(t)
	for _, api := range []string{"completions", "chat", "messages"} {
		t.Run(api, func(t *testing.T) {
			w := start(t, options{})
			for _, stream := range []bool{false, true} {
				text, failure := libraries.Ask(t, w.url+prefix, api, stream)
				require.Empty(t, failure)
				require.NotEmpty(t, text)
				w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
				cut, failure := libraries.Ask(t, w.url+prefix, api, stream)
				require.NotEmpty(t, failure, "%q was taken for whole", cut)
			}
		})
	}
}
