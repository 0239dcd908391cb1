// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

// Every connector runs the conformance suite, golden exchanges and fuzzing.
func TestEveryConnectorIsTestedAlike(t *testing.T) {
	for _, name := range names.Connectors() {
		dir := folder(t, name)
		files, err := filepath.Glob("../" + dir + "/*_test.go")
		require.NoError(t, err)
		var all strings.Builder
		for _, file := range files {
			raw, err := os.ReadFile(file)
			require.NoError(t, err)
			all.Write(raw)
		}
		for _, call := range []string{"connectortest.Run(", "connectortest.Golden(", "connectortest.Fuzz("} {
			assert.Positive(t, strings.Count(all.String(), call), "the tests of connector/%s have no %s", dir, call)
		}
	}
}

// Every connector has golden exchanges of chat and completions, or of the APIs that it supports instead.
func TestEveryConnectorHasGoldenExchangesOfTheCommonAPIs(t *testing.T) {
	for _, name := range names.Connectors() {
		dir := folder(t, name)
		files := goldenFiles(t, name)
		seen := map[string]bool{}
		for _, file := range files {
			raw, err := os.ReadFile(file)
			require.NoError(t, err)
			var g struct {
				Path string `json:"path"`
			}
			require.NoError(t, json.Unmarshal(raw, &g))
			seen[g.Path] = true
		}
		for _, api := range []connector.API{connector.APIChat, connector.APICompletions} {
			assert.True(t, seen[api.Path()], "connector/%s has no golden exchange of %s", dir, api)
		}
	}
}

// Every connector has a page, which begins with the connector's name and says which engine moves the KV and how.
func TestEveryConnectorHasAPage(t *testing.T) {
	for _, name := range names.Connectors() {
		file := page(t, name)
		raw, err := os.ReadFile("../" + file)
		if !assert.NoError(t, err) {
			continue
		}
		title, _, _ := strings.Cut(string(raw), "\n")
		assert.Regexp(t, "^# "+name+": .", title, "connector/%s", file)
		for _, part := range []string{"sequenceDiagram", "Is the KV really reused?", "| "} {
			assert.Contains(t, string(raw), part, "connector/%s", file)
		}
	}
}

// page returns a connector's page, below the folder connector: the README of its package, or <name>.md beside it where
// a package has several connectors.
func page(t *testing.T, name string) string {
	t.Helper()
	dir := folder(t, name)
	if own := dir + "/" + name + ".md"; exists("../" + own) {
		return own
	}
	return dir + "/README.md"
}

// goldenFiles returns a connector's golden exchanges: those of its package, or of testdata/<name> where a package has
// several connectors.
func goldenFiles(t *testing.T, name string) []string {
	t.Helper()
	data := "../" + folder(t, name) + "/testdata/"
	own := data + name
	if !exists(own) {
		own = data + "golden"
	}
	files, err := filepath.Glob(own + "/*/*.json")
	require.NoError(t, err)
	return files
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// needed are the settings of the connectors that require some.
var needed = map[string]string{
	"multi":            `{"connectors":[{"type":"nixl"},{"type":"sharedstorage"}]}`,
	"ascend-layerwise": `{"callbackListen":"127.0.0.1:8900","callbackURL":"http://127.0.0.1:8900"}`,
	"relay":            `{"kv_connector":"HouseConnector"}`, // for launch settings alone
}
