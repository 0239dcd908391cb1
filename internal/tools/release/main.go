// SPDX-License-Identifier: Apache-2.0

// Command release makes the commits and tags of a release in a temporary clone of HEAD, and then does there what users
// will do: it gets each module and installs the programs through a module proxy that holds the release. RELEASING.md
// says when to run it, and what for.
//
//	go run ./internal/tools/release         rehearses: nothing outside the temporary folder changes
//	go run ./internal/tools/release -keep   and takes the commits and tags over into this repository if all passed
//	go run ./internal/tools/release -out FOLDER   and leaves the release's files there: container images, what each
//	                                        module is built from (CycloneDX), and checksums
//
// It runs git and go, is run from the root of the repository, and never pushes.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	keep := flag.Bool("keep", false, "take the commits and tags over if everything passed")
	files := flag.String("out", "", "leave container images, lists of parts and checksums in this `FOLDER`")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Stdout, ".", *files, *keep)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// run rehearses the release of the version that the repository states, leaves its files in a folder unless files is "",
// and with keep takes the release over.
func run(ctx context.Context, out io.Writer, source, files string, keep bool) (err error) {
	version, err := statedVersion(source)
	if err != nil {
		return err
	}
	step := time.Now()
	temp, err := os.MkdirTemp("", "release")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	r, err := clone(ctx, source, temp, keep)
	if err != nil {
		return err
	}
	tags, err := r.release(ctx, version)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%5.1fs  committed and tagged in a clone: %s\n", time.Since(step).Seconds(),
		strings.Join(tags, " "))
	if keep {
		if err := mayKeep(ctx, source, version, tags); err != nil {
			return err
		}
	}
	if err := r.rehearse(ctx, out, version); err != nil {
		return err
	}
	if files == "" {
		files = filepath.Join(temp, "files")
	}
	if err := r.writeFiles(ctx, out, files, version); err != nil {
		return err
	}
	if !keep {
		return nil
	}
	if err := take(ctx, source, r.dir); err != nil {
		return err
	}
	fmt.Fprintln(out, "To publish it: git push --atomic origin HEAD", strings.Join(tags, " "))
	return nil
}

var (
	versionConst = regexp.MustCompile(`(?m)^const [Vv]ersion = "(.+)"$`)
	// A major version from 2 on would need module paths that end with it.
	goodVersion = regexp.MustCompile(`^v[01]\.\d+\.\d+(-[0-9A-Za-z.-]+)?$`)
)

// statedVersion reads the constant version of package pdflow, the one place that states the version of all modules.
func statedVersion(root string) (string, error) {
	files, err := filepath.Glob(filepath.Join(root, "pdflow", "*.go"))
	if err != nil {
		return "", err
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		if found := versionConst.FindSubmatch(text); found != nil {
			version := "v" + string(found[1])
			if !goodVersion.MatchString(version) {
				return "", fmt.Errorf("pdflow's constant version: %s is no version of v0 or v1", version)
			}
			return version, nil
		}
	}
	return "", errors.New("package pdflow has no constant version: run it from the root of the repository")
}

// mayKeep returns an error if the repository is not ready for a release.
func mayKeep(ctx context.Context, source, version string, tags []string) error {
	changelog, err := os.ReadFile(filepath.Join(source, "CHANGELOG.md"))
	if err != nil {
		return err
	}
	if heading := "\n## [" + version[1:] + "]"; !bytes.Contains(changelog, []byte(heading)) {
		return fmt.Errorf("CHANGELOG.md has no heading %q", strings.TrimSpace(heading))
	}
	if changed, err := command(ctx, source, nil, "git", "status", "--porcelain", "--untracked-files=no"); err != nil {
		return err
	} else if changed != "" {
		return errors.New("the work tree has changes that are not committed")
	}
	if had, err := command(ctx, source, nil, "git", append([]string{"tag", "--list"}, tags...)...); err != nil {
		return err
	} else if had != "" {
		return fmt.Errorf("a tag is there already, and what it names must never change: %s", strings.Fields(had))
	}
	return nil
}

// take brings the clone's commits and tags into the repository.
func take(ctx context.Context, source, clone string) error {
	if _, err := command(ctx, source, nil, "git", "pull", "--quiet", "--ff-only", "--no-tags", clone,
		"HEAD"); err != nil {
		return err
	}
	_, err := command(ctx, source, nil, "git", "fetch", "--quiet", clone, "refs/tags/*:refs/tags/*")
	return err
}

// command runs a program in a folder, with more environment variables, and returns what it printed.
func command(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // git, go, and what it installed from this repository
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, stderr.Bytes())
	}
	return string(out), nil
}
