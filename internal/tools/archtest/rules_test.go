// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// made returns the graph of lines "package: its imports". Packages whose path's first element has no dot are the root
// module's, except those in std, which are the standard library's.
func made(t *testing.T, lines ...string) graph {
	t.Helper()
	std := []string{"net/http", "net/http/httptest", "testing", "os"}
	g := graph{}
	full := func(name string) string {
		if first, _, _ := strings.Cut(name, "/"); strings.Contains(first, ".") || slices.Contains(std, name) {
			return name
		}
		return module + "/" + name
	}
	add := func(name string) *pkg {
		path := full(name)
		if g[path] == nil {
			p := &pkg{ImportPath: path, Standard: slices.Contains(std, name)}
			if !p.Standard {
				p.Module = &struct{ Path string }{moduleOf(path)}
			}
			g[path] = p
		}
		return g[path]
	}
	for _, line := range lines {
		name, imports, ok := strings.Cut(line, ":")
		require.True(t, ok, line)
		p := add(name)
		for to := range strings.FieldsSeq(imports) {
			p.Imports = append(p.Imports, add(to).ImportPath)
		}
	}
	return g
}

// moduleOf returns the path of the module of a package: the root module, a listed dependency, or else the package's own
// path.
func moduleOf(path string) string {
	if path == module || strings.HasPrefix(path, module+"/") {
		return module
	}
	best := path
	for _, d := range dependencies {
		if path == d.module || strings.HasPrefix(path, d.module+"/") && !strings.Contains(path, "/sdk") {
			best = d.module
		}
	}
	return best
}

func TestAGraphAsDesignedBreaksNoRule(t *testing.T) {
	g := made(t,
		"discovery: os", "discovery/static: discovery", "discovery/discoverytest: discovery testing",
		"internal/jsonedit: os",
		"config: os", "config/yamlfile: config go.yaml.in/yaml/v3",
		"discovery/file: discovery config config/yamlfile",
		"connector: config discovery internal/jsonedit net/http",
		"connector/nixl: connector internal/jsonedit github.com/tidwall/gjson",
		"connector/connectortest: connector pdflow testing",
		"transport: net/http go.opentelemetry.io/otel/attribute",
		"pdflow: connector discovery transport github.com/tidwall/gjson go.opentelemetry.io/otel/trace",
		"pdflow/pick: pdflow discovery", "enginesim: net/http", "connector/all: connector/nixl")
	assert.Empty(t, breaches(g, rules, dependencies))
}

func TestEachRuleIsHeld(t *testing.T) {
	for name, c := range map[string]struct {
		graph []string
		says  []string // each in the one breach that is found
	}{
		"discovery knows no connectors": {
			[]string{"discovery/static: connector"},
			[]string{"discovery/static must not import connector", "lowest layer"}},
		"discovery knows no flow": {
			[]string{"discovery: pdflow"}, []string{"discovery must not import pdflow"}},
		"discovery does not speak to engines": {
			[]string{"discovery/registration: transport"}, []string{"must not import transport"}},
		"a connector knows no flow": {
			[]string{"connector/moriio: pdflow"},
			[]string{"connector/moriio must not import pdflow", "the flow executes"}},
		"nor a package below it": {
			[]string{"connector/moriio: pdflow/pick"}, []string{"connector/moriio must not import pdflow/pick"}},
		"a connector has no transport": {
			[]string{"connector: transport"}, []string{"connector must not import transport"}},
		"not through another package either": {
			[]string{"connector/moriio: internal/wire", "internal/wire: example.org/wire", "example.org/wire: " +
				module + "/transport"},
			[]string{"connector/moriio must not import transport", "chain: connector/moriio → internal/wire → " +
				"example.org/wire → transport"}},
		"transport knows no connector": {
			[]string{"transport: connector"}, []string{"transport must not import connector", "bytes for anyone"}},
		"transport knows no discovery": {
			[]string{"transport: discovery"}, []string{"transport must not import discovery"}},
		"the flow knows no protocol": {
			[]string{"pdflow: connector/nixl"}, []string{"pdflow must not import connector/nixl", "lacks an ability"}},
		"what reads settings knows nobody": {
			[]string{"config: discovery"},
			[]string{"config must not import discovery", "below all"}},
		"the simulated engines share nothing with the gateway": {
			[]string{"enginesim: connector"}, []string{"enginesim must not import connector"}},
		"nor do their rooms": {
			[]string{simRooms + "proto/nixl: connector"}, []string{simRooms + "proto/nixl must not import connector"}},
		"a room does not import the face": {
			[]string{simRooms + "core: enginesim"},
			[]string{simRooms + "core must not import enginesim", "below their face"}},
		"the core knows no protocol": {
			[]string{simRooms + "core: " + simRooms + "proto/nixl"},
			[]string{"must not import", "no client API, no protocol"}},
		"client APIs know no protocol": {
			[]string{simRooms + "api: " + simRooms + "proto"},
			[]string{simRooms + "api must not import", "wraps its parser"}},
		"a protocol does not see the server": {
			[]string{simRooms + "proto/sglang: " + simRooms + "server"},
			[]string{"must not import " + simRooms + "server", "as a host"}},
		"what protocols share knows none of them": {
			[]string{simRooms + "proto: " + simRooms + "proto/nixl"},
			[]string{simRooms + "proto must not import", "knows none of them"}},
		"the server knows no protocol": {
			[]string{simRooms + "server: " + simRooms + "proto/nixl"},
			[]string{simRooms + "server must not import", "package enginesim knows"}},
		"a room does not know the flow": {
			[]string{"pdflow/internal/stream: pdflow"},
			[]string{"pdflow/internal/stream must not import pdflow", "by itself"}},
		"a room does not know another one": {
			[]string{"pdflow/internal/stream: pdflow/internal/live"},
			[]string{"pdflow/internal/stream must not import pdflow/internal/live"}},
		"the simulated engines are for tests": {
			[]string{"pdflow: enginesim"}, []string{"pdflow must not import enginesim", "module of their own"}},
		"internal is below all": {
			[]string{"internal/telemetry: discovery"}, []string{"internal/telemetry must not import discovery"}},
		"nothing imports examples": {
			[]string{"pdflow: cmd/gateway"}, []string{"pdflow must not import cmd/gateway"}},
		"no testing in a library": {
			[]string{"enginesim: testing"}, []string{"enginesim must not import testing", "flags"}},
		"no httptest in a library": {
			[]string{"enginesim: net/http/httptest"}, []string{"must not import net/http/httptest"}},
		"discovery reads no JSON by path": {
			[]string{"discovery/file: github.com/tidwall/gjson"},
			[]string{"discovery/file must not import github.com/tidwall/gjson"}},
		"transport edits no JSON": {
			[]string{"transport: github.com/tidwall/sjson"},
			[]string{"transport must not import github.com/tidwall/sjson"}},
		"a connector measures nothing": {
			[]string{"connector/nixl: go.opentelemetry.io/otel/attribute"},
			[]string{"connector/nixl must not import go.opentelemetry.io/otel/attribute"}},
		"pickers measure nothing": {
			[]string{"pdflow/pick: go.opentelemetry.io/otel/metric"}, []string{"pdflow/pick must not import"}},
		"testify stays in tests": {
			[]string{"connector/connectortest: github.com/stretchr/testify/require"},
			[]string{"github.com/stretchr/testify", "_test.go"}},
		"goleak stays in tests": {
			[]string{"discovery/discoverytest: go.uber.org/goleak"}, []string{"go.uber.org/goleak", "_test.go"}},
		"an unlisted module asks for its reason": {
			[]string{"discovery/dns: github.com/coredns/caddy"},
			[]string{"discovery/dns imports github.com/coredns/caddy", "who needs it and why"}},
		"one package reads YAML": {
			[]string{"discovery/file: go.yaml.in/yaml/v3"},
			[]string{"discovery/file must not import go.yaml.in/yaml/v3", "one place"}},
		"nor does a source of its own": {
			[]string{"discovery/static: go.yaml.in/yaml/v3"},
			[]string{"discovery/static must not import go.yaml.in/yaml/v3"}},
		"one source speaks DNS": {
			[]string{"transport: github.com/miekg/dns"}, []string{"transport must not import github.com/miekg/dns"}},
		"one source watches files": {
			[]string{"discovery: github.com/fsnotify/fsnotify"},
			[]string{"discovery must not import github.com/fsnotify/fsnotify"}},
	} {
		t.Run(name, func(t *testing.T) {
			found := breaches(made(t, c.graph...), rules, dependencies)
			found = withoutForeign(found)
			require.Len(t, found, 1)
			for _, part := range c.says {
				assert.Contains(t, found[0], part)
			}
		})
	}
}

// withoutForeign drops breaches about made-up modules and about internal/wire, which the case does not test.
func withoutForeign(found []string) []string {
	var rest []string
	for _, breach := range found {
		if !strings.Contains(breach, "imports example.org/") && !strings.HasPrefix(breach, "internal/wire must") {
			rest = append(rest, breach)
		}
	}
	return rest
}

func TestTheCoreCompilesNothingHeavy(t *testing.T) {
	for _, heavy := range []string{
		"k8s.io/client-go/kubernetes", "github.com/gin-gonic/gin", "github.com/prometheus/client_golang/prometheus",
		"github.com/go-zeromq/zmq4", "github.com/miekg/dns", "go.yaml.in/yaml/v3", "go.opentelemetry.io/otel/sdk/trace",
		"go.opentelemetry.io/otel/exporters/prometheus",
	} {
		for _, core := range []string{"pdflow", "connector/nixl"} {
			g := made(t, core+": github.com/tidwall/gjson", "github.com/tidwall/gjson: "+heavy)
			found := breaches(g, rules, dependencies)
			require.Len(t, found, 1, "%s through gjson in %s", heavy, core)
			assert.Contains(t, found[0], core+" must not import "+heavy)
			assert.Contains(t, found[0], "→ github.com/tidwall/gjson →")
		}
	}
}

func TestAPatternMeansAPackageOrATree(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"pdflow", module + "/pdflow", true},
		{"pdflow", module + "/pdflow/pick", false},
		{"pdflow/...", module + "/pdflow", true},
		{"pdflow/...", module + "/pdflow/pick", true},
		{"pdflow/...", module + "/pdflowx", false},
		{"connector/*", module + "/connector", false},
		{"connector/*", module + "/connector/nixl", true},
		{"connector/*", module + "/connectorx/nixl", false},
		{"/...", module + "/pdflow", true},
		{"/...", module + "x/pdflow", false},
		{"/...", "os", false},
		{"testing/...", "testing", true},
		{"testing/...", "testing/synctest", true},
		{"testing/...", "testingx", false},
		{"k8s.io/...", "k8s.io/client-go/kubernetes", true},
		{"internal/...", "internal/abi", false},
	} {
		assert.Equal(t, c.want, match(c.pattern, c.path), "%s against %s", c.pattern, c.path)
	}
}

func TestTheOutputOfGoListIsReadWhole(t *testing.T) {
	g, err := readGraph(strings.NewReader(`{"ImportPath":"os","Standard":true}
{"ImportPath":"` + module + `/pdflow","Module":{"Path":"` + module + `"},"Imports":["os"]}`))
	require.NoError(t, err)
	require.Len(t, g.own(), 1)
	assert.Equal(t, []string{"os"}, g.own()[0].Imports)

	_, err = readGraph(strings.NewReader(`{"ImportPath":"x","Error":{"Err":"no such package"}}`))
	assert.ErrorContains(t, err, "no such package", "a graph with holes proves nothing")
	_, err = readGraph(strings.NewReader(`{"ImportPath":`))
	assert.Error(t, err)
}
