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
)

// Every connector runs the conformance suite, golden exchanges and fuzzing, and is measured against passthrough.
func TestEveryConnectorIsTestedAlike(t *testing.T) {
	for _, name := range connector.Names() {
		dir := folder(t, name)
		files, err := filepath.Glob("../" + dir + "/*_test.go")
		require.NoError(t, err)
		var all strings.Builder
		for _, file := range files {
			raw, err := os.ReadFile(file)
			require.NoError(t, err)
			all.Write(raw)
		}
		for _, call := range []string{"connectortest.Run(", "connectortest.Golden(", "connectortest.Fuzz(", "connectortest.BenchmarkLegs(", "connectortest.LegBudget("} {
			if name != "http" || !strings.Contains(call, "Leg") { // which is what the others are measured against
				assert.Positive(t, strings.Count(all.String(), call), "the tests of connector/%s have no %s", dir, call)
			}
		}
	}
}

// Every connector has golden exchanges of chat and completions, or of the APIs that it carries instead.
func TestEveryConnectorHasGoldenExchangesOfTheCommonAPIs(t *testing.T) {
	for _, name := range connector.Names() {
		dir := folder(t, name)
		files, err := filepath.Glob("../" + dir + "/testdata/golden/*/*.json")
		require.NoError(t, err)
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

// Every connector has a page, which begins with its name and says what moves how.
func TestEveryConnectorHasAPage(t *testing.T) {
	for _, name := range connector.Names() {
		dir := folder(t, name)
		raw, err := os.ReadFile("../" + dir + "/README.md")
		if !assert.NoError(t, err) {
			continue
		}
		title, _, _ := strings.Cut(string(raw), "\n")
		assert.Regexp(t, "^# "+name+": .", title, "connector/%s/README.md", dir)
		for _, part := range []string{"sequenceDiagram", "Is the KV really reused?", "| "} {
			assert.Contains(t, string(raw), part, "connector/%s/README.md", dir)
		}
	}
}

// Every connector renders the engines' launch settings.
func TestEveryConnectorRenders(t *testing.T) {
	for _, name := range connector.Names() {
		c, err := connector.Open(connector.Spec{Type: name})
		if err != nil {
			continue // it needs settings; its conformance test has them
		}
		_, ok := connector.As[connector.Renderer](c)
		assert.True(t, ok, name)
	}
}
