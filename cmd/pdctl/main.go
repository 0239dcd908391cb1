// SPDX-License-Identifier: Apache-2.0

// Pdctl is pdkit's tool for operators. It prints the settings with which engines must be launched for a gateway's
// configuration (render), reports what does not fit together in engines that run or are planned (check), proves that
// KV is reused (verify), shows a gateway at work (watch), tests any gateway from outside (conform), measures how
// fast it is (bench), tells what a fleet of engines would do (simulate), and verifies recorded decisions (replay).
// See README.md.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/alecthomas/kong"
	"github.com/willabides/kongplete"
	_ "golang.org/x/crypto/x509roots/fallback" // authorities where the system has none, as in an image

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	_ "github.com/pdkit/pdkit/connector/all"
)

const (
	exitOK     = 0
	exitFaults = 1 // pdctl found faults
	exitUsage  = 2 // a wrong command line, or an input that cannot be read

	exitInterrupted = 130 // as shells say it of a program that Ctrl-C ended
)

// cli is the command line. Each command has a file of its own.
type cli struct {
	Render renderCmd `cmd:"" help:"Print the launch settings of a ModelServer's engines."`
	Verify verifyCmd `cmd:"" help:"${verify}"`
	Check  checkCmd  `cmd:"" help:"${check}"`
	Watch  watchCmd  `cmd:"" help:"${watch}"`

	Conform conformCmd `cmd:"" help:"${conform}"`

	Bench      benchCmd      `cmd:"" help:"${bench}"`
	Simulate   simulateCmd   `cmd:"" help:"${simulate}"`
	Replay     replayCmd     `cmd:"" help:"${replay}"`
	Completion completionCmd `cmd:"" help:"${completion}"`

	Version kong.VersionFlag `help:"Print the version and end."`
}

// description stands above the commands in the usage.
const description = `Settings of engines for prefill/decode disaggregation: print them, check them, and prove that
KV is reused.

Examples:

  pdctl render -f gateway.yaml
  pdctl check -f gateway.yaml launch.sh
  pdctl verify -f gateway.yaml --gateway http://127.0.0.1:8000
  pdctl watch --admin http://127.0.0.1:9000
  pdctl conform --cmd 'my-gateway --port {port} --prefill {prefill} --decode {decode}'
  pdctl bench --url http://127.0.0.1:8000 --rate 10 --slo-ttft 500ms --slo-tpot 50ms
  pdctl simulate --prefill 6 --decode 3 --policies round-robin,prefix
  pdctl replay decisions/m.*.jsonl --verify

Exit status: 0; 1 if faults were found or requests failed; 2 for a wrong command line, or an input or gateway that
cannot be read; 130 after Ctrl-C, where a command had not ended. Each command's --help tells its own.
`

// streams are the input and outputs of commands.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// errFaults makes pdctl exit with 1. The command has already printed the faults.
var errFaults = errors.New("faults were found")

// errInterrupted makes pdctl exit with 130: a signal came before the command had ended.
var errInterrupted = errors.New("interrupted")

// interruptible returns a context that Ctrl-C ends, as SIGTERM does.
func interruptible() (context.Context, context.CancelFunc) {
	return signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
}

// writeJSON writes a value for other programs.
func writeJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// orInterrupted is the error of a command, or errInterrupted if a signal has ended its context.
func orInterrupted(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return errInterrupted
	}
	return err
}

// ended carries kong's own exits (for --help) back to run.
type ended struct{ code int }

func main() { os.Exit(run(os.Args[1:], streams{os.Stdin, os.Stdout, os.Stderr})) }

// run is the program. It returns the exit status.
func run(args []string, s streams) int { return runOf(&cli{}, args, s) }

// runOf is run for a command line with some of the commands.
func runOf(commands any, args []string, s streams) (code int) {
	bare := len(args) == 0 && os.Getenv("COMP_LINE") == "" // with COMP_LINE a shell asks, see completion.go
	defer func() {
		if v := recover(); v != nil {
			e, ok := v.(ended)
			if !ok {
				panic(v)
			}
			code = e.code
			if bare {
				code = exitUsage
			}
		}
	}()
	argv := args
	if bare { // the usage helps more than an error that names the commands
		argv, s.out = []string{"--help"}, s.err
	}
	if slices.Equal(argv, []string{"-version"}) { // as the gateway and the sidecar have it
		argv = []string{"--version"}
	}
	parser, err := kong.New(commands, kong.Name("pdctl"), help, kong.Vars{"version": cmdline.Line("pdctl")},
		kong.Description(description),
		kong.Writers(s.out, s.err), kong.Exit(func(code int) { panic(ended{code}) }), kong.UsageOnError())
	if err != nil {
		fmt.Fprintln(s.err, "pdctl:", err)
		return exitUsage
	}
	kongplete.Complete(parser) // answers a shell that asks for words, and ends
	ctx, err := parser.Parse(argv)
	if err == nil {
		err = ctx.Run(s)
	}
	switch {
	case errors.Is(err, errFaults):
		return exitFaults
	case errors.Is(err, errInterrupted):
		fmt.Fprintln(s.err, "pdctl: interrupted")
		return exitInterrupted
	case err != nil:
		fmt.Fprintln(s.err, "pdctl:", err)
		return exitUsage
	}
	return exitOK
}
