// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/clientstest"
)

// prompt is longer than a block of KV.
var prompt = strings.Repeat("a cat on a mat that ", 40)

// What the libraries raise says whether they took a cut response for whole.
func TestClientLibrariesSeeACut(t *testing.T) {
	openai, anthropic := clientstest.Start(t, clientstest.OpenAIPython), clientstest.Start(t, clientstest.Anthropic)
	libraries := map[string]*clientstest.Client{"completions": openai, "chat": openai, "messages": anthropic}
	for _, api := range []string{"completions", "chat", "messages"} {
		t.Run(api, func(t *testing.T) {
			w := start(t, options{})
			for _, stream := range []bool{false, true} {
				question := clientstest.Question{URL: w.url + prefix, API: api, Prompt: prompt, Stream: stream}
				said := libraries[api].Ask(t, question)
				require.Nil(t, said.Error)
				require.NotEmpty(t, said.Texts)
				w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
				cut := libraries[api].Ask(t, question)
				require.NotNil(t, cut.Error, "%q was taken for whole", cut.Texts)
			}
		})
	}
}
