// SPDX-License-Identifier: Apache-2.0

// Command hotpaths compares the benchmarks of the paths that each request takes with those of an earlier commit:
//
//	go run ./internal/tools/hotpaths          # with the commit before HEAD
//	go run ./internal/tools/hotpaths COMMIT   # with another
//
// Both run in turns, and the fastest run of each counts, since a machine that is busy with other things only makes runs
// slower. It fails if one takes more than 1.5 times as long, or makes one allocation more. A commit that must do so
// says why in a line of its message, "Allocations: WHY".
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
	"slices"
	"strconv"
	"strings"
)

// slower is how much longer a path may take than before.
const slower = 1.5

// Each of the two trees runs some rounds, and more of them while a path seems to be too slow.
const (
	rounds     = 5
	mostRounds = 25
)

// paths are the benchmarks that are compared, by package.
var paths = []struct{ pkg, bench string }{
	{"pdflow", "^Benchmark(Request2KB|OwnTransport2KB|Stream.*)$"},
	{"transport", "^BenchmarkRoundTrip$/^(2KB|128KB)$/^transport$"},
	{"internal/jsonedit", "^BenchmarkParseSplice$/^chat$/^2*[0-9]KB$"},
	{"internal/sse", "^BenchmarkWithheld$"},
	{"connector/nixl", "^BenchmarkLegs$"},
}

func main() {
	flag.Parse()
	base := "HEAD^"
	if flag.NArg() > 0 {
		base = flag.Arg(0)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, base); err != nil {
		stop()
		fmt.Fprintln(os.Stderr, "hotpaths:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, w io.Writer, base string) error {
	commit, err := output(ctx, ".", "git", "rev-parse", "--verify", "--quiet", base+"^{commit}")
	if err != nil {
		fmt.Fprintf(w, "there is no commit %s to compare with\n", base)
		return nil
	}
	why, err := output(ctx, ".", "git", "log", "-1", "--format=%(trailers:key=Allocations,valueonly)")
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "pdkit-hotpaths-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	old := filepath.Join(dir, "old")
	if _, err := output(ctx, ".", "git", "clone", "--quiet", "--shared", "--no-checkout", ".", old); err != nil {
		return err
	}
	if _, err := output(ctx, old, "git", "checkout", "--quiet", "--detach", commit); err != nil {
		return err
	}
	var rows []row
	for _, p := range paths {
		more, err := compare(ctx, dir, old, p.pkg, p.bench)
		if err != nil {
			return fmt.Errorf("%s: %w", p.pkg, err)
		}
		rows = append(rows, more...)
	}
	return report(w, rows, why)
}

// compare runs a package's benchmarks in both trees.
func compare(ctx context.Context, dir, old, pkg, bench string) ([]row, error) {
	binaries := [2]string{filepath.Join(dir, "old.test"), filepath.Join(dir, "new.test")}
	trees := [2]string{old, "."}
	for i, tree := range trees {
		if _, err := os.Stat(filepath.Join(tree, pkg)); errors.Is(err, os.ErrNotExist) {
			return nil, nil // a new package has nothing to be compared with
		}
		if _, err := output(ctx, tree, "go", "test", "-c", "-o", binaries[i], "./"+pkg); err != nil {
			return nil, err
		}
	}
	var best [2]map[string]result
	for round := 0; ; round++ {
		if rows := judge(pkg, best[0], best[1]); round == mostRounds || round >= rounds && !anySlow(rows) {
			return rows, nil
		}
		for turn := range trees {
			i := (round + turn) % 2
			text, err := output(ctx, filepath.Join(trees[i], pkg), binaries[i],
				"-test.run=^$", "-test.bench="+bench, "-test.benchtime=50ms", "-test.benchmem")
			if err != nil {
				return nil, err
			}
			best[i] = better(best[i], parse(text))
		}
	}
}

// better keeps the least of each figure: also of allocations, since pools are not always full.
func better(best, more map[string]result) map[string]result {
	if best == nil {
		return more
	}
	for name, r := range more {
		if b, ok := best[name]; ok {
			r = result{min(b.ns, r.ns), min(b.allocs, r.allocs)}
		}
		best[name] = r
	}
	return best
}

// output runs a command in a folder and returns what it prints.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // git, go, and what it built
	cmd.Dir = dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(name), strings.Join(args, " "), err, &out, &errs)
	}
	return strings.TrimSpace(out.String()), nil
}

// result is one run of a benchmark.
type result struct{ ns, allocs float64 }

// parse reads the lines of benchmarks; others are none of its business.
func parse(text string) map[string]result {
	found := map[string]result{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		var r result
		for i := 2; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			switch {
			case err != nil:
			case f[i+1] == "ns/op":
				r.ns = v
			case f[i+1] == "allocs/op":
				r.allocs = v
			}
		}
		if r.ns > 0 {
			found[f[0]] = r
		}
	}
	return found
}

// row is one benchmark in both trees.
type row struct {
	name                 string
	ratio                float64 // of times, new to old
	oldAllocs, newAllocs float64
}

func anySlow(rows []row) bool {
	return slices.ContainsFunc(rows, func(r row) bool { return r.ratio > slower })
}

func judge(pkg string, old, now map[string]result) []row {
	var rows []row
	for name, before := range old {
		if after, ok := now[name]; ok { // else it went
			rows = append(rows, row{pkg + " " + name, after.ns / before.ns, before.allocs, after.allocs})
		}
	}
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.name, b.name) })
	return rows
}

// report prints the rows. The error names those that are beyond their bound.
func report(w io.Writer, rows []row, why string) error {
	if len(rows) == 0 {
		return errors.New("no benchmark is in both trees")
	}
	var beyond []string
	for _, r := range rows {
		fmt.Fprintf(w, "%-60s time x %.2f, allocations %g to %g\n", r.name, r.ratio, r.oldAllocs, r.newAllocs)
		if r.ratio > slower {
			beyond = append(beyond, fmt.Sprintf("%s takes %.2f times as long", r.name, r.ratio))
		}
		if r.newAllocs > r.oldAllocs && why == "" {
			beyond = append(beyond, fmt.Sprintf("%s makes %g allocations, %g before", r.name, r.newAllocs, r.oldAllocs))
		}
	}
	if why != "" {
		fmt.Fprintln(w, "more allocations are allowed:", why)
	}
	if len(beyond) > 0 {
		return errors.New(strings.Join(beyond, "; "))
	}
	return nil
}
