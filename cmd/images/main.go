// SPDX-License-Identifier: Apache-2.0

// Images writes container images of the gateway, the sidecar and pdctl, one file for each, without a container engine
// and without a base image:
//
//	go run ./cmd/images                       HEAD, for linux/amd64 and linux/arm64
//	go run ./cmd/images -arch amd64 gateway   one program for one architecture, which is faster
//	go run ./cmd/images -ref cmd/vX.Y.Z  a release
//
// It builds from a clone of the commit, so changes that are not committed are not in the image, and the same commit
// gives the same bytes with the same Go release. It needs git and go. README.md beside this file says what is in an
// image, and how it comes to a cluster.
package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// programs are those that have images: packages of the module cmd.
var programs = []program{
	{name: "gateway", description: "gateway for prefill/decode-disaggregated LLM serving",
		ports: []string{"8000/tcp", "9000/tcp"}},
	{name: "sidecar", description: "sidecar of decode engines for prefill/decode-disaggregated LLM serving",
		ports: []string{"8000/tcp"}, link: "app/pd-sidecar"},
	{name: "pdctl", description: "tool for operators of prefill/decode-disaggregated LLM serving"},
}

type program struct {
	name, description string
	ports             []string // of its defaults
	// link is "", or a second path in a folder, which leads to the program. KServe's preset runs llm-d's sidecar by the
	// path that pdkit's has here (kserve/kserve@aaac4e2, config/llmisvcconfig/config-llm-decode-template.yaml).
	link string
}

// order is what the command line asks for.
type order struct {
	ref, out, tag string
	archs         []string
	programs      []program
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	o, err := parse(os.Args[1:], os.Stderr)
	if err == nil {
		err = o.run(ctx, os.Stdout, ".")
	}
	stop()
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "images:", err)
		os.Exit(1)
	}
}

// goodTag is a tag of the OCI distribution specification 1.1 (spec.md, "Pulling manifests"). It is part of the name of
// a file, too, and has no slash.
var goodTag = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$`)

func parse(args []string, stderr io.Writer) (*order, error) {
	fs := flag.NewFlagSet("images", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o := &order{}
	fs.StringVar(&o.ref, "ref", "HEAD", "the `COMMIT`, or its tag or branch, that is built")
	fs.StringVar(&o.out, "out", ".", "the `FOLDER` for the files")
	fs.StringVar(&o.tag, "tag", "", "the images' `TAG`; by default the version")
	archs := fs.String("arch", "amd64,arm64", "the architectures: amd64, arm64, or both as a `LIST` with a comma")
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if o.tag != "" && !goodTag.MatchString(o.tag) {
		return nil, fmt.Errorf("-tag %q: a tag is at most 128 letters, digits, _, . and -, and begins with neither "+
			". nor -, such as 0.1.0", o.tag)
	}
	o.archs = strings.Split(*archs, ",")
	for i, arch := range o.archs {
		if arch != "amd64" && arch != "arm64" || slices.Contains(o.archs[:i], arch) {
			return nil, fmt.Errorf("-arch %q: architectures are amd64, arm64, or both with a comma, each once", *archs)
		}
	}
	for _, p := range programs {
		if fs.NArg() == 0 || slices.Contains(fs.Args(), p.name) {
			o.programs = append(o.programs, p)
		}
	}
	if fs.NArg() > len(o.programs) {
		return nil, fmt.Errorf("programs are gateway, sidecar and pdctl, each once: %q", fs.Args())
	}
	return o, nil
}

// run builds from the repository in which dir lies, and writes one file for each program.
func (o *order) run(ctx context.Context, stdout io.Writer, dir string) (err error) {
	temp, err := os.MkdirTemp("", "images")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	clone, err := checkOut(ctx, dir, o.ref, filepath.Join(temp, "clone"))
	if err != nil {
		return err
	}
	if err := os.MkdirAll(o.out, 0o750); err != nil { //nolint:gosec // whoever runs the command names the folder
		return err
	}
	for _, p := range o.programs {
		im := image{program: p, tag: o.tag}
		for _, arch := range o.archs {
			b, err := compile(ctx, clone, p.name, arch, filepath.Join(temp, arch, p.name))
			if err != nil {
				return err
			}
			im.binaries = append(im.binaries, b)
		}
		if im.tag == "" {
			im.tag = strings.TrimPrefix(im.binaries[0].version, "v")
		}
		file := filepath.Join(o.out, im.name()+"-"+im.tag+".tar")
		digest, err := im.write(file, filepath.Join(temp, "layout-"+p.name))
		if err != nil {
			return err
		}
		fmt.Fprintf(stdout, "%s:%s in %s, %s\n", im.name(), im.tag, file, digest)
	}
	return nil
}

// checkOut clones the repository and checks the commit out. Only in a clone does the go command write the version into
// the build in any case: it does not know the worktrees of git, and calls a tree with changes dirty.
func checkOut(ctx context.Context, dir, ref, clone string) (string, error) {
	root, err := command(ctx, dir, nil, "git", "rev-parse", "--show-toplevel")
	if err != nil {
		return "", err
	}
	commit, err := command(ctx, dir, nil, "git", "rev-parse", "--verify", ref+"^{commit}")
	if err != nil {
		return "", err
	}
	if _, err := command(ctx, dir, nil, "git", "clone", "--quiet", "--no-checkout", root, clone); err != nil {
		return "", err
	}
	_, err = command(ctx, clone, nil, "git", "checkout", "--quiet", "--detach", commit)
	return clone, err
}

// binary is a program for one architecture.
type binary struct {
	file, arch        string
	version, revision string
	committed         time.Time
	licences          []licence
}

// kept are the settings of the go command that say whence modules come and where it keeps them and what it has built.
var kept = []string{"GOPROXY", "GONOPROXY", "GOPRIVATE", "GOSUMDB", "GONOSUMDB", "GOINSECURE", "GOAUTH", "GOVCS",
	"GOTOOLCHAIN", "GOPATH", "GOMODCACHE", "GOCACHE", "GOCACHEPROG", "GOTMPDIR"}

// buildEnv returns the environment of a build in dir. Of what the user has set, in the environment or with `go env -w`,
// it has what is kept. The rest could change the program, and the same commit is to give the same bytes everywhere.
func buildEnv(ctx context.Context, dir, arch string) ([]string, error) {
	out, err := command(ctx, dir, []string{"GOWORK=off"}, "go", append([]string{"env", "-json", "GOFLAGS"}, kept...)...)
	if err != nil {
		return nil, err
	}
	var have map[string]string
	if err := json.Unmarshal([]byte(out), &have); err != nil {
		return nil, err
	}
	env := []string{
		// Without go.work: at the tags of a release the other modules are those of the release.
		"GOENV=off", "GOWORK=off", "GO111MODULE=", "CGO_ENABLED=0", "GOOS=linux", "GOARCH=" + arch,
		"GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFIPS140=off",
	}
	flags := "GOFLAGS="
	if slices.Contains(strings.Fields(have["GOFLAGS"]), "-modcacherw") { // it says how modules are kept, too
		flags += "-modcacherw"
	}
	env = append(env, flags)
	for _, name := range kept {
		env = append(env, name+"="+have[name])
	}
	return env, nil
}

// compile builds a program of the clone into a static file.
func compile(ctx context.Context, clone, program, arch, file string) (binary, error) {
	dir := filepath.Join(clone, "cmd")
	env, err := buildEnv(ctx, dir, arch)
	if err != nil {
		return binary{}, err
	}
	if _, err := command(ctx, dir, env, "go", "build", "-trimpath", "-buildvcs=true", "-ldflags=-s -w", "-o", file,
		"./"+program); err != nil {
		return binary{}, err
	}
	info, err := buildinfo.ReadFile(file)
	if err != nil {
		return binary{}, err
	}
	b := binary{file: file, arch: arch, version: info.Main.Version}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.revision = s.Value
		case "vcs.time":
			b.committed, err = time.Parse(time.RFC3339, s.Value)
		}
	}
	if b.revision == "" || b.committed.IsZero() || !strings.HasPrefix(b.version, "v") {
		return b, fmt.Errorf("%s: the build tells no version and commit: %s", program, info)
	}
	if err == nil {
		b.licences, err = licences(ctx, clone, program, env)
	}
	return b, err
}

// command runs a program in a folder, with more environment variables, and returns what it printed on one line.
func command(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // git and go
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), nil
}
