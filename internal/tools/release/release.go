// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// module is a module of go.work, by its go.mod.
type module struct {
	dir      string // relative to the root, with slashes; "." for the root module
	path     string
	requires []requirement
	replaces []string // the paths of modules that it replaces
}

// requirement is one of a module's requirements.
type requirement struct{ Path, Version string }

// repo is the clone in which a release is made.
type repo struct {
	dir     string
	temp    string   // for all that is not the clone
	goEnv   []string // for go commands
	proxies string   // GOPROXY for what is not of this repository: what this machine has, then its own GOPROXY
	modules []module // of go.work, the root module first
}

// clone clones source's HEAD into a folder of temp. Whoever keeps the commits signs them with a name of their own.
func clone(ctx context.Context, source, temp string, keep bool) (*repo, error) {
	r := &repo{dir: filepath.Join(temp, "clone"), temp: temp}
	if _, err := command(ctx, source, nil, "git", "clone", "--quiet", "--no-tags", ".", r.dir); err != nil {
		return nil, err
	}
	for _, key := range []string{"user.name", "user.email"} {
		value, err := command(ctx, source, nil, "git", "config", key)
		switch {
		case err != nil && keep:
			return nil, err
		case err != nil:
			value = "rehearsal"
		}
		if _, err := r.git(ctx, "config", key, strings.TrimSpace(value)); err != nil {
			return nil, err
		}
	}
	out, err := command(ctx, source, nil, "go", "env", "-json", "GOMODCACHE", "GOPROXY", "GOFLAGS", "GONOSUMDB")
	if err != nil {
		return nil, err
	}
	var have struct{ GOMODCACHE, GOPROXY, GOFLAGS, GONOSUMDB string }
	if err := json.Unmarshal([]byte(out), &have); err != nil {
		return nil, err
	}
	if err := r.readModules(ctx); err != nil {
		return nil, err
	}
	r.proxies = fileProxy(have.GOMODCACHE) + "," + have.GOPROXY
	r.goEnv = []string{
		"GOWORK=off", "GOPRIVATE=", "GONOPROXY=",
		// The checksum database knows no version before it is published.
		"GONOSUMDB=" + strings.TrimPrefix(have.GONOSUMDB+","+r.modules[0].path, ","),
		// With -trimpath a second rehearsal finds the packages of the first in the build cache, wherever they lay.
		"GOFLAGS=" + have.GOFLAGS + " -modcacherw -trimpath",
	}
	return r, nil
}

// fileProxy returns the URL by which a module cache serves as a module proxy.
func fileProxy(modcache string) string {
	return "file://" + filepath.ToSlash(filepath.Join(modcache, "cache", "download"))
}

func (r *repo) git(ctx context.Context, args ...string) (string, error) {
	return command(ctx, r.dir, nil, "git", args...)
}

// goDirect runs a go command that takes the repository's own modules from the clone's tags, as a module proxy takes
// them from the published repository. Its module cache then is a proxy that holds the release.
func (r *repo) goDirect(ctx context.Context, dir string, args ...string) (string, error) {
	root := r.modules[0].path
	env := append(slices.Clone(r.goEnv), "GOMODCACHE="+r.proxyCache(), "GOPROXY="+r.proxies, "GONOPROXY="+root,
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url.file://"+filepath.ToSlash(r.dir)+".insteadOf",
		"GIT_CONFIG_VALUE_0=https://"+root)
	return command(ctx, filepath.Join(r.dir, dir), env, "go", args...)
}

func (r *repo) proxyCache() string { return filepath.Join(r.temp, "proxy") }

// readModules reads go.work and each go.mod.
func (r *repo) readModules(ctx context.Context) error {
	var work struct{ Use []struct{ DiskPath string } }
	out, err := command(ctx, r.dir, nil, "go", "work", "edit", "-json")
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), &work); err != nil {
		return err
	}
	for _, use := range work.Use {
		out, err := command(ctx, filepath.Join(r.dir, use.DiskPath), nil, "go", "mod", "edit", "-json")
		if err != nil {
			return err
		}
		var file struct {
			Module  struct{ Path string }
			Require []requirement
			Replace []struct{ Old struct{ Path string } }
		}
		if err := json.Unmarshal([]byte(out), &file); err != nil {
			return err
		}
		m := module{dir: path.Clean(filepath.ToSlash(use.DiskPath)), path: file.Module.Path, requires: file.Require}
		for _, replace := range file.Replace {
			m.replaces = append(m.replaces, replace.Old.Path)
		}
		r.modules = append(r.modules, m)
	}
	if len(r.modules) == 0 || r.modules[0].dir != "." {
		return errors.New("go.work must name the root module first")
	}
	return nil
}

// own reports whether a module path is one of go.work.
func (r *repo) own(modulePath string) bool {
	return slices.ContainsFunc(r.modules, func(m module) bool { return m.path == modulePath })
}

// published reports whether a module can be had by its path: that is the root's and the folder. Others, such as an
// example of a third party's module, and internal ones get no tag.
func (r *repo) published(m module) bool {
	return m.path == path.Join(r.modules[0].path, m.dir) && !slices.Contains(strings.Split(m.dir, "/"), "internal")
}

// tag returns the tag by which the go command finds a version of the module.
func (m module) tag(version string) string { return path.Join(m.dir, version) }

// order returns the published modules, each after those that it requires.
func (r *repo) order() ([]module, error) {
	var left, ordered []module
	for _, m := range r.modules {
		if r.published(m) {
			left = append(left, m)
		}
	}
	done := map[string]bool{}
	for len(left) > 0 {
		i := slices.IndexFunc(left, func(m module) bool {
			return !slices.ContainsFunc(m.requires, func(q requirement) bool { return r.own(q.Path) && !done[q.Path] })
		})
		if i < 0 {
			return nil, fmt.Errorf("%s requires a module that is not published, or that requires it in turn",
				left[0].path)
		}
		done[left[i].path] = true
		ordered = append(ordered, left[i])
		left = slices.Delete(left, i, i+1)
	}
	return ordered, nil
}

// release commits and tags version in the clone and returns the tags. Each module's go.mod requires that version of the
// others. The commit with a module's tag has no replace directive, which `go install` refuses; a last commit brings
// them back, so that the tree ends as it began but for the required versions.
func (r *repo) release(ctx context.Context, version string) ([]string, error) {
	ordered, err := r.order()
	if err != nil {
		return nil, err
	}
	if err := r.require(ctx, version); err != nil {
		return nil, err
	}
	before, err := r.git(ctx, "rev-parse", "HEAD")
	if err != nil {
		return nil, err
	}
	tags := make([]string, 0, len(ordered))
	for _, m := range ordered {
		if err := r.dropReplaces(ctx, m, version); err != nil {
			return nil, fmt.Errorf("%s: %w", m.path, err)
		}
		if _, err := r.git(ctx, "tag", "--annotate", "--message", m.path+" "+version, m.tag(version)); err != nil {
			return nil, err
		}
		tags = append(tags, m.tag(version))
	}
	if _, err := r.git(ctx, "checkout", "--quiet", strings.TrimSpace(before), "--", "."); err != nil {
		return nil, err
	}
	return tags, r.commit(ctx, "Replace the modules of this repository by their folders again\n\n"+
		"Between releases each module builds with the others as they are.")
}

// require writes the version into each requirement of one module of go.work on another.
func (r *repo) require(ctx context.Context, version string) error {
	for _, m := range r.modules {
		edit := []string{"mod", "edit"}
		for _, q := range m.requires {
			if r.own(q.Path) && q.Version != version {
				edit = append(edit, "-require="+q.Path+"@"+version)
			}
		}
		if len(edit) == 2 {
			continue
		}
		if _, err := command(ctx, filepath.Join(r.dir, m.dir), nil, "go", edit...); err != nil {
			return err
		}
	}
	return r.commit(ctx, "Require "+version+" of the modules of this repository")
}

// dropReplaces commits the module's go.mod without replace directives, and the go.sum that it then needs.
func (r *repo) dropReplaces(ctx context.Context, m module, version string) error {
	if len(m.replaces) == 0 {
		return nil
	}
	edit := []string{"mod", "edit"}
	for _, replaced := range m.replaces {
		if !r.own(replaced) {
			return fmt.Errorf("it replaces %s, and whoever requires it would get the original", replaced)
		}
		edit = append(edit, "-dropreplace="+replaced)
	}
	if _, err := command(ctx, filepath.Join(r.dir, m.dir), nil, "go", edit...); err != nil {
		return err
	}
	if _, err := r.goDirect(ctx, m.dir, "mod", "tidy"); err != nil {
		return err
	}
	return r.commit(ctx, "Release "+m.path+" "+version+"\n\n"+
		"`go install` of a version refuses a module with replace directives.")
}

// commit commits what has changed, if anything has.
func (r *repo) commit(ctx context.Context, message string) error {
	changed, err := r.git(ctx, "status", "--porcelain")
	if err != nil || changed == "" {
		return err
	}
	_, err = r.git(ctx, "commit", "--quiet", "--all", "--message", message)
	return err
}
