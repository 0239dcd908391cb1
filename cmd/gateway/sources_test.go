// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// foundYAML is a ModelServer whose engines are found in the given way.
func foundYAML(discovery string) string {
	return gatewayYAML("") + serverYAML("m", "  discovery: {"+discovery+"}\n")
}

// listYAML is a file of engines, each an entry.
func listYAML(engines ...string) string {
	if len(engines) == 0 {
		return "endpoints: []\n"
	}
	return "endpoints:\n- " + strings.Join(engines, "\n- ") + "\n"
}

// lists writes a list of engines as a file, by renaming.
func lists(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path+".new", []byte(text), 0o600))
	require.NoError(t, os.Rename(path+".new", path))
}

func pairList(p, d *engine) string {
	return listYAML(entry(p.URL, "prefill", nil), entry(d.URL, "decode", nil))
}

// reaches sends requests until both engines have got some.
func reaches(t *testing.T, g *program, p, d *engine) {
	t.Helper()
	beforeP, beforeD := p.count(), d.count()
	eventually(t, func() bool {
		status, _, _ := g.complete(completion)
		return status == http.StatusOK && p.count() > beforeP && d.count() > beforeD
	}, "%s", g.log)
}

// knows waits until so many engines of the first model are known: a request waits only a moment for that.
func (p *program) knows(engines int) {
	p.t.Helper()
	eventually(p.t, func() bool { return len(p.debug().Models[0].Endpoints) == engines }, "%s", p.log)
}

func TestEnginesAreFoundInAFile(t *testing.T) {
	p, d, d2 := newEngine(t), newEngine(t), newEngine(t)
	path := filepath.Join(t.TempDir(), "engines.yaml")
	g := start(t, foundYAML("file: {path: "+path+"}"))
	status, h, _ := g.complete(completion)
	assert.Equal(t, http.StatusServiceUnavailable, status, "there is no list yet")
	assert.NotEmpty(t, h.Get("Retry-After"))
	eventually(t, func() bool {
		return strings.Contains(g.log.String(), "cannot be read: no such file or directory (there is no list yet)")
	})

	lists(t, path, pairList(p, d))
	reaches(t, g, p, d)
	lists(t, path, pairList(p, d2))
	reaches(t, g, p, d2)

	lists(t, path, pairList(p, d)+"- {url: hunter2, rol: prefill}\n")
	eventually(t, func() bool {
		return strings.Contains(g.log.String(), "line 4: endpoints[2].rol: unknown field")
	})
	assert.NotContains(t, g.log.String(), "hunter2")
	reaches(t, g, p, d2)
}

// A relative path starts at the configuration's folder, wherever the program was started.
func TestTheFilesPathStartsAtTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	p, d := newEngine(t), newEngine(t)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "lists"), 0o700))
	lists(t, filepath.Join(dir, "lists", "engines.yaml"), pairList(p, d))
	file := filepath.Join(dir, "config.yaml")
	require.NoError(t, os.WriteFile(file, []byte(foundYAML("file: {path: lists/engines.yaml}")), 0o600))
	code, stdout, stderr := check(t, "-config", file)
	assert.Equal(t, exitOK, code, stderr)
	assert.Contains(t, stdout, "discovery       file lists/engines.yaml, 2 endpoints now\n    prefill       "+p.URL)
}
