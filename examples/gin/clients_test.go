// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow/enginesim"
)

// asker is a process with the client libraries of OpenAI and Anthropic for Python.
type asker struct {
	in  *json.Encoder
	out *json.Decoder
}

// libraries starts one, or skips. Where CI=true the libraries must be there: examples/clients/install.sh installs
// them.
func libraries(t *testing.T) *asker {
	t.Helper()
	python, err := filepath.Abs("../../.tools/clients/bin/python")
	require.NoError(t, err)
	if _, err := os.Stat(filepath.Join(filepath.Dir(python), "..", ".done")); err != nil {
		const missing = "no Python with openai and anthropic: run examples/clients/install.sh"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	cmd := exec.CommandContext(t.Context(), python, "../clients/ask.py")
	cmd.Env = append(os.Environ(), "NO_PROXY=*")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	return &asker{json.NewEncoder(in), json.NewDecoder(out)}
}

// ask returns the text that came and the class of the exception that the library raised, "" for none.
func (a *asker) ask(t *testing.T, url, api string, stream bool) (text, failure string) {
	t.Helper()
	require.NoError(t, a.in.Encode(map[string]any{"url": url, "key": "secret", "api": api, "stream": stream}))
	var said struct{ Text, Error string }
	require.NoError(t, a.out.Decode(&said))
	return said.Text, said.Error
}

// What the libraries raise says whether they took a cut response for whole.
func TestClientLibrariesSeeACut(t *testing.T) {
	a := libraries(t)
	for name, c := range map[string]struct {
		around func(http.Handler) http.Handler
		cut    string // the error of a cut stream
	}{"gin.Default()": {plain, "APIConnectionError"}, "a writer without Unwrap": {hiding, "APIError"}} {
		for _, api := range []string{"completions", "chat", "messages"} {
			t.Run(name+", "+api, func(t *testing.T) {
				w := start(t, options{}, c.around)
				for _, stream := range []bool{false, true} {
					text, failure := a.ask(t, w.url, api, stream)
					require.Empty(t, failure)
					require.NotEmpty(t, text)
					w.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 3})
					cut, failure := a.ask(t, w.url, api, stream)
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
