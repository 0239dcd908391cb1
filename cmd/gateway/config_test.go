// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/config/yamlfile"
)

var update = flag.Bool("update", false, "write the golden files anew")

// golden compares text with a file of testdata.
func golden(t *testing.T, file, text string) {
	t.Helper()
	text = strings.ReplaceAll(text, "stored-for-tests, ", "") // a connector of these tests' own
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, string(want), text)
}

// Each testdata/faults/NAME.yaml is a wrong file, and NAME.txt beside it all that must be said of it, a line each.
func TestEveryFaultIsToldWithLineFieldAndRemedy(t *testing.T) {
	files, err := filepath.Glob("testdata/faults/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			require.NoError(t, err)
			_, err = parse("config.yaml", data)
			require.Error(t, err)
			assert.NotContains(t, err.Error(), "hunter2", "values may be passwords")
			for line := range strings.SplitSeq(err.Error(), "\n") {
				assert.Regexp(t, `^config\.yaml:[1-9][0-9]*: [^ ].*: .+; .+$`, line,
					"FILE:LINE: field.path: what is wrong; what would be right")
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", err.Error()+"\n")
		})
	}
}

func TestAMissingFileIsAFault(t *testing.T) {
	_, err := load(filepath.Join(t.TempDir(), "none.yaml"), nil)
	require.ErrorContains(t, err, "none.yaml:1: file: cannot be read; ")
}

// modelYAML is a ModelServer with two engines that nobody asks, and further lines of its spec.
func modelYAML(spec string) string {
	return `apiVersion: networking.matrixinfer.ai/v1alpha1
kind: ModelServer
metadata: {name: m}
spec:
  model: m
  discovery:
    static:
      endpoints:
        - {url: "http://127.0.0.1:8100", role: prefill}
        - {url: "http://127.0.0.1:8200", role: decode}
` + spec
}

func mustParse(t *testing.T, yaml string) *configuration {
	t.Helper()
	cfg, err := parse("config.yaml", []byte(yaml))
	require.NoError(t, err)
	return cfg
}

func TestDefaultsOfTheGateway(t *testing.T) {
	const head = "apiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: "
	want := gatewaySpec{Listen: "127.0.0.1:8000", Admin: "127.0.0.1:9000", MaxBodyBytes: 33554432, DrainTimeout: 30e9}
	assert.Equal(t, want, mustParse(t, modelYAML("")).gateway, "without a Gateway")
	assert.Equal(t, want, mustParse(t, head+"{listen: null}\n---\n"+modelYAML("")).gateway, "null is left out")
	off := mustParse(t, head+"{admin: \"\"}\n---\n"+modelYAML(""))
	assert.Empty(t, off.gateway.Admin, `"" turns it off`)
}

func TestYAMLIsReadAsPeopleWriteIt(t *testing.T) {
	const limits = "timeouts: {prefill: 30s, decode: 5s}}"
	for name, yaml := range map[string]string{
		"aliases": modelYAML("  trafficPolicy: {x: &t {prefill: 30s, decode: 5s}}\n" +
			"  kvConnector: {timeouts: *t}\n"),
		"CRLF":              modelYAML("  kvConnector:\r\n    timeouts:\r\n      prefill: 30s\r\n      decode: 5s\r\n"),
		"documents' words":  modelYAML("  kvConnector: {parameters: {}, " + limits + "\n"),
		"empty documents":   modelYAML("  kvConnector: {" + limits + "\n---\n# nothing\n---\n"),
		"an end of a file":  modelYAML("  kvConnector: {" + limits + "\n...\n"),
		"a byte order mark": "\ufeff" + modelYAML("  kvConnector: {"+limits+"\n"),
	} {
		cfg := mustParse(t, yaml)
		got := cfg.models[0].Main.Timeouts()
		assert.Equal(t, "30s 5s", got.Prefill.String()+" "+got.Decode.String(), name)
	}
	for number, want := range map[string]int64{"1e6": 1_000_000, "0x1_000": 4096} {
		cfg := mustParse(t, gatewayYAML(", maxBodyBytes: "+number)+modelYAML(""))
		assert.Equal(t, want, cfg.gateway.MaxBodyBytes)
	}
}

func TestMetadataAndStatusAreFree(t *testing.T) {
	mustParse(
		t, strings.Replace(modelYAML(""), "metadata: {name: m}",
			"metadata: {name: m, uid: 7, annotations: {a: [1]}}\nstatus: {anything: {at: all}}", 1),
	)
}

func TestTypesAreNamesOrClassNames(t *testing.T) {
	for typ, want := range map[string]string{
		"": "http", "http": "http", "nixl": "nixl", "NixlConnector": "nixl", "mooncake": "mooncake",
		"MooncakeConnector":  "mooncake",
		"LMCacheConnectorV1": "lmcache", "SharedStorageConnector": "sharedstorage", "sglang": "sglang",
	} {
		cfg := mustParse(t, modelYAML(fmt.Sprintf("  kvConnector: {type: %q}\n", typ)))
		assert.Equal(t, want, cfg.models[0].Main.Name, typ)
	}
}

func FuzzParse(f *testing.F) {
	for _, dir := range []string{"testdata/faults/*.yaml", "testdata/documents/*.yaml"} {
		files, err := filepath.Glob(dir)
		require.NoError(f, err)
		for _, file := range files {
			data, err := os.ReadFile(file)
			require.NoError(f, err)
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := parse("config.yaml", data)
		if err == nil {
			require.NotEmpty(t, cfg.models)
			require.NoError(t, printCheck(new(strings.Builder), cfg))
			return
		}
		var fs yamlfile.Faults
		require.ErrorAs(t, err, &fs)
		require.NotEmpty(t, fs)
		for _, one := range fs {
			require.Positive(t, one.Line)
			require.NotEmpty(t, one.Path)
			require.NotContains(t, one.Error(), "\n", "one line for each fault")
		}
	})
}
