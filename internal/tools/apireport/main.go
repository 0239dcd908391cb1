// SPDX-License-Identifier: Apache-2.0

// Command apireport counts the names that each package exports, or compares those of two trees:
//
//	go run ./internal/tools/apireport           # a table of the packages in this folder
//	go run ./internal/tools/apireport OLD       # of those in another
//	go run ./internal/tools/apireport OLD NEW   # what became of each count, and each name that went or came
//
// A name is a package-level type, function, variable or constant, each constant of a group by itself: by this count
// database/sql/driver exports 46. Methods are those of exported types, an interface's own among them; fields are not
// counted. Packages named main, internal folders, testdata and test files are left out.
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// names are what a package exports. A method is written Type.Method, and no other name has a dot.
type names map[string]bool

func main() {
	flag.Parse()
	if err := report(os.Stdout, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "apireport:", err)
		os.Exit(1)
	}
}

// report writes a table of one tree, or the difference of two.
func report(w io.Writer, roots []string) error {
	if len(roots) == 0 {
		roots = []string{"."}
	}
	if len(roots) > 2 {
		return fmt.Errorf("%d folders given, and two can be compared", len(roots))
	}
	trees := make([]map[string]names, 0, len(roots))
	for _, root := range roots {
		tree, err := read(root)
		if err != nil {
			return err
		}
		trees = append(trees, tree)
	}
	if len(trees) == 1 {
		table(w, trees[0])
	} else {
		compare(w, trees[0], trees[1])
	}
	return nil
}

// read returns the names of each package below root, by its folder.
func read(root string) (map[string]names, error) {
	tree := map[string]names{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name := d.Name()
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if path != root && (name == "internal" || name == "testdata" || name[0] == '.' || name[0] == '_') {
				return filepath.SkipDir
			}
			return nil
		case !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil || file.Name.Name == "main" {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		dir = filepath.ToSlash(dir)
		if tree[dir] == nil {
			tree[dir] = names{}
		}
		for _, decl := range file.Decls {
			tree[dir].add(decl)
		}
		return nil
	})
	return tree, err
}

func (n names) add(decl ast.Decl) {
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		n.addFunc(decl)
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.ValueSpec:
				for _, id := range spec.Names {
					n.put("", id)
				}
			case *ast.TypeSpec:
				n.addType(spec)
			}
		}
	}
}

// put keeps an exported name; of is the type of a method.
func (n names) put(of string, id *ast.Ident) {
	if id.IsExported() {
		n[of+id.Name] = true
	}
}

func (n names) addFunc(decl *ast.FuncDecl) {
	if decl.Recv == nil {
		n.put("", decl.Name)
		return
	}
	receiver := decl.Recv.List[0].Type
	for {
		switch t := receiver.(type) {
		case *ast.StarExpr:
			receiver = t.X
		case *ast.IndexExpr:
			receiver = t.X
		case *ast.IndexListExpr:
			receiver = t.X
		case *ast.Ident:
			if t.IsExported() {
				n.put(t.Name+".", decl.Name)
			}
			return
		default:
			return
		}
	}
}

func (n names) addType(spec *ast.TypeSpec) {
	n.put("", spec.Name)
	face, ok := spec.Type.(*ast.InterfaceType)
	if !ok || !spec.Name.IsExported() {
		return
	}
	for _, member := range face.Methods.List {
		for _, id := range member.Names {
			n.put(spec.Name.Name+".", id)
		}
	}
}

// count returns how many names there are, and how many methods.
func (n names) count() (top, methods int) {
	for name := range n {
		if strings.Contains(name, ".") {
			methods++
		} else {
			top++
		}
	}
	return top, methods
}

func table(w io.Writer, tree map[string]names) {
	fmt.Fprintf(w, "%-34s %7s %7s\n", "package", "names", "methods")
	var tops, methods int
	for _, dir := range slices.Sorted(maps.Keys(tree)) {
		t, m := tree[dir].count()
		tops, methods = tops+t, methods+m
		fmt.Fprintf(w, "%-34s %7d %7d\n", dir, t, m)
	}
	fmt.Fprintf(w, "%-34s %7d %7d\n", "all", tops, methods)
}

func compare(w io.Writer, before, after map[string]names) {
	packages := maps.Clone(before)
	maps.Copy(packages, after)
	fmt.Fprintf(w, "%-34s %14s %14s\n", "package", "names", "methods")
	row := func(dir string, t0, m0, t1, m1 int) {
		fmt.Fprintf(w, "%-34s %5d -> %5d %5d -> %5d\n", dir, t0, t1, m0, m1)
	}
	var all [4]int
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		t0, m0 := before[dir].count()
		t1, m1 := after[dir].count()
		row(dir, t0, m0, t1, m1)
		for i, n := range []int{t0, m0, t1, m1} {
			all[i] += n
		}
	}
	row("all", all[0], all[1], all[2], all[3])
	for _, dir := range slices.Sorted(maps.Keys(packages)) {
		both := maps.Clone(before[dir])
		if both == nil {
			both = names{}
		}
		maps.Copy(both, after[dir])
		heading := "\n" + dir + "\n"
		for _, name := range slices.Sorted(maps.Keys(both)) {
			sign := "- "
			switch {
			case before[dir][name] && after[dir][name]:
				continue
			case after[dir][name]:
				sign = "+ "
			}
			fmt.Fprintln(w, heading+sign+name)
			heading = ""
		}
	}
}
