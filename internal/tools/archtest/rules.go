// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// rule says which packages must not import which others. A pattern is an import path; paths of the root module are
// written without its prefix. At the end of a pattern, "/..." means the package and all below it, and "/*" only those
// below it. The pattern "/..." means all packages of the root module.
type rule struct {
	of     []string // packages for which the rule holds
	except []string // packages in of for which it does not hold
	never  []string // packages that they must not import, directly or through others
	but    []string // packages in never that they may import
	why    string
}

// noProtocols are the packages below connector that are no connectors: what all of them declare, and what follows.
var noProtocols = []string{"connector/attr", "connector/check", "connector/names"}

// rules are the dependency directions: config ← discovery ← connector ← pdflow → transport.
var rules = []rule{
	{
		of: []string{"discovery/..."}, never: []string{"connector/...", "pdflow/...", "transport/..."},
		why: "discovery is the lowest layer: it says who the engines are, and serves programs that have no flow at all",
	},
	{
		of: []string{"connector/..."}, except: []string{"connector/connectortest"},
		never: []string{"pdflow/...", "transport/..."},
		why: "connectors describe, the flow executes: one that dials or runs legs would need its own cancelling, " +
			"retrying and cleaning up",
	},
	{
		of: []string{"config/..."}, never: []string{"/..."}, but: []string{"config/..."},
		why: "all layers read settings in the same way, so the package that reads them is below all layers",
	},
	{
		of: []string{"transport/..."}, never: []string{"connector/...", "pdflow/...", "discovery/..."},
		why: "transport carries bytes for anyone: what a leg means is not its business",
	},
	{
		of: []string{"pdflow"}, never: []string{"connector/*"}, but: noProtocols,
		why: "the state machine knows abilities, not protocols: a connector that needs a line of its own in the flow " +
			"lacks an ability",
	},
	{
		of: []string{"pdflow/internal/..."}, never: []string{"pdflow/..."},
		why: "a room of the request path knows neither the flow nor another room, so that each can be read by itself",
	},
	{
		of: []string{"enginesim/..."}, never: []string{"/..."}, but: []string{"enginesim/..."},
		why: "the simulated engines share no code with what they test: otherwise both could have the same fault",
	},
	{
		of:    []string{"config/...", "connector/...", "discovery/...", "internal/...", "pdflow/...", "transport/..."},
		never: []string{"enginesim/..."},
		why:   "the simulated engines are for tests and demos, in a module of their own",
	},
	{
		of: []string{simRooms + "..."}, never: []string{"enginesim"},
		why: "the rooms of the simulated engines are below their face, and each can be tested alone",
	},
	{
		of:    []string{simRooms + "core"},
		never: []string{simRooms + "api", simRooms + "proto/...", simRooms + "server"},
		why:   "the core knows KV and requests, no client API, no protocol and no server",
	},
	{
		of:    []string{simRooms + "api"},
		never: []string{simRooms + "proto/...", simRooms + "server"},
		why:   "client APIs know no protocol: a protocol that adds to an API wraps its parser",
	},
	{
		of:    []string{simRooms + "proto/..."},
		never: []string{simRooms + "server"},
		why:   "a protocol knows its engine only as a host: it needs no more",
	},
	{
		of:    []string{simRooms + "proto"},
		never: []string{simRooms + "proto/*", simRooms + "api"},
		why:   "what protocols share knows none of them",
	},
	{
		of:    []string{simRooms + "server"},
		never: []string{simRooms + "proto/..."},
		why:   "the server knows connectors only by the core's interface; package enginesim knows which there are",
	},
	{
		of: []string{"internal/..."}, except: []string{"internal/contract"},
		never: []string{"connector/...", "pdflow/...", "transport/...", "discovery/..."},
		why:   "internal packages are below all others, so that each layer can use them",
	},
	{
		of: []string{"/..."}, never: []string{"cmd/...", "examples/...", "lab/..."},
		why: "programs are in modules of their own, so that nobody who imports the library inherits what they need",
	},
	{
		of: []string{"/..."},
		except: []string{"connector/connectortest", "discovery/discoverytest", "enginesim/clientstest",
			"enginesim/enginesimtest", "internal/sharedtest"},
		never: []string{"testing/...", "net/http/httptest"},
		why: "package testing and httptest add flags to every program that links them; only packages named …test " +
			"may",
	},
	{
		of: []string{"pdflow", "connector/nixl"},
		never: []string{
			"k8s.io/...", "sigs.k8s.io/...", "github.com/gin-gonic/...", "github.com/prometheus/...",
			"github.com/go-zeromq/...",
			"github.com/pebbe/...", "github.com/vmihailenco/...", "go.opentelemetry.io/otel/sdk/...",
			"go.opentelemetry.io/otel/exporters/...",
			"google.golang.org/grpc/...", "google.golang.org/protobuf/...", "github.com/miekg/...",
			"github.com/fsnotify/...", "go.yaml.in/...",
		},
		why: "a program with pdflow and connector/nixl compiles nothing heavier than the OTel API: that is why it " +
			"can be imported anywhere",
	},
}

// simRooms is where the rooms of the simulated engines are.
const simRooms = "enginesim/internal/"

// dependency is a module from outside, and the packages that may import it directly. No package may import a module
// that is not listed.
type dependency struct {
	module string
	by     []string
	why    string
}

// measuring are the packages that record metrics.
var measuring = []string{"pdflow", "pdflow/internal/telemetry", "pdflow/admit", "pdflow/attest", "pdflow/decide",
	"pdflow/reuse", "transport", "internal/..."}

// dependencies must be the same as the table in CONTRIBUTING.md; a test compares go.mod with both.
var dependencies = []dependency{
	{"github.com/tidwall/gjson", []string{"connector/...", "enginesim/...", "pdflow/...", "internal/..."},
		"it is for small documents on the way of a request; discovery and transport see none"},
	{"github.com/tidwall/sjson", []string{"connector/...", "pdflow/...", "internal/..."},
		"it is for small documents on the way of a request; discovery and transport see none"},
	{"go.opentelemetry.io/otel", measuring,
		"the flow measures for all connectors alike; a connector only names"},
	{"go.opentelemetry.io/otel/metric", measuring,
		"the flow measures for all connectors alike; a connector only names"},
	{"go.opentelemetry.io/otel/trace", []string{"pdflow", "pdflow/internal/telemetry", "transport", "internal/..."},
		"the flow measures for all connectors alike; a connector only names"},
	{"github.com/vmihailenco/msgpack/v5", []string{"connector/lmcachepd", "discovery/registration",
		simRooms + "proto/lmcachepd"}, "msgpack is for the protocols that speak it; nobody else compiles it"},
	{"github.com/fsnotify/fsnotify", []string{"discovery/file"},
		"it is for the source of files; nobody else watches any"},
	{"go.yaml.in/yaml/v3", []string{"config/yamlfile"},
		"one place reads YAML, with the lines of what is wrong; the library itself is configured by Go values " +
			"and JSON"},
	{"github.com/miekg/dns", []string{"discovery/dns"},
		"it is for the source that asks name servers; nobody else speaks DNS"},
	{"github.com/stretchr/testify", nil, "it is for _test.go files only"},
	{"go.uber.org/goleak", nil, "it is for _test.go files only"},
	{"golang.org/x/net", nil, "it is for _test.go files only"},
}

// breaches checks rules and dependencies and returns one text per breach, in a fixed order.
func breaches(g graph, rules []rule, dependencies []dependency) []string {
	var found []string
	for _, p := range g.own() {
		for _, r := range rules {
			if matchAny(r.of, p.ImportPath) && !matchAny(r.except, p.ImportPath) {
				found = append(found, r.check(g, p)...)
			}
		}
		found = append(found, checkOutside(g, p, dependencies)...)
	}
	return found
}

// check follows the package's imports. It does not follow those of an excepted package, for which the rule does not
// hold. Another rule says who may import that one.
func (r rule) check(g graph, p *pkg) []string {
	chain := g.chain(p.ImportPath,
		func(path string) bool { return matchAny(r.never, path) && !matchAny(r.but, path) },
		func(path string) bool { return matchAny(r.except, path) })
	if chain == nil {
		return nil
	}
	for i := range chain {
		chain[i] = short(chain[i])
	}
	return []string{fmt.Sprintf("%s must not import %s: %s\n\tchain: %s",
		chain[0], chain[len(chain)-1], r.why, strings.Join(chain, " → "))}
}

func checkOutside(g graph, p *pkg, dependencies []dependency) []string {
	var found []string
	for _, path := range p.Imports {
		to := g[path]
		if to == nil || to.Standard || to.Module == nil || to.ours() {
			continue
		}
		i := slices.IndexFunc(dependencies, func(d dependency) bool { return d.module == to.Module.Path })
		switch {
		case i < 0:
			found = append(found, fmt.Sprintf("%s imports %s, which the list of dependencies does not have: "+
				"each user of pdkit pays for each module, so say in internal/tools/archtest/rules.go and "+
				"CONTRIBUTING.md who needs it and why", short(p.ImportPath), path))
		case !matchAny(dependencies[i].by, p.ImportPath):
			found = append(
				found, fmt.Sprintf("%s must not import %s: %s", short(p.ImportPath), path, dependencies[i].why),
			)
		}
	}
	return found
}

func short(importPath string) string { return strings.TrimPrefix(importPath, module+"/") }

func matchAny(patterns []string, importPath string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool { return match(pattern, importPath) })
}

// match compares a pattern with an import path. Patterns of the root module start with one of its folders.
func match(pattern, importPath string) bool {
	if pattern == "/..." {
		return importPath == module || strings.HasPrefix(importPath, module+"/")
	}
	prefix, below := strings.CutSuffix(pattern, "/...")
	prefix, onlyBelow := strings.CutSuffix(prefix, "/*")
	if first, _, _ := strings.Cut(prefix, "/"); slices.Contains(folders, first) {
		prefix = path.Join(module, prefix)
	}
	return importPath == prefix && !onlyBelow || (below || onlyBelow) && strings.HasPrefix(importPath, prefix+"/")
}

// folders are the top level of the root module, and of the programs beside it.
var folders = []string{
	"cmd", "config", "connector", "discovery", "enginesim", "examples", "internal", "lab", "pdflow", "transport",
}
