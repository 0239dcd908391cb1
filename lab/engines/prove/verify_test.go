// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector/names"
	"github.com/pdkit/pdkit/discovery"
)

// proven is what the README's table of connectors says of a connector, by its type.
func proven(t *testing.T) map[string]string {
	t.Helper()
	pins := map[string]string{}
	for _, file := range []string{"../install.sh", "../sglang/packages.txt"} {
		script, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(`(?m)^(\w+)==?([0-9][^ \n]*)`).FindAllSubmatch(script, -1) {
			pins[strings.ToUpper(string(m[1]))] = string(m[2])
		}
	}
	require.Equal(t, engineVersion, pins["VLLM"])
	require.Equal(t, sglangVersion, pins["SGLANG"])
	all := map[string]string{}
	for _, v := range verifications {
		all[v.connector] = os.Expand(v.engine, func(name string) string {
			require.Contains(t, pins, name, "%s: no install.sh has its version", v.connector)
			return pins[name]
		}) + ", on the CPU"
	}
	return all
}

// The README's table of connectors calls a connector proven if it has an entry here, with the installed versions.
// PDKIT_UPDATE=1 writes the file from which it takes them.
func TestTheTableOfTheReadmeTellsWhatIsProven(t *testing.T) {
	const file = "../../../connector/all/testdata/proven.json"
	now, err := json.MarshalIndent(proven(t), "", "  ")
	require.NoError(t, err)
	if os.Getenv("PDKIT_UPDATE") == "1" {
		require.NoError(t, os.WriteFile(file, append(now, '\n'), 0o600))
	}
	old, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, string(now)+"\n", string(old),
		"write it anew, and then the README: PDKIT_UPDATE=1 go test ./lab/engines/prove ./connector/all")
}

// Each verification renders settings for its engines, has a stage that must be proven, and a broken twin whose texts to
// swap are in the settings.
func TestEachVerificationHasABrokenTwin(t *testing.T) {
	for i := range verifications {
		v := &verifications[i]
		t.Run(v.connector, func(t *testing.T) {
			assert.Contains(t, names.Connectors(), v.connector)
			if v.proves != nil {
				return
			}
			p, err := newPair(v, &lab{dir: t.TempDir()})
			require.NoError(t, err)
			good, twins := 0, 0
			for _, s := range v.stages {
				require.NoError(t, p.open(s))
				if s.reason == "" {
					good++
				} else {
					twins++
				}
				for _, e := range p.endpoints {
					next, err := p.wanted(e, s)
					require.NoError(t, err, "%s, %s", s.what, e.ID)
					assert.Contains(t, strings.Join(next.more, " "), "--kv-transfer-config", s.what)
				}
				assert.True(t, s.reason != "" || s.broken == "" && s.connector == "", s.what)
			}
			assert.Positive(t, good)
			assert.Positive(t, twins)
		})
	}
}

// Within five days each connector has had its turn, lmcache on each of them. nixl is proven by prove -all.
func TestEachConnectorHasItsTurn(t *testing.T) {
	for first := 1; first <= 366; first++ {
		seen := map[string]int{"nixl": 1}
		const days = 5
		for day := range days {
			list := today((first+day-1)%366 + 1)
			assert.Len(t, slices.Compact(slices.Sorted(slices.Values(list))), len(list), "one twice on day %d", first)
			for _, name := range list {
				seen[name]++
			}
		}
		for _, name := range connectors() {
			assert.True(t, seen[name] > 0 || first+days > 366, "%s has no turn in the days from day %d", name, first)
		}
		assert.Equal(t, days, seen["lmcache"])
	}
}

// A twin in which nothing is broken is a fault of the table, not a proof.
func TestATwinMustBeBroken(t *testing.T) {
	v := verification{connector: "sharedstorage"}
	p, err := newPair(&v, &lab{dir: t.TempDir()})
	require.NoError(t, err)
	s := stage{config: `{"sharedStoragePath":"$FOLDER"}`, broken: decode, swap: []string{"$FOLDER", "/else"}}
	require.NoError(t, p.open(s))
	next, err := p.wanted(p.endpoints[1], s)
	require.NoError(t, err)
	require.Equal(t, discovery.RoleDecode, p.endpoints[1].Role)
	assert.NotContains(t, strings.Join(next.more, " "), p.expand("$FOLDER"))
	assert.Contains(t, strings.Join(next.more, " "), `"/else"`)
	s.swap = []string{"no such text", ""}
	_, err = p.wanted(p.endpoints[1], s)
	require.ErrorContains(t, err, "do not hold no such text")
	_, err = p.wanted(p.endpoints[0], s)
	require.NoError(t, err, "the other engine is whole")
}

// An engine's files lie in the folder in which it runs.
func TestAnEngineFindsItsFiles(t *testing.T) {
	v := verifications[len(verifications)-1]
	require.Equal(t, "lmcache-pd", v.connector)
	p, err := newPair(&v, &lab{dir: t.TempDir()})
	require.NoError(t, err)
	require.NoError(t, p.open(v.stages[0]))
	next, err := p.wanted(p.endpoints[0], v.stages[0])
	require.NoError(t, err)
	folder, err := next.write(t.TempDir(), "engine-")
	require.NoError(t, err)
	require.Contains(t, next.more, "LMCACHE_CONFIG_FILE="+next.files[0].Name)
	raw, err := os.ReadFile(filepath.Join(folder, next.files[0].Name))
	require.NoError(t, err)
	assert.Contains(t, string(raw), "pd_role: \"sender\"")
}
