// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// root is the folder of the root module. Tests run in the folder of their package.
const root = "../../.."

func TestPackagesDependInOneDirection(t *testing.T) {
	g, err := loadGraph(t.Context(), root, "./...", "./enginesim/...")
	require.NoError(t, err)
	for _, want := range []string{"connector", "connector/nixl", "discovery", "pdflow", "transport"} {
		require.Contains(t, g, module+"/"+want, "the graph must be the real one")
	}
	for _, breach := range breaches(g, rules, dependencies) {
		t.Error(breach)
	}
}

func TestEveryRuleBindsAPackage(t *testing.T) {
	g, err := loadGraph(t.Context(), root, "./...", "./enginesim/...")
	require.NoError(t, err)
	for _, r := range rules {
		for _, pattern := range r.of {
			bound := slices.ContainsFunc(g.own(), func(p *pkg) bool { return match(pattern, p.ImportPath) })
			assert.True(t, bound, "a rule for %q binds nothing: was a package renamed?", pattern)
		}
	}
}

// go.work must list all modules that have code: test.sh, the release rehearsal and editors read it. docs has none.
func TestGoWorkNamesEveryModule(t *testing.T) {
	nested, err := nestedModules(root)
	require.NoError(t, err)
	work, err := os.ReadFile(filepath.Join(root, "go.work"))
	require.NoError(t, err)
	for _, dir := range nested {
		if !strings.Contains(dir, "testdata/") && dir != "docs/" {
			assert.Contains(t, string(work), "\t./"+strings.TrimSuffix(dir, "/")+"\n")
		}
	}
}

func TestLibraryCodeTakesOptionsAndSendsThroughTransport(t *testing.T) {
	nested, err := nestedModules(root)
	require.NoError(t, err)
	require.Contains(t, nested, "examples/")
	for _, name := range goFiles(t) {
		if strings.HasSuffix(name, "_test.go") ||
			slices.ContainsFunc(nested, func(dir string) bool { return strings.HasPrefix(name, dir) }) {
			continue
		}
		found, err := checkBans(root, name, nil, bans)
		require.NoError(t, err)
		for _, breach := range found {
			t.Error(breach)
		}
	}
}

func TestExamplesAndProgramsUseWhatReadersCan(t *testing.T) {
	for _, name := range goFiles(t) {
		shown := strings.HasPrefix(path.Base(name), "example") && !strings.HasPrefix(name, "internal/")
		if !shown && !strings.HasPrefix(name, "examples/") && !strings.HasPrefix(name, "cmd/") {
			continue
		}
		found, err := importsInternal(root, name, nil)
		require.NoError(t, err)
		for _, breach := range found {
			t.Error(breach)
		}
	}
}

func TestEveryFileHasItsLicence(t *testing.T) {
	for _, name := range goFiles(t) {
		assert.NoError(t, checkLicence(root, name))
	}
}

func TestGoModContributingAndRulesNameTheSameModules(t *testing.T) {
	contributing, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	require.NoError(t, err)
	listed := make([]string, 0, len(dependencies))
	for _, d := range dependencies {
		listed = append(listed, d.module)
		assert.Contains(t, string(contributing), "`"+d.module+"`", "the table of dependencies tells its reason")
	}
	assert.ElementsMatch(t, required(t.Context(), t), listed, "go.mod and the list in rules.go")
}

// discovery/kubernetes is a module of its own. The rules hold for its packages, too.
func TestDiscoveryByKubernetesKeepsToItsLayer(t *testing.T) {
	g, err := loadGraph(t.Context(), filepath.Join(root, "discovery", "kubernetes"))
	require.NoError(t, err)
	source := g[module+"/discovery/kubernetes"]
	require.NotNil(t, source)
	for _, r := range []rule{
		{never: rules[0].never, why: rules[0].why},
		{never: []string{"k8s.io/client-go/kubernetes/..."},
			why: "the client for all kinds of objects takes minutes to compile; two kinds need none"},
		{never: []string{"testing/...", "net/http/httptest", "github.com/stretchr/testify/..."},
			why: "these are for tests"},
	} {
		assert.Empty(t, r.check(g, source))
	}
}

// extproc is a module of its own, so that no other program gets the dependencies of gRPC.
func TestExtprocKeepsToItself(t *testing.T) {
	g, err := loadGraph(t.Context(), filepath.Join(root, "extproc"))
	require.NoError(t, err)
	server := g[module+"/extproc"]
	require.NotNil(t, server)
	for _, r := range []rule{
		{never: []string{"connector/*", "discovery/*", "cmd/...", "lab/...", "examples/..."}, but: noProtocols,
			why: "it serves whatever flow it is given"},
		{never: []string{"testing/...", "net/http/httptest", "github.com/stretchr/testify/..."},
			why: "these are for tests"},
	} {
		assert.Empty(t, r.check(g, server))
	}
	var direct []string
	for _, path := range server.Imports {
		if to := g[path]; to.Module != nil && !to.ours() {
			direct = append(direct, to.Module.Path)
		}
	}
	slices.Sort(direct)
	want := []string{module + "/extproc", "github.com/envoyproxy/go-control-plane/envoy", "google.golang.org/grpc"}
	assert.Subset(t, want, slices.Compact(direct))
}

// required returns the modules that the root module requires directly.
func required(ctx context.Context, t *testing.T) []string {
	t.Helper()
	out, err := exec.CommandContext(ctx, "go", "mod", "edit", "-json", filepath.Join(root, "go.mod")).Output()
	require.NoError(t, err)
	var mod struct {
		Require []struct {
			Path     string
			Indirect bool
		}
	}
	require.NoError(t, json.Unmarshal(out, &mod))
	var direct []string
	for _, r := range mod.Require {
		if !r.Indirect && !strings.HasPrefix(r.Path, module+"/") {
			direct = append(direct, r.Path)
		}
	}
	return direct
}

func goFiles(t *testing.T) []string {
	t.Helper()
	files, err := sourceFiles(root)
	require.NoError(t, err)
	require.Contains(t, files, "internal/tools/archtest/archtest_test.go", "the walk must see this file")
	return files
}
