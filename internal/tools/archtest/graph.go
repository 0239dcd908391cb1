// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
)

// module is the path of the root module. Rules name its packages without this prefix.
const module = "github.com/pdkit/pdkit"

// pkg is a package as go list prints it. Imports of test files are not in it.
type pkg struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Module     *struct{ Path string } // nil for the standard library
	Error      *struct{ Err string }
}

// ours reports whether the package belongs to the root module or to the simulated engines' one.
func (p *pkg) ours() bool {
	return p.Module != nil && (p.Module.Path == module || p.Module.Path == module+"/enginesim")
}

// graph holds all packages that one or more modules compile, by import path.
type graph map[string]*pkg

// loadGraph runs go list in a folder, for all packages below it or for those of patterns.
func loadGraph(ctx context.Context, dir string, patterns ...string) (graph, error) {
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	args := append([]string{"list", "-deps", "-json=ImportPath,Standard,Imports,Module,Error"}, patterns...)
	cmd := exec.CommandContext(ctx, "go", args...) //nolint:gosec // the patterns are this package's
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w\n%s", err, stderr.String())
	}
	return readGraph(bytes.NewReader(out))
}

// readGraph reads what go list prints: JSON objects, one after the other.
func readGraph(r io.Reader) (graph, error) {
	g := graph{}
	for dec := json.NewDecoder(r); ; {
		p := new(pkg)
		switch err := dec.Decode(p); {
		case errors.Is(err, io.EOF):
			return g, nil
		case err != nil:
			return nil, fmt.Errorf("output of go list: %w", err)
		case p.Error != nil:
			return nil, fmt.Errorf("%s: %s", p.ImportPath, p.Error.Err)
		}
		g[p.ImportPath] = p
	}
}

// own returns the root module's packages in order.
func (g graph) own() []*pkg {
	var own []*pkg
	for _, p := range g {
		if p.ours() {
			own = append(own, p)
		}
	}
	slices.SortFunc(own, func(a, b *pkg) int { return strings.Compare(a.ImportPath, b.ImportPath) })
	return own
}

// chain returns the shortest chain of imports from a package to one for which bad returns true, with both ends. It is
// nil if there is no such chain. A chain does not pass through packages for which stop returns true.
func (g graph) chain(from string, bad, stop func(path string) bool) []string {
	before := map[string]string{from: ""}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		p := g[queue[0]]
		if p == nil {
			continue
		}
		for _, next := range p.Imports {
			if _, seen := before[next]; seen || stop(next) {
				continue
			}
			before[next] = p.ImportPath
			if bad(next) {
				return walk(before, next)
			}
			queue = append(queue, next)
		}
	}
	return nil
}

func walk(before map[string]string, to string) []string {
	var chain []string
	for path := to; path != ""; path = before[path] {
		chain = append(chain, path)
	}
	slices.Reverse(chain)
	return chain
}
