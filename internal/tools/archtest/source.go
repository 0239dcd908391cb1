// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// licence is the first line of every Go file.
const licence = "// SPDX-License-Identifier: Apache-2.0"

// ban names members of a package that library code must not use. Paths of files are relative to the root, with slashes.
type ban struct {
	below   string // the folder for which it holds; empty: the whole root module
	except  string // a folder in it for which it does not hold
	pkg     string // import path
	members []string
	why     string
}

var bans = []ban{
	{
		except: "internal/sharedtest/", pkg: "os", members: []string{"Getenv", "LookupEnv", "Environ", "ExpandEnv"},
		why: "a library takes options: two flows in one process must be able to differ, and a reader must see " +
			"what decides",
	},
	{
		below: "connector/", except: "connector/connectortest/", pkg: "net/http",
		members: []string{"Client", "DefaultClient", "Transport", "DefaultTransport", "Get", "Head", "Post",
			"PostForm"},
		why: "a connector never sends by itself: legs are the flow's, and side calls go through the Caller it " +
			"is given",
	},
	{
		pkg: "net/http", members: []string{"DefaultClient", "DefaultTransport", "Get", "Head", "Post", "PostForm"},
		why: "they are process-wide, have no timeouts and follow redirects: package transport has what legs need",
	},
}

// sourceFiles returns the paths of the Go files below root, relative and with slashes. It skips the folders that the go
// command skips.
func sourceFiles(root string) ([]string, error) {
	var files []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (name == "testdata" || name == "vendor" || strings.HasPrefix(name, ".") ||
				strings.HasPrefix(name, "_")) {
				return filepath.SkipDir
			}
			return nil
		}
		if strings.HasSuffix(name, ".go") {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			files = append(files, filepath.ToSlash(rel))
		}
		return nil
	})
	return files, err
}

// nestedModules returns the folders below root that have a go.mod of their own, relative and with slashes, also at the
// end.
func nestedModules(root string) ([]string, error) {
	var nested []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && strings.HasPrefix(d.Name(), "."):
			return filepath.SkipDir
		case d.Name() == "go.mod" && filepath.Dir(path) != root:
			rel, err := filepath.Rel(root, filepath.Dir(path))
			nested = append(nested, filepath.ToSlash(rel)+"/")
			return err
		}
		return nil
	})
	return nested, err
}

// checkLicence returns an error if a file's first line is not the licence.
func checkLicence(root, name string) error {
	f, err := os.Open(filepath.Join(root, filepath.FromSlash(name)))
	if err != nil {
		return err
	}
	defer f.Close()
	first := bufio.NewScanner(f)
	if first.Scan(); first.Text() != licence {
		return fmt.Errorf("%s:1: the first line must be %q: a file that is copied elsewhere must carry its licence",
			name, licence)
	}
	return first.Err()
}

// checkBans returns one text for each banned member that a library file uses. src is its source, nil to read the file.
func checkBans(root, name string, src any, bans []ban) ([]string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, filepath.Join(root, filepath.FromSlash(name)), src,
		parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, b := range bans {
		if !strings.HasPrefix(name, b.below) || b.except != "" && strings.HasPrefix(name, b.except) {
			continue
		}
		local := localName(file, b.pkg)
		if local == "." {
			found = append(found, fmt.Sprintf("%s: a dot import of %s hides what is used of it", name, b.pkg))
		}
		ast.Inspect(file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok || local == "" {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == local && slices.Contains(b.members, sel.Sel.Name) {
				found = append(
					found, fmt.Sprintf("%s:%d: %s.%s: %s", name, files.Position(sel.Pos()).Line, b.pkg, sel.Sel.Name,
						b.why),
				)
			}
			return true
		})
	}
	return found, nil
}

// localName returns the name under which a file imports a package; empty if it does not import it.
func localName(file *ast.File, importPath string) string {
	for _, spec := range file.Imports {
		if path, err := strconv.Unquote(spec.Path.Value); err != nil || path != importPath {
			continue
		}
		if spec.Name != nil {
			return spec.Name.Name
		}
		return importPath[strings.LastIndex(importPath, "/")+1:]
	}
	return ""
}

// importsInternal returns one text for each import of the root module's internal packages by a file of the examples
// or of the programs. The compiler would allow it, as the paths of their modules lie below the root's. Tests that are
// no examples may have the helpers that tests share.
func importsInternal(root, name string, src any) ([]string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, filepath.Join(root, filepath.FromSlash(name)), src, parser.ImportsOnly)
	if err != nil {
		return nil, err
	}
	base := name[strings.LastIndex(name, "/")+1:]
	tests := strings.HasSuffix(base, "_test.go") && !strings.HasPrefix(base, "example")
	var found []string
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err == nil && match("internal/...", path) && !(tests && match("internal/sharedtest", path)) {
			found = append(
				found, fmt.Sprintf("%s:%d: %s: an example shows what a reader can write, and no reader can import this",
					name, files.Position(spec.Pos()).Line, short(path)))
		}
	}
	return found, nil
}
