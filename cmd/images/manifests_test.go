// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The manifests name the image of the newest released version, as CHANGELOG.md has it: between releases the constant
// version is already the next one, of which there is no image yet.
func TestTheManifestsNameTheImage(t *testing.T) {
	version := released(t)
	manifests := map[string][]string{
		"gateway": {"cmd/gateway/kubernetes.yaml"},
		"sidecar": {"cmd/sidecar/manifests/llm-d.yaml", "cmd/sidecar/manifests/kserve.yaml",
			"cmd/sidecar/manifests/llm-d-overlay/sidecar.yaml"},
		"pdctl": nil, // no manifest runs it
	}
	require.Len(t, manifests, len(programs))
	for _, p := range programs {
		im := image{program: p}
		for _, name := range manifests[p.name] {
			line := "image: " + im.name() + ":" + version + "\n"
			if !strings.Contains(read(t, name), line) {
				t.Errorf("%s has no %s", name, line)
			}
		}
	}
	const chart = "cmd/gateway/chart/"
	assert.Contains(t, read(t, chart+"values.yaml"), `image: {repository: pdkit-gateway, tag: "",`)
	assert.Contains(t, read(t, chart+"Chart.yaml"), "\nappVersion: "+version+"\n")
	assert.Contains(t, read(t, chart+"Chart.yaml"), "\nversion: "+version+"\n")
}

var (
	// mention finds a version in the name of an image, of its file or of a tag.
	mention = regexp.MustCompile(`(?:pdkit-(?:gateway|sidecar|pdctl)[:-]|\.tar:|-tag |` +
		`cmd/(?:(?:gateway|sidecar|pdctl)@)?v)(v?\d+\.\d+\.\d+)`)
	// making finds the commands of a page that make images.
	making = regexp.MustCompile("go run \\./cmd/images([^`\n]*)")
)

// Whoever copies a page's command makes the image that the manifests name, before the version's tag and after it. All
// pages and manifests have the same version, and RELEASING.md names them, so that no release forgets one.
func TestThePagesMakeTheImageOfTheManifests(t *testing.T) {
	version := released(t)
	releasing := read(t, "RELEASING.md")
	named := func(name string) {
		if !strings.Contains(releasing, "`"+name+"`") {
			t.Errorf("RELEASING.md does not name %s", name)
		}
	}
	named("cmd/gateway/chart/Chart.yaml")
	require.NoError(t, fs.WalkDir(os.DirFS("../.."), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && name != "." && strings.HasPrefix(d.Name(), ".") {
			return fs.SkipDir
		}
		ext := filepath.Ext(name)
		if d.IsDir() || ext != ".md" && ext != ".yaml" || name == "CHANGELOG.md" { // which has all versions
			return nil
		}
		text := read(t, name)
		found := mention.FindAllStringSubmatch(text, -1)
		for _, m := range found {
			assert.Equal(t, version, m[1], "%s: %s", name, m[0])
		}
		if len(found) > 0 {
			named(name)
		}
		if name == "RELEASING.md" || name == "cmd/images/README.md" { // which explain the other tags
			return nil
		}
		for _, m := range making.FindAllStringSubmatch(text, -1) {
			assert.Contains(t, m[1], "-tag "+version, "%s: %s", name, m[0])
		}
		return nil
	}))
}

// released returns the version of CHANGELOG.md's newest heading.
func released(t *testing.T) string {
	t.Helper()
	heading := regexp.MustCompile(`(?m)^## \[(\d[^\]]*)\]`).FindStringSubmatch(read(t, "CHANGELOG.md"))
	require.NotNil(t, heading)
	return heading[1]
}

// read returns a file of the repository.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", name))
	require.NoError(t, err)
	return string(text)
}
