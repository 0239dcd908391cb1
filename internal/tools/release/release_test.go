// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sample is a repository with a library below the root, a program that uses both, and a third party's module.
// Nothing in it needs the network.
var sample = map[string]string{
	"LICENSE":          "free",
	"CHANGELOG.md":     "# Changelog\n\n## [0.2.0]\n",
	"go.work":          "go 1.26.0\n\nuse (\n\t.\n\t./cmd\n\t./lib/deep\n\t./third\n)\n",
	"go.mod":           "module github.com/pdkit/sample\n\ngo 1.26.0\n",
	"pdflow/pdflow.go": "package pdflow\n\nconst Version = \"0.2.0\"\n",
	"lib/deep/go.mod": "module github.com/pdkit/sample/lib/deep\n\ngo 1.26.0\n\n" +
		"require github.com/pdkit/sample v0.1.0\n\nreplace github.com/pdkit/sample => ../../\n",
	"lib/deep/deep.go": "package deep\n\nimport \"github.com/pdkit/sample/pdflow\"\n\nconst V = pdflow.Version\n",
	"cmd/go.mod": "module github.com/pdkit/sample/cmd\n\ngo 1.26.0\n\n" +
		"require github.com/pdkit/sample/lib/deep v0.1.0\n\nrequire github.com/pdkit/sample v0.1.0 // indirect\n\n" +
		"replace github.com/pdkit/sample => ../\n\nreplace github.com/pdkit/sample/lib/deep => ../lib/deep\n",
	"cmd/show/main.go": "package main\n\nimport \"github.com/pdkit/sample/lib/deep\"\n\nfunc main() { " +
		"println(deep.V) }\n",
	"third/go.mod": "module example.com/third\n\ngo 1.26.0\n\nrequire github.com/pdkit/sample v0.1.0\n\n" +
		"replace github.com/pdkit/sample => ../\n",
	"third/third.go": "package third\n\nimport \"github.com/pdkit/sample/pdflow\"\n\nconst V = pdflow.Version\n",
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	identity := []string{"-c", "user.name=test", "-c", "user.email=test"}
	out, err := command(t.Context(), dir, nil, "git", append(identity, args...)...)
	require.NoError(t, err)
	return strings.TrimSpace(out)
}

func makeRepo(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o750))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	git(t, dir, "init", "--quiet")
	git(t, dir, "add", "--all")
	git(t, dir, "commit", "--quiet", "--message", "All")
	return dir
}

func TestReleasedModulesCanBeHadAndInstalled(t *testing.T) {
	source := makeRepo(t, sample)
	began := git(t, source, "rev-parse", "HEAD")
	r, err := clone(t.Context(), source, t.TempDir(), false)
	require.NoError(t, err)

	tags, err := r.release(t.Context(), "v0.2.0")
	require.NoError(t, err)
	assert.Equal(t, []string{"v0.2.0", "lib/deep/v0.2.0", "cmd/v0.2.0"}, tags,
		"each module after those that it requires, and none of a third party")

	ordered, err := r.order()
	require.NoError(t, err)
	for _, m := range ordered {
		require.NoError(t, r.checkZip(t.Context(), t.Output(), m, "v0.2.0"))
	}
	packages, err := r.publicPackages(t.Context(), ordered[1])
	require.NoError(t, err)
	assert.Equal(t, []string{"github.com/pdkit/sample/lib/deep"}, packages)
	require.NoError(t, r.useLibrary(t.Context(), ordered[1], "v0.2.0", packages))
	require.NoError(t, r.useProgram(t.Context(), "cmd/show", "v0.2.0", nil))

	sboms := t.TempDir()
	require.NoError(t, r.writeSBOMs(t.Context(), sboms, "v0.2.0"))
	files, err := os.ReadDir(sboms)
	require.NoError(t, err)
	assert.Len(t, files, 3, "one for each module that is published")
	doc, err := os.ReadFile(filepath.Join(sboms, "cmd-v0.2.0.cdx.json"))
	require.NoError(t, err)
	assert.Contains(t, string(doc), `"bomFormat": "CycloneDX"`)
	assert.Equal(t, 3, strings.Count(string(doc), `"purl": "pkg:golang/github.com/pdkit/sample`),
		"itself and the two that it is built from: %s", doc)

	assert.Equal(t, "cmd/go.mod\nlib/deep/go.mod\nthird/go.mod", git(t, r.dir, "diff", "--name-only", began, "HEAD"),
		"only the required versions change")
	git(t, r.dir, "checkout", "--quiet", "cmd/v0.2.0")
	_, err = r.goUser(t.Context(), filepath.Join(r.dir, "cmd"), "build", "-mod=readonly", "-o", t.TempDir(), "./...")
	require.NoError(t, err, "go.sum holds the sums that the go command finds")
	assert.Equal(t, began, git(t, source, "rev-parse", "HEAD"), "a rehearsal leaves the repository alone")
	assert.Empty(t, git(t, source, "tag"))
}

// The images are those of a stand-in for cmd/images, which is a module of other dependencies.
func TestAReleaseHasFilesWithChecksums(t *testing.T) {
	const imagesMain = `package main

import ("flag"; "os"; "time")

func main() {
	out, ref := flag.String("out", "", ""), flag.String("ref", "", "")
	flag.Parse()
	text := *ref
	if SECOND { text = time.Now().String() }
	if os.MkdirAll(*out, 0o750) != nil || os.WriteFile(*out + "/a.tar", []byte(text), 0o600) != nil { os.Exit(1) }
}
`
	for second, want := range map[string]string{"false": "", "true": "gives other images the second time"} {
		files := maps.Clone(sample)
		files["go.work"] = "go 1.26.0\n\nuse (\n\t.\n\t./cmd\n)\n"
		files["cmd/go.mod"] = "module github.com/pdkit/sample/cmd\n\ngo 1.26.0\n"
		delete(files, "cmd/show/main.go")
		files["cmd/images/main.go"] = strings.Replace(imagesMain, "SECOND", second, 1)
		r, err := clone(t.Context(), makeRepo(t, files), t.TempDir(), false)
		require.NoError(t, err)
		folder := filepath.Join(t.TempDir(), "files")
		err = r.writeFiles(t.Context(), t.Output(), folder, "v0.2.0")
		if want != "" {
			require.ErrorContains(t, err, want)
			continue
		}
		require.NoError(t, err)
		text, err := os.ReadFile(filepath.Join(folder, sumsFile))
		require.NoError(t, err)
		var names []string
		for line := range strings.Lines(string(text)) {
			names = append(names, strings.Fields(line)[1])
		}
		assert.Equal(t, []string{"a.tar", "cmd-v0.2.0.cdx.json", "v0.2.0.cdx.json"}, names)
		image, err := os.ReadFile(filepath.Join(folder, "a.tar"))
		require.NoError(t, err)
		assert.Equal(t, "cmd/v0.2.0", string(image), "from the tag of the programs' module")
		require.ErrorContains(t, r.writeFiles(t.Context(), t.Output(), folder, "v0.2.0"), "must be empty")
	}
}

// The rehearsal installs what the pages tell users to install.
func TestThePagesInstallTheProgramsThatAreRehearsed(t *testing.T) {
	paths := regexp.MustCompile(`go install github\.com/pdkit/pdkit/([^@\s]+)@`)
	for _, page := range []string{"README.md", "RELEASING.md"} {
		text, err := os.ReadFile(filepath.Join("../../..", page))
		require.NoError(t, err)
		var dirs []string
		for _, found := range paths.FindAllSubmatch(text, -1) {
			dirs = append(dirs, string(found[1]))
		}
		want := make([]string, 0, len(programs))
		for _, p := range programs {
			want = append(want, p.dir)
		}
		assert.Equal(t, want, dirs, page)
	}
}

// What a tag on the tree between releases would be worth.
func TestProgramsOfAModuleWithReplacesCannotBeInstalled(t *testing.T) {
	r, err := clone(t.Context(), makeRepo(t, sample), t.TempDir(), false)
	require.NoError(t, err)
	for _, m := range r.modules {
		git(t, r.dir, "tag", m.tag("v0.1.0"))
		if m.dir != "third" {
			_, err := r.goDirect(t.Context(), ".", "mod", "download", m.path+"@v0.1.0")
			require.NoError(t, err)
		}
	}
	require.ErrorContains(t, r.useProgram(t.Context(), "cmd/show", "v0.1.0", nil), "replace directives")
}

func TestKeptCommitsAndTagsMakeTheRelease(t *testing.T) {
	source := makeRepo(t, sample)
	git(t, source, "config", "user.name", "test")
	git(t, source, "config", "user.email", "test")
	r, err := clone(t.Context(), source, t.TempDir(), true)
	require.NoError(t, err)
	version, err := statedVersion(r.dir)
	require.NoError(t, err)
	tags, err := r.release(t.Context(), version)
	require.NoError(t, err)

	require.NoError(t, mayKeep(t.Context(), source, version, tags))
	require.NoError(t, take(t.Context(), source, r.dir))
	assert.Equal(t, "cmd/v0.2.0\nlib/deep/v0.2.0\nv0.2.0", git(t, source, "tag"))
	assert.Equal(t, git(t, r.dir, "rev-parse", "HEAD"), git(t, source, "rev-parse", "HEAD"))

	require.ErrorContains(t, mayKeep(t.Context(), source, version, tags), "a tag is there already")
	require.ErrorContains(t, mayKeep(t.Context(), source, "v0.3.0", nil), "CHANGELOG.md has no heading")
	require.NoError(t, os.WriteFile(filepath.Join(source, "LICENSE"), []byte("other"), 0o600))
	require.ErrorContains(t, mayKeep(t.Context(), source, version, nil), "not committed")
}

func TestReleaseRefusesModulesThatNobodyCouldUse(t *testing.T) {
	for name, c := range map[string]struct{ file, old, new, want string }{
		"a replaced module of others": {
			"lib/deep/go.mod", "replace ", "replace example.com/x => example.com/y v0.1.0\n\nreplace ", "example.com/x",
		},
		"a module that is not published": {
			"lib/deep/go.mod", "require ", "require example.com/third v0.1.0\n\nrequire ", "not published",
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := maps.Clone(sample)
			files[c.file] = strings.Replace(files[c.file], c.old, c.new, 1)
			r, err := clone(t.Context(), makeRepo(t, files), t.TempDir(), false)
			require.NoError(t, err)
			_, err = r.release(t.Context(), "v0.2.0")
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestZipsHoldNothingOdd(t *testing.T) {
	for name, c := range map[string]struct{ file, text, want string }{
		"a large file":  {"data.bin", strings.Repeat("x", maxFile+1), "data.bin has"},
		"other modules": {"testdata/vendor/modules.txt", "", "no copies of others"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := clone(t.Context(), makeRepo(t, map[string]string{
				"LICENSE": "free", "go.work": "go 1.26.0\n\nuse .\n", "go.mod": sample["go.mod"], c.file: c.text,
			}), t.TempDir(), false)
			require.NoError(t, err)
			_, err = r.release(t.Context(), "v0.2.0")
			require.NoError(t, err)
			require.ErrorContains(t, r.checkZip(t.Context(), t.Output(), r.modules[0], "v0.2.0"), c.want)
		})
	}
}

func TestStatedVersionIsOneThatTagsCanHave(t *testing.T) {
	for version, good := range map[string]bool{"0.1.0": true, "1.2.3-rc.1": true, "2.0.0": false, "dev": false} {
		dir := makeRepo(t, map[string]string{"pdflow/p.go": "package pdflow\n\nconst Version = \"" + version + "\"\n"})
		got, err := statedVersion(dir)
		if good {
			require.NoError(t, err)
			assert.Equal(t, "v"+version, got)
		} else {
			require.ErrorContains(t, err, "no version of v0 or v1")
		}
	}
}
