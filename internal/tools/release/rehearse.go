// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/zip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// programs are installed by `go install PATH@VERSION` and run in the clone's root with these arguments.
var programs = []struct {
	dir  string
	args []string
}{
	{"cmd/gateway", []string{"-check", "-config", "cmd/gateway/testdata/check.yaml"}},
	{"cmd/pdctl", []string{"render", "-f", "cmd/gateway/testdata/documents/2-nixl.yaml"}},
	{"cmd/sidecar", []string{"-h"}},
}

// maxFile bounds each file of a module: every user downloads it, and a larger one is most likely there by mistake.
const maxFile = 1 << 20

// rehearse does what users do, with a module proxy that holds the release in front of this machine's.
func (r *repo) rehearse(ctx context.Context, out io.Writer, version string) error {
	ordered, err := r.order()
	if err != nil {
		return err
	}
	for _, m := range ordered {
		if err := r.checkZip(ctx, out, m, version); err != nil {
			return fmt.Errorf("%s: %w", m.path, err)
		}
	}
	for _, m := range ordered {
		step := time.Now()
		packages, err := r.publicPackages(ctx, m)
		if err != nil {
			return err
		}
		if len(packages) == 0 { // programs only
			continue
		}
		if err := r.useLibrary(ctx, m, version, packages); err != nil {
			return err
		}
		fmt.Fprintf(out, "%5.1fs  got %s, built and vetted a program with its %d packages\n",
			time.Since(step).Seconds(), m.path, len(packages))
	}
	for _, p := range programs {
		step := time.Now()
		if err := r.useProgram(ctx, p.dir, version, p.args); err != nil {
			return err
		}
		fmt.Fprintf(out, "%5.1fs  installed %s and ran it\n", time.Since(step).Seconds(), p.dir)
	}
	return nil
}

// checkZip downloads the module from its tag, into the proxy, and looks for what it should not hold. The go command has
// its own limits, which it checks here.
func (r *repo) checkZip(ctx context.Context, out io.Writer, m module, version string) error {
	printed, err := r.goDirect(ctx, ".", "mod", "download", "-json", m.path+"@"+version)
	if err != nil {
		return err
	}
	var got struct{ Zip string }
	if err := json.Unmarshal([]byte(printed), &got); err != nil {
		return err
	}
	info, err := os.Stat(got.Zip)
	if err != nil {
		return err
	}
	files, err := zip.OpenReader(got.Zip)
	if err != nil {
		return err
	}
	defer files.Close()
	var size, largest uint64
	var licence bool
	for _, f := range files.File {
		name := strings.TrimPrefix(f.Name, m.path+"@"+version+"/")
		if f.UncompressedSize64 > maxFile {
			return fmt.Errorf("%s has %d bytes, and a file of a module at most %d", name, f.UncompressedSize64, maxFile)
		}
		if slices.Contains(strings.Split(name, "/"), "vendor") {
			return fmt.Errorf("%s: a module carries no copies of others", name)
		}
		size, largest, licence = size+f.UncompressedSize64, max(largest, f.UncompressedSize64), licence ||
			name == "LICENSE"
	}
	if !licence {
		return fmt.Errorf("it has no LICENSE")
	}
	fmt.Fprintf(out, "%s %s: %d files of %d kB, the largest %d kB, the zip %d kB\n",
		m.path, version, len(files.File), size>>10, largest>>10, info.Size()>>10)
	return nil
}

// goUser runs a go command as a user's machine would, whose module cache is empty.
func (r *repo) goUser(ctx context.Context, dir string, args ...string) (string, error) {
	env := append(slices.Clone(r.goEnv), "GOMODCACHE="+filepath.Join(r.temp, "user"),
		"GOPROXY="+fileProxy(r.proxyCache())+","+r.proxies, "GOBIN="+filepath.Join(r.temp, "bin"))
	return command(ctx, dir, env, "go", args...)
}

// useLibrary gets a module from an empty one, whose program then imports all its packages.
func (r *repo) useLibrary(ctx context.Context, m module, version string, packages []string) error {
	dir, err := os.MkdirTemp(r.temp, "consumer")
	if err != nil {
		return err
	}
	program := "package main\n\nimport (\n\t_ \"" + strings.Join(packages, "\"\n\t_ \"") + "\"\n)\n\nfunc main() {}\n"
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o600); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"mod", "init", "example.com/consumer"},
		{"get", m.path + "@" + version},
		{"mod", "tidy"},
		{"build", "./..."},
		{"vet", "./..."},
	} {
		if _, err := r.goUser(ctx, dir, args...); err != nil {
			return err
		}
	}
	return nil
}

// publicPackages returns the import paths of a module that other modules can import.
func (r *repo) publicPackages(ctx context.Context, m module) ([]string, error) {
	out, err := command(ctx, filepath.Join(r.dir, m.dir), r.goEnv, "go", "list", "-find", "-f",
		`{{if and .GoFiles (ne .Name "main")}}{{.ImportPath}}{{end}}`, "./...")
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(strings.Fields(out), func(importPath string) bool {
		return slices.Contains(strings.Split(importPath, "/"), "internal")
	}), nil
}

// useProgram installs a program outside any module, and runs it.
func (r *repo) useProgram(ctx context.Context, dir, version string, args []string) error {
	pkg := path.Join(r.modules[0].path, dir)
	if _, err := r.goUser(ctx, r.temp, "install", pkg+"@"+version); err != nil {
		return err
	}
	_, err := command(ctx, r.dir, nil, filepath.Join(r.temp, "bin", path.Base(dir)), args...)
	return err
}
