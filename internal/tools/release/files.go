// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// sumsFile has the checksums of the other files, in the form that sha256sum checks.
const sumsFile = "SHA256SUMS"

// writeFiles writes what lies on a release's page beside the modules: lists of parts, container images and checksums.
func (r *repo) writeFiles(ctx context.Context, out io.Writer, folder, version string) error {
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return err
	}
	had, err := os.ReadDir(folder)
	if err != nil {
		return err
	}
	if len(had) > 0 {
		return fmt.Errorf("%s must be empty: %s names all of its files", folder, sumsFile)
	}
	step := time.Now()
	if err := r.writeImages(ctx, folder, version); err != nil {
		return err
	}
	if err := r.writeSBOMs(ctx, folder, version); err != nil {
		return err
	}
	text, err := checksums(folder)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(folder, sumsFile), []byte(text), 0o600); err != nil {
		return err
	}
	checked, err := command(ctx, folder, nil, "sha256sum", "-c", sumsFile)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%5.1fs  wrote and checked the files of the release:\n%s", time.Since(step).Seconds(), checked)
	return nil
}

// writeImages writes the container images of the programs at their tag. It makes them twice, from two clones, since
// whoever builds them from the tag must get the files that the checksums name.
func (r *repo) writeImages(ctx context.Context, folder, version string) error {
	again := filepath.Join(r.temp, "images")
	var made [2]string
	for i, dir := range []string{folder, again} {
		dir, err := filepath.Abs(dir)
		if err != nil {
			return err
		}
		if _, err := r.goUser(ctx, filepath.Join(r.dir, "cmd"), "run", "./images", "-ref", "cmd/"+version,
			"-out", dir); err != nil {
			return err
		}
		if made[i], err = checksums(dir); err != nil {
			return err
		}
	}
	if made[0] != made[1] {
		return fmt.Errorf("the same commit gives other images the second time:\n%s%s", made[0], made[1])
	}
	return nil
}

// checksums returns a line for each file of a folder, in the order of their names.
func checksums(folder string) (string, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(folder, file.Name()))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&text, "%x  %s\n", sha256.Sum256(content), file.Name())
	}
	return text.String(), nil
}
