// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// component is a module in a list of parts (CycloneDX 1.6).
type component struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version"`
	PURL    string `json:"purl"`
}

func newComponent(path, version string) component {
	return component{Type: "library", Name: path, Version: version, PURL: "pkg:golang/" + path + "@" + version}
}

// writeSBOMs writes for each module of the release which modules its packages are built from, as CycloneDX, into a
// folder. Modules that only tests or other systems need are not parts of it.
func (r *repo) writeSBOMs(ctx context.Context, folder, version string) error {
	for _, m := range r.modules {
		if !r.published(m) {
			continue
		}
		out, err := command(ctx, filepath.Join(r.dir, m.dir), r.goEnv, "go", "list", "-deps", "-f",
			"{{with .Module}}{{.Path}} {{.Version}}{{end}}", "./...")
		if err != nil {
			return err
		}
		var parts []component
		for _, line := range slices.Compact(slices.Sorted(strings.Lines(out))) {
			path, of, _ := strings.Cut(strings.TrimSpace(line), " ")
			if path != "" && path != m.path {
				parts = append(parts, newComponent(path, of))
			}
		}
		doc, err := json.MarshalIndent(map[string]any{
			"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
			"metadata":   map[string]any{"component": newComponent(m.path, version)},
			"components": parts,
		}, "", "  ")
		if err != nil {
			return err
		}
		name := strings.ReplaceAll(m.tag(version), "/", "-") + ".cdx.json"
		if err := os.WriteFile(filepath.Join(folder, name), append(doc, '\n'), 0o600); err != nil {
			return err
		}
	}
	return nil
}
