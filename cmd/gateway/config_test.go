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
	"github.com/pdkit/pdkit/discovery"
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
	_, err := load(filepath.Join(t.TempDir(), "none.yaml"))
	require.ErrorContains(t, err, "none.yaml:1: file: cannot be read; ")
}

// modelYAML is a ModelServer with two engines and further lines of its spec.
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
	want := gatewaySpec{Listen: "127.0.0.1:8000", Admin: "127.0.0.1:9000", MaxBodyBytes: 33554432, DrainTimeout: 30e9}
	assert.Equal(t, want, mustParse(t, modelYAML("")).gateway, "without a Gateway")
	assert.Equal(
		t, want, mustParse(t, modelYAML("")+"---\napiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: "+
			"{listen: null}\n").gateway, "null is left out",
	)
	off := mustParse(t, modelYAML("")+"---\napiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {admin: \"\"}\n")
	assert.Empty(t, off.gateway.Admin, `"" turns it off`)
}

func TestYAMLIsReadAsPeopleWriteIt(t *testing.T) {
	for name, spec := range map[string]string{
		"anchors and merges": `
  trafficPolicy: {x: &defaults {prefill: 30s, decode: 1s}}
  kvConnector:
    timeouts: {<<: *defaults, decode: 5s}
`,
		"aliases":           "  trafficPolicy: {x: &t {prefill: 30s, decode: 5s}}\n  kvConnector: {timeouts: *t}\n",
		"CRLF":              "  kvConnector:\r\n    timeouts:\r\n      prefill: 30s\r\n      decode: 5s\r\n",
		"quoted":            "  'kvConnector': {\"timeouts\": {prefill: '30s', decode: \"5s\"}}\n",
		"JSON":              `  kvConnector: {"timeouts": {"prefill": "30s", "decode": "5s"}}` + "\n",
		"documents' words":  "  kvConnector: {parameters: {}, timeouts: {prefill: 30s, decode: 5s}}\n",
		"empty documents":   "  kvConnector: {timeouts: {prefill: 30s, decode: 5s}}\n---\n# nothing\n---\n",
		"an end of a file":  "  kvConnector: {timeouts: {prefill: 30s, decode: 5s}}\n...\n",
		"comments anywhere": "  # before\n  kvConnector: # here\n    timeouts: {prefill: 30s, decode: 5s} # there\n",
	} {
		t.Run(name, func(t *testing.T) {
			cfg := mustParse(t, modelYAML(strings.TrimPrefix(spec, "\n")))
			limits := cfg.models[0].Main.Timeouts()
			assert.Equal(t, "30s 5s", limits.Prefill.String()+" "+limits.Decode.String())
		})
	}
	bom := mustParse(t, "\ufeff"+modelYAML(""))
	assert.Len(t, bom.models, 1)
	numbers := mustParse(t, modelYAML("")+"---\napiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: "+
		"{maxBodyBytes: 1e6}\n")
	assert.EqualValues(t, 1_000_000, numbers.gateway.MaxBodyBytes)
	hex := mustParse(t, modelYAML("")+"---\napiVersion: pdkit.dev/v1alpha1\nkind: Gateway\nspec: {maxBodyBytes: "+
		"0x1_000}\n")
	assert.EqualValues(t, 4096, hex.gateway.MaxBodyBytes)
}

func TestMetadataAndStatusAreFree(t *testing.T) {
	mustParse(
		t, strings.Replace(modelYAML(""), "metadata: {name: m}",
			"metadata: {name: m, uid: 7, annotations: {a: [1]}}\nstatus: {anything: {at: all}}", 1),
	)
}

func TestStaticEndpoints(t *testing.T) {
	cfg := mustParse(t, `apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
spec:
  discovery:
    static:
      endpoints:
        - {url: "https://p.example/base/", role: prefill, group: a, zone: z1, attributes: {bootstrapPort: "8998"}}
        - {url: "http://[::1]:8200", role: both}
`)
	m := cfg.models[0]
	require.Len(t, m.Endpoints, 2)
	p, d := m.Endpoints[0], m.Endpoints[1]
	assert.Equal(t, "https://p.example/base", p.URL.String())
	assert.Equal(t, []any{discovery.RolePrefill, "a", "z1", "8998"},
		[]any{p.Role, p.Group, p.Zone, p.Attribute("bootstrapPort")})
	assert.Equal(t, []any{discovery.RoleBoth, "[::1]:8200"}, []any{d.Role, d.ID})
	assert.Equal(t, "*", m.Model(), "a model left out serves all names")
}

func TestTypesAreNamesOrClassNames(t *testing.T) {
	for typ, want := range map[string]string{
		"": "http", "http": "http", "nixl": "nixl", "NixlConnector": "nixl", "mooncake": "mooncake",
		"MooncakeConnector":  "mooncake",
		"LMCacheConnectorV1": "lmcache", "SharedStorageConnector": "sharedstorage", "sglang": "sglang",
	} {
		assert.Equal(
			t, want, mustParse(t, modelYAML(fmt.Sprintf("  kvConnector: {type: %q}\n", typ))).models[0].Main.Name, typ,
		)
	}
	for _, key := range []string{"enable_pd", "lmcache.enable_pd", "enable_nixl"} {
		spec := "  kvConnector: {type: LMCacheConnectorV1, config: {" + key + ": true}}\n"
		endpoints := strings.Replace(modelYAML(spec), "role: decode",
			`role: decode, attributes: {receiverInitPorts: "8300", receiverAllocPorts: "8400"}`, 1)
		assert.Equal(t, "lmcache-pd", mustParse(t, endpoints).models[0].Main.Name, key)
	}
}

func TestOlderDefaultsOfTheHTTPConnector(t *testing.T) {
	read := func(spec string) (string, int) {
		m := mustParse(t, modelYAML(spec)).models[0]
		limits := m.Main.Timeouts()
		return limits.Prefill.String(), m.Main.Retry().MaxAttempts
	}
	prefill, attempts := read("  kvConnector: {type: http, config: {requestTimeout: 7s, maxRetries: 3}}\n")
	assert.Equal(t, []any{"7s", 4}, []any{prefill, attempts})
	prefill, attempts = read("  kvConnector: {type: http, config: {requestTimeout: 7s, maxRetries: 3}, timeouts: " +
		"{prefill: 9s}, retry: {maxAttempts: 1}}\n")
	assert.Equal(t, []any{"9s", 1}, []any{prefill, attempts}, "the newer words win")
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
