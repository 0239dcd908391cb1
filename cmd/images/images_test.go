// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const committedAt = "2026-01-02T03:04:05Z"

// makeRepo returns a repository whose programs are small, with a tag for its only commit.
func makeRepo(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{ // the go command reads the root's go.mod to find the versions of a nested module
		"go.mod":     "module github.com/pdkit/sample\n\ngo 1.26.0\n",
		"LICENSE":    "terms",
		"NOTICE":     "terms",
		"cmd/go.mod": "module github.com/pdkit/sample/cmd\n\ngo 1.26.0\n",
	}
	for _, p := range programs {
		files["cmd/"+p.name+"/main.go"] = "package main\n\nfunc main() { println(\"" + p.name + "\") }\n"
	}
	for name, text := range files {
		name = filepath.Join(dir, filepath.FromSlash(name))
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o750))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	for _, args := range [][]string{{"init", "--quiet"}, {"add", "--all"}, {"commit", "--quiet", "--message", "All"},
		{"tag", "cmd/v0.2.0"}} {
		git(t, dir, args...)
	}
	return dir
}

func git(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, err := command(t.Context(), dir, []string{"GIT_COMMITTER_DATE=" + committedAt},
		"git", append([]string{"-c", "user.name=test", "-c", "user.email=test"}, args...)...)
	require.NoError(t, err)
	return out
}

// makeImages runs the command with these arguments, and returns the folder with what it wrote.
func makeImages(t *testing.T, repo string, args ...string) string {
	t.Helper()
	out := t.TempDir()
	o, err := parse(append([]string{"-out", out}, args...), t.Output())
	require.NoError(t, err)
	require.NoError(t, o.run(t.Context(), t.Output(), repo))
	return out
}

// unpack returns the layout in an archive, and its only index.
func unpack(t *testing.T, archive string) (folder string, index v1.ImageIndex) {
	t.Helper()
	folder = t.TempDir()
	f, err := os.Open(archive)
	require.NoError(t, err)
	defer f.Close()
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		require.NoError(t, err)
		content, err := io.ReadAll(r)
		require.NoError(t, err)
		name := filepath.Join(folder, filepath.FromSlash(h.Name))
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o750))
		require.NoError(t, os.WriteFile(name, content, 0o600))
		assert.Equal(t, committedAt, h.ModTime.UTC().Format(time.RFC3339), h.Name)
	}
	top, err := layout.ImageIndexFromPath(folder)
	require.NoError(t, err)
	m, err := top.IndexManifest()
	require.NoError(t, err)
	require.Len(t, m.Manifests, 1)
	index, err = top.ImageIndex(m.Manifests[0].Digest)
	require.NoError(t, err)
	require.NoError(t, validate.Index(index), "all digests and sizes are those of the content")
	return folder, index
}

func TestAnImageHoldsOneProgramAndSaysHowToRunIt(t *testing.T) {
	repo := makeRepo(t)
	out := makeImages(t, repo)
	for name, ports := range map[string][]string{"gateway": {"8000/tcp", "9000/tcp"}, "sidecar": {"8000/tcp"},
		"pdctl": {}} {
		_, index := unpack(t, filepath.Join(out, "pdkit-"+name+"-0.2.0.tar"))
		m, err := index.IndexManifest()
		require.NoError(t, err)
		require.Len(t, m.Manifests, 2)
		for i, arch := range []string{"amd64", "arm64"} {
			assert.Equal(t, &v1.Platform{OS: "linux", Architecture: arch}, m.Manifests[i].Platform)
			img, err := index.Image(m.Manifests[i].Digest)
			require.NoError(t, err)
			cfg, err := img.ConfigFile()
			require.NoError(t, err)
			assert.Equal(t, arch, cfg.Architecture)
			assert.Equal(t, committedAt, cfg.Created.Format(time.RFC3339))
			assert.Equal(t, "65532:65532", cfg.Config.User, "a number: runAsNonRoot accepts no name")
			assert.Equal(t, []string{"/" + name}, cfg.Config.Entrypoint, "without a shell, which would get the signal")
			assert.Equal(t, "SIGTERM", cfg.Config.StopSignal)
			assert.Len(t, cfg.Config.ExposedPorts, len(ports))
			for _, port := range ports {
				assert.Contains(t, cfg.Config.ExposedPorts, port)
			}
			labels := cfg.Config.Labels
			assert.Equal(t, "v0.2.0", labels["org.opencontainers.image.version"])
			assert.Equal(t, git(t, repo, "rev-parse", "HEAD"), labels["org.opencontainers.image.revision"])
			assert.Equal(t, committedAt, labels["org.opencontainers.image.created"])
			assert.Equal(t, labels, m.Annotations)
			checkLayer(t, img, name)
		}
	}
}

func checkLayer(t *testing.T, img v1.Image, name string) {
	t.Helper()
	layers, err := img.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	content, err := layers[0].Uncompressed()
	require.NoError(t, err)
	defer content.Close()
	r := tar.NewReader(content)
	h, err := r.Next()
	require.NoError(t, err)
	assert.Equal(t, name, h.Name)
	assert.Equal(t, int64(0o555), h.Mode)
	assert.Zero(t, h.Uid, "root's, so that the program cannot change its own file")
	assert.Equal(t, committedAt, h.ModTime.UTC().Format(time.RFC3339))
	for _, want := range map[string][]tar.Header{"sidecar": { // KServe's preset runs llm-d's program by its path
		{Typeflag: tar.TypeDir, Name: "app/", Mode: 0o755},
		{Typeflag: tar.TypeSymlink, Name: "app/pd-sidecar", Linkname: "../sidecar", Mode: 0o777},
	}}[name] {
		h, err = r.Next()
		require.NoError(t, err)
		assert.Equal(t, committedAt, h.ModTime.UTC().Format(time.RFC3339))
		assert.Equal(t, want, tar.Header{Typeflag: h.Typeflag, Name: h.Name, Linkname: h.Linkname, Mode: h.Mode,
			Uid: h.Uid, Gid: h.Gid})
	}
	for _, want := range []string{"LICENSE", "NOTICE", "go/LICENSE"} {
		h, err = r.Next()
		require.NoError(t, err)
		assert.Equal(t, "licenses/"+want, h.Name)
		assert.Equal(t, int64(0o444), h.Mode)
		if want == "go/LICENSE" {
			continue
		}
		text, err := io.ReadAll(r)
		require.NoError(t, err)
		assert.Equal(t, "terms", string(text))
	}
	for h, err = r.Next(); err == nil; h, err = r.Next() {
		assert.Equal(t, "licenses/go/PATENTS", h.Name, "nothing else")
	}
	assert.Equal(t, io.EOF, err)
}

func TestTheSameCommitGivesTheSameBytes(t *testing.T) {
	repo := makeRepo(t)
	first := makeImages(t, repo, "gateway")
	require.NoError(t, os.WriteFile(filepath.Join(repo, "README.md"), []byte("later"), 0o600))
	git(t, repo, "add", "--all")
	git(t, repo, "commit", "--quiet", "--message", "Later")
	require.NoError(t, os.WriteFile(filepath.Join(repo, "cmd/gateway/main.go"), []byte("nothing"), 0o600))
	for name, value := range map[string]string{"GOAMD64": "v3", "GOARM64": "v9.0", "GOEXPERIMENT": "jsonv2",
		"GOFLAGS": "-tags=other -buildvcs=false", "GOFIPS140": "v1.0.0", "GOWORK": "nothing"} {
		t.Setenv(name, value)
	}
	second := makeImages(t, repo, "-ref", "cmd/v0.2.0", "gateway")
	want, err := os.ReadFile(filepath.Join(first, "pdkit-gateway-0.2.0.tar"))
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(second, "pdkit-gateway-0.2.0.tar"))
	require.NoError(t, err)
	assert.Equal(t, sha256.Sum256(want), sha256.Sum256(got),
		"whatever the clone's folder, the time, later commits, changes without one and the go command's settings")
}

// A file of `go env -w` may say whence modules come. What it says of the program does not count.
func TestSettingsOfTheGoCommandCountForDownloadsAlone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "env")
	require.NoError(t, os.WriteFile(file, []byte("GOPROXY=https://proxy.example\nGONOSUMDB=corp.example\n"+
		"GOAMD64=v3\nGOEXPERIMENT=jsonv2\nGOFLAGS=-modcacherw -tags=other\n"), 0o600))
	for _, name := range []string{"GOPROXY", "GONOSUMDB", "GOPRIVATE", "GOAMD64", "GOEXPERIMENT", "GOFLAGS"} {
		t.Setenv(name, "")
	}
	t.Setenv("GOENV", file)
	t.Setenv("GOTMPDIR", filepath.Dir(file))
	env, err := buildEnv(t.Context(), ".", "arm64")
	require.NoError(t, err)
	for _, want := range []string{"GOENV=off", "GOPROXY=https://proxy.example", "GONOSUMDB=corp.example",
		"GOTMPDIR=" + filepath.Dir(file), "GOAMD64=v1", "GOEXPERIMENT=", "GOARCH=arm64",
		"GOFLAGS=-modcacherw", // else the module cache that a release makes for itself could not be removed
	} {
		assert.Contains(t, env, want)
	}
}

// Docker's own store knows no index: each architecture has a tag, or the only one has the image's.
func TestDockersOlderStoreFindsItsImages(t *testing.T) {
	repo := makeRepo(t)
	for _, c := range []struct{ archs, tags string }{
		{"amd64,arm64", "pdkit-pdctl:mine-amd64 pdkit-pdctl:mine-arm64"}, {"arm64", "pdkit-pdctl:mine"},
	} {
		archive := filepath.Join(makeImages(t, repo, "-arch", c.archs, "-tag", "mine", "pdctl"), "pdkit-pdctl-mine.tar")
		folder, _ := unpack(t, archive)
		text, err := os.ReadFile(filepath.Join(folder, "manifest.json"))
		require.NoError(t, err)
		var entries []legacyImage
		require.NoError(t, json.Unmarshal(text, &entries))
		var tags []string
		for _, e := range entries {
			tags = append(tags, e.RepoTags...)
		}
		assert.Equal(t, c.tags, strings.Join(tags, " "))
		m, err := tarball.LoadManifest(func() (io.ReadCloser, error) { return os.Open(archive) })
		require.NoError(t, err)
		assert.Len(t, m, len(tags))
		assert.FileExists(t, filepath.Join(folder, entries[0].Config))
		assert.FileExists(t, filepath.Join(folder, entries[0].Layers[0]))
	}
}

func TestWrongCommandLines(t *testing.T) {
	for args, want := range map[string]string{
		"gatway": "each once", "pdctl gateway pdctl": "each once", "-push": "not defined",
		"-tag a/b": "letters, digits", "-tag ../../x": "letters, digits", "-tag ..": "letters, digits",
		"-tag v1:2": "letters, digits", "-tag -x": "letters, digits", "-tag " + strings.Repeat("x", 129): "at most 128",
		"-arch=": "amd64, arm64, or both", "-arch amd64,": "amd64, arm64, or both",
		"-arch x86_64": "amd64, arm64, or both", "-arch amd64,amd64": "each once",
	} {
		_, err := parse(strings.Fields(args), io.Discard)
		require.ErrorContains(t, err, want, "%v", args)
	}
	for _, tag := range []string{"0.1.0", "v0.1.0-rc.1", "_mine", strings.Repeat("x", 128)} {
		_, err := parse([]string{"-tag", tag, "-arch", "arm64,amd64"}, io.Discard)
		require.NoError(t, err, tag)
	}
	o, err := parse([]string{"-ref", "nothing", "-out", t.TempDir()}, io.Discard)
	require.NoError(t, err)
	require.ErrorContains(t, o.run(t.Context(), io.Discard, makeRepo(t)), "nothing^{commit}")
}
