// SPDX-License-Identifier: Apache-2.0

package connectortest_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/connectortest"
	"github.com/pdkit/pdkit/connector/connectortest/testdata/wrong"
)

func newToy(config json.RawMessage) (connector.KVConnector, error) { return wrong.New(config) }

func TestGoldenFilesOfTheToy(t *testing.T) { connectortest.Golden(t, newToy, "testdata/golden") }

// Whatever a golden file says otherwise is found.
func TestAGoldenFileThatIsNotSoIsFound(t *testing.T) {
	good, err := os.ReadFile("testdata/golden/toy-1.0/completions.json")
	require.NoError(t, err)
	for name, c := range map[string]struct{ old, now, says string }{
		"another order of members": {`"max_tokens": 1, "seed"`, `"seed_": 0, "max_tokens": 1, "seed"`,
			"the prefill leg: body"},
		"another spelling": {`"remote_blocks": [1, 2], "big": 90071992547409931234`,
			`"remote_blocks": [1, 2], "big": 9.0071992547409931e19`, "the decode leg: body"},
		"another header": {`"decode": {`, `"decode": {"header": {"X-Toy": "1"},`, "the decode leg: header"},
		"another path":   {`"decode": {`, `"decode": {"path": "/v2",`, "the decode leg: path"},
		"an encode leg":  {`"decode": {`, `"encode": [{"body": {}}], "decode": {`, "0 encode legs, want 1"},
		"a first try":    {`"decode": {`, `"first": {"body": {}}, "decode": {`, "decode does not come first"},
		"a refusal":      {`"decode": {`, `"refused": "no usable", "decode": {`, `want an error with "no usable"`},
		"unsupported":    {`"decode": {`, `"unsupported": "n", "decode": {`, `unsupported for "", want "n"`},
		"another session": {"00112233445566778899aabbccddeeff", "ff112233445566778899aabbccddeeff",
			"the prefill leg: body"},
		"half a session":           {"00112233445566778899aabbccddeeff", "0011", "random"},
		"a call that is not there": {"/engine", "/other", "calls has no GET"},
		"no API's path":            {"/v1/completions", "/v1/complete", "path"},
		"no settings":              {`"blockSize"`, `"blockSise"`, "config: blockSise"},
		"an unknown member":        {`"source"`, `"sauce"`, "unknown field"},
		"no source":                {"the toy's own", "", "source"},
		"no URL":                   {"http://10.0.0.1:8100", "10.0.0.1", "prefillEndpoint"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, string(good), c.old)
			file := filepath.Join(t.TempDir(), "toy-1.0", "a.json")
			require.NoError(t, os.Mkdir(filepath.Dir(file), 0o755))
			require.NoError(t, os.WriteFile(file, []byte(strings.Replace(string(good), c.old, c.now, 1)), 0o600))
			assert.ErrorContains(t, connectortest.CheckGolden(t.Context(), newToy, file), c.says)
		})
	}
	file := filepath.Join(t.TempDir(), "a.json")
	require.NoError(t, os.WriteFile(file, good, 0o600))
	assert.ErrorContains(t, connectortest.CheckGolden(t.Context(), newToy, file), "<engine>-<version>")
}
