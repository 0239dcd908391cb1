// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// licence is a file that says on which terms a program, or a part of it, may be given away.
type licence struct {
	name    string // below the image's folder licenses
	content []byte
}

// licenceFile is what such files are called.
var licenceFile = regexp.MustCompile(`^(?i:licen[sc]e|copying|notice|patents)`)

// licences returns those of this repository, of the Go release, and of all modules with a package in the program.
func licences(ctx context.Context, clone, program string, env []string) (all []licence, err error) {
	dir := filepath.Join(clone, "cmd")
	listed, err := command(ctx, dir, env, "go", "list", "-deps", "-f", "{{with .Module}}{{.Path}}\t{{.Dir}}{{end}}",
		"./"+program)
	if err != nil {
		return nil, err
	}
	root, err := command(ctx, dir, env, "go", "env", "GOROOT")
	if err != nil {
		return nil, err
	}
	of := map[string]string{"": clone, "go": root}
	for line := range strings.Lines(listed) {
		module, folder, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if ok && !strings.HasPrefix(folder, clone+string(filepath.Separator)) && folder != clone {
			of[module] = folder
		}
	}
	for module, folder := range of {
		entries, err := os.ReadDir(folder)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !licenceFile.MatchString(e.Name()) {
				continue
			}
			err := fs.WalkDir(os.DirFS(folder), e.Name(), func(name string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() {
					return err
				}
				content, err := os.ReadFile(filepath.Join(folder, filepath.FromSlash(name)))
				all = append(all, licence{path.Join(module, name), content})
				return err
			})
			if err != nil {
				return nil, err
			}
		}
	}
	if len(all) == 0 {
		return nil, errors.New(program + ": no licence was found")
	}
	slices.SortFunc(all, func(a, b licence) int { return strings.Compare(a.name, b.name) })
	return all, nil
}
