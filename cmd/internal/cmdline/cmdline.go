// SPDX-License-Identifier: Apache-2.0

// Package cmdline is what the command lines of the programs have in common: the version that they tell, and the errors
// of package flag in one line.
package cmdline

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/pdkit/pdkit/config"
)

// ErrWrong says that a command line is wrong, and that the reader has been told why.
var ErrWrong = errors.New("wrong command line")

// Version returns the version of the module that the program was built from: that of a release (v0.1.0), one with the
// time and the commit between releases, or (devel) where the go command wrote none into the program, as with go run.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

// Line is what -version prints: the program, its version, the Go release and the system it was built for.
func Line(program string) string {
	return fmt.Sprintf("pdkit %s %s, %s, %s/%s", program, Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// Parse parses the arguments of a set made by flag.NewFlagSet as fs.Parse does. It writes an error to stderr as one
// line, which names the flag that is nearest to an unknown one, and returns [ErrWrong]. For -help it writes the usage
// and returns flag.ErrHelp.
func Parse(fs *flag.FlagSet, args []string, stderr io.Writer) error {
	usage := fs.Usage
	fs.SetOutput(io.Discard) // package flag writes the whole usage after each error
	fs.Usage = func() {}
	err := fs.Parse(args)
	fs.SetOutput(stderr)
	fs.Usage = usage
	switch {
	case err == nil:
		return nil
	case errors.Is(err, flag.ErrHelp):
		usage()
		return err
	}
	problem := err.Error()
	if name, unknown := strings.CutPrefix(problem, "flag provided but not defined: -"); unknown {
		problem = "there is no flag -" + name
		var names []string
		fs.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
		if near := config.Nearest(name, names); near != "" {
			problem += "; did you mean -" + near + "?"
		}
	}
	return Wrong(fs, stderr, problem)
}

// Wrong writes what is wrong with a command line, and how to see all flags. It returns [ErrWrong].
func Wrong(fs *flag.FlagSet, stderr io.Writer, problem string) error {
	fmt.Fprintf(stderr, "%s: %s (%[1]s -help lists the flags)\n", fs.Name(), problem)
	return ErrWrong
}
