// SPDX-License-Identifier: Apache-2.0

package all_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	_ "github.com/pdkit/pdkit/connector/all"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/names"
)

// shown are the connectors of the README's table.
var shown = []string{"nixl", "mooncake", "lmcache", "multi", "sglang", "trtllm"}

// The tables of connectors agree with the registry, the golden exchanges and the runs with real engines. PDKIT_UPDATE=1
// writes them.
func TestThePagesListTheConnectors(t *testing.T) {
	const begin, end = "<!-- connectors -->\n", "<!-- /connectors -->"
	for file, now := range map[string]string{
		"../../README.md": table(t, shown, ""), "../../docs/connectors.md": table(t, names.Connectors(), "../"),
	} {
		page, err := os.ReadFile(file)
		require.NoError(t, err)
		head, rest, ok := bytes.Cut(page, []byte(begin))
		require.True(t, ok, "%s has no %s", file, begin)
		old, tail, ok := bytes.Cut(rest, []byte(end))
		require.True(t, ok, "%s has no %s", file, end)
		if os.Getenv("PDKIT_UPDATE") == "1" {
			now := slices.Concat(head, []byte(begin), []byte(now), []byte(end), tail)
			require.NoError(t, os.WriteFile(file, now, 0o644))
			continue
		}
		assert.Equal(t, now, string(old), "write it anew: PDKIT_UPDATE=1 go test ./connector/all")
	}
}

// Every connector that the list of runs with real engines names is registered and has golden exchanges of those
// engines.
func TestProvenConnectorsAreRegistered(t *testing.T) {
	for name, engine := range proven(t) {
		assert.Contains(t, names.Connectors(), name)
		assert.NotEmpty(t, engine)
	}
}

func proven(t *testing.T) map[string]string {
	t.Helper()
	raw, err := os.ReadFile("testdata/proven.json")
	require.NoError(t, err)
	var m map[string]string
	require.NoError(t, json.Unmarshal(raw, &m))
	return m
}

// table has a row for each of names. up leads from the page to the root.
func table(t *testing.T, names []string, up string) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| type | engine class | legs | engine versions | evidence | page |\n|---|---|---|---|---|---|\n")
	real := proven(t)
	for _, name := range names {
		at := "connector/" + strings.TrimSuffix(page(t, name), "/README.md")
		versions, configs := goldens(t, name)
		evidence := "golden"
		if engine, ok := real[name]; ok {
			evidence = "proven: " + engine
		} else if len(versions) == 0 {
			evidence = "—"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s | %s | [%s](%s) |\n", name,
			dash(classNames(name), ", "), dash(legs(name, configs), " or "), dash(versions, ", "), evidence, at, up+at)
	}
	return b.String()
}

func dash(list []string, separator string) string {
	return cmp.Or(strings.Join(list, separator), "—")
}

// folder returns the folder of a connector's package, which has its type and its README. If a connector requires a
// configuration, its golden exchanges identify the folder.
func folder(t *testing.T, name string) string {
	t.Helper()
	c, err := connector.Open(config.Spec{Type: name})
	if err == nil {
		typ := reflect.TypeOf(c)
		for typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		const root = "github.com/pdkit/pdkit/connector/"
		require.True(t, strings.HasPrefix(typ.PkgPath(), root), "%s is of package %s", name, typ.PkgPath())
		return strings.TrimPrefix(typ.PkgPath(), root)
	}
	dir := strings.ReplaceAll(name, "-", "")
	require.DirExists(t, "../"+dir, "%s needs a configuration, so its package must be found by its name", name)
	return dir
}

// classNames are the engines' class names for a connector, with any settings.
func classNames(name string) (list []string) {
	for _, class := range names.Classes() {
		for _, settings := range []string{"", `{"enable_pd":true}`} {
			if names.Resolve(class, json.RawMessage(settings)) == name && !slices.Contains(list, class) {
				list = append(list, class)
			}
		}
	}
	return list
}

var engineNames = map[string]string{"vllm": "vLLM", "vllm-ascend": "vLLM Ascend", "sglang": "SGLang",
	"tensorrt-llm": "TensorRT-LLM", "trtllm": "TensorRT-LLM",
	"lmcache": "LMCache", "mooncake": "Mooncake", "tpu-inference": "tpu-inference", "kvbm": "KVBM"}

// versioned matches the names of golden folders: vllm-0.32.0, or vllm-pr24520 for a pull request that is not merged.
var versioned = regexp.MustCompile(`^(.+?)-(v?\d.*|pr\d+)$`)

// goldens returns the engine versions of a connector's golden exchanges, and the configurations in them.
func goldens(t *testing.T, name string) (versions []string, configs []json.RawMessage) {
	t.Helper()
	for _, file := range goldenFiles(t, name) {
		m := versioned.FindStringSubmatch(filepath.Base(filepath.Dir(file)))
		require.NotNil(t, m, "%s: the folder is not named <engine>-<version>", file)
		version := cmp.Or(engineNames[m[1]], m[1]) + " " + strings.Replace(m[2], "pr", "PR ", 1)
		if !slices.Contains(versions, version) {
			versions = append(versions, version)
		}
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		var g struct {
			Config json.RawMessage `json:"config"`
		}
		require.NoError(t, json.Unmarshal(raw, &g), file)
		configs = append(configs, g.Config)
	}
	return versions, configs
}

var orders = map[connector.Order]string{
	connector.PrefillThenDecode: "P, then D",
	connector.Together:          "P and D together",
	connector.DecodeFirst:       "D; if cold P, then D",
	connector.DecodeThenPrefill: "D, which asks for P",
}

// legs are a connector's orders: first without settings, then with the settings of its golden exchanges.
func legs(name string, configs []json.RawMessage) (list []string) {
	for _, settings := range append([]json.RawMessage{nil}, configs...) {
		c, err := connector.Open(config.Spec{Type: name, Config: settings})
		if err != nil {
			continue // of those that need settings, and of golden exchanges about them
		}
		if text := orders[c.Traits().Order]; !slices.Contains(list, text) {
			list = append(list, text)
		}
	}
	return list
}
