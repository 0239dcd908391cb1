// SPDX-License-Identifier: Apache-2.0

// Sidecar runs before a decode engine in place of llm-d's sidecar. A scheduler names the prefill engine of each request
// in the header x-prefiller-host-port. The sidecar sends the request there for prefill, and then to the engine beside
// it for decode.
//
//	go run ./cmd/sidecar --kv-connector=nixlv2 --secure-serving=false --prefillers=10.0.0.1:8000,10.0.0.2:8000
//
// The README beside this file lists the flags. Exit codes: 0 after a drain, 1 when serving failed, 2 for a wrong
// command line.
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
	"syscall"
	"time"

	_ "golang.org/x/crypto/x509roots/fallback" // authorities where the system has none, as in an image

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	"github.com/pdkit/pdkit/cmd/otlp"
	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a flag may name
)

const (
	exitOK     = 0
	exitFailed = 1
	exitWrong  = 2
)

func main() {
	// There is no configuration to read again: flags stay, and files (certificates, --prefillers-file) are read again
	// when they change. So a signal that asks for a reload must not end the requests in flight.
	signal.Ignore(syscall.SIGHUP)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program. It serves until ctx ends, drains, and returns the exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	f, err := parseFlags(args, getenv, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		return exitWrong
	}
	if f.version {
		fmt.Fprintln(stdout, cmdline.Line("sidecar"))
		return exitOK
	}
	var form slog.Handler = slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.level})
	if f.json {
		form = slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: f.level})
	}
	log := slog.New(form)
	log.Info("pdkit sidecar", "version", cmdline.Version())
	otlp.LogTo(log)
	tel, err := newTelemetry(ctx, f, getenv, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "sidecar:", err)
		return exitFailed
	}
	defer func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := tel.close(last); err != nil {
			log.Warn("the last spans are lost")
		}
	}()
	s, err := build(f, log, tel)
	if err != nil {
		fmt.Fprintln(stderr, "sidecar:", err)
		return exitWrong
	}
	for _, text := range f.warnings {
		log.Warn("command line", "note", text)
	}
	if err := s.serve(ctx); err != nil {
		log.Error("cannot serve", "error", err)
		return exitFailed
	}
	return exitOK
}
