// SPDX-License-Identifier: Apache-2.0

// Gateway serves LLM requests over pairs of prefill and decode engines: a whole program on top of pdkit's packages.
//
//	go run ./cmd/gateway -config FILE
//
// The README beside this file describes the configuration. SIGHUP reads it again, as a change of the file does. Exit
// codes: 0 after a drain or a good -check, 1 when serving failed, 2 for a wrong command line or configuration.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	_ "golang.org/x/crypto/x509roots/fallback" // authorities where the system has none, as in an image

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
)

const (
	exitOK     = 0
	exitFailed = 1
	exitWrong  = 2
)

func main() {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, os.Interrupt, syscall.SIGHUP)
	floor := collector()
	code := run(os.Args[1:], os.Stdout, os.Stderr, signals)
	runtime.KeepAlive(floor)
	os.Exit(code)
}

// run is the program: it returns its exit code.
func run(args []string, stdout, stderr io.Writer, signals <-chan os.Signal) int {
	f, err := parseFlags(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		return exitWrong
	}
	if f.version {
		fmt.Fprintln(stdout, cmdline.Line("gateway"))
		return exitOK
	}
	var cfg *configuration
	if err = f.recording.check(); err == nil {
		cfg, err = load(f.config, f.read)
	}
	if err == nil && f.check {
		err = cfg.unusable()
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return exitWrong
	}
	if f.check {
		if err := printCheck(stdout, cfg); err != nil {
			fmt.Fprintln(stderr, "gateway: writing the check:", err)
			return exitFailed
		}
		return exitOK
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.level}))
	log.Info("pdkit gateway", "version", cmdline.Version())
	for _, n := range cfg.notes {
		n.log(log)
	}
	if err := serve(context.Background(), f, cfg, log, signals); err != nil {
		log.Error("cannot serve", "error", err)
		return exitFailed
	}
	return exitOK
}
