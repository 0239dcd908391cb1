// SPDX-License-Identifier: Apache-2.0

// Package clientstest lets tests of the examples ask a gateway through the client libraries that its users have. Such a
// test runs in a folder beside examples/clients.
package clientstest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Libraries is a process with the client libraries of OpenAI and Anthropic for Python.
type Libraries struct {
	in  *json.Encoder
	out *json.Decoder
}

// Start starts one, or skips the test. Where CI=true the libraries must be there: examples/clients/install.sh installs
// them.
func Start(t *testing.T) *Libraries {
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
	cmd := exec.CommandContext(t.Context(), python, "../clients/ask.py") //nolint:gosec // the path is a constant
	cmd.Env = append(os.Environ(), "NO_PROXY=*")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Wait() })
	return &Libraries{json.NewEncoder(in), json.NewDecoder(out)}
}

// Ask returns the text that came and the class of the exception that the library raised, "" for none.
func (l *Libraries) Ask(t *testing.T, url, api string, stream bool) (text, failure string) {
	t.Helper()
	require.NoError(t, l.in.Encode(map[string]any{"url": url, "key": "secret", "api": api, "stream": stream}))
	var said struct{ Text, Error string }
	require.NoError(t, l.out.Decode(&said))
	return said.Text, said.Error
}
