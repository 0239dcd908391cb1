// SPDX-License-Identifier: Apache-2.0

// Sidecar stands before a decode engine and takes the place of llm-d's: a scheduler names the prefill engine of each request in
// the header x-prefiller-host-port, the sidecar has it prefill, and the engine beside it decodes.
//
//	go run ./examples/sidecar --kv-connector=nixlv2 --secure-proxy=false --prefillers=10.0.0.1:8000,10.0.0.2:8000
//
// The README beside this file lists the flags. Exit codes: 0 after a drain, 1 when serving failed, 2 for a wrong command line.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	_ "github.com/pdkit/pdkit/connector/all" // the connectors that a flag may name
)

const (
	exitOK     = 0
	exitFailed = 1
	exitWrong  = 2
)

// Limits of a client's connection, as llm-d's sidecar has them, and of the drain. None is on a whole answer.
const (
	headerTimeout  = 30 * time.Second
	idleTimeout    = 300 * time.Second
	maxHeaderBytes = 1 << 20
	drainTimeout   = 60 * time.Second
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	code := run(ctx, os.Args[1:], os.Getenv, os.Stderr)
	stop()
	os.Exit(code)
}

// run is the program: it serves until ctx ends, drains, and returns its exit code.
func run(ctx context.Context, args []string, getenv func(string) string, stderr io.Writer) int {
	f, err := parseFlags(args, getenv, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	if err != nil {
		return exitWrong
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.level}))
	s, err := build(f, log)
	if err != nil {
		fmt.Fprintln(stderr, "sidecar:", err)
		return exitWrong
	}
	if err := s.serve(ctx); err != nil {
		log.Error("cannot serve", "error", err)
		return exitFailed
	}
	return exitOK
}

// serve serves until ctx ends, then lets what runs end, and cuts what does not.
func (s *sidecar) serve(ctx context.Context) error {
	defer s.close()
	if err := s.flow.Start(ctx); err != nil {
		return err
	}
	ln, err := net.Listen("tcp", ":"+strconv.Itoa(s.flags.port))
	if err != nil {
		return fmt.Errorf("cannot listen: %w", err)
	}
	addr := ln.Addr()
	if s.flags.secure {
		certificate, err := s.flags.certificate()
		if err != nil {
			_ = ln.Close()
			return err
		}
		ln = tls.NewListener(ln, &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: certificate})
	}
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	watching, stop := context.WithCancel(context.WithoutCancel(ctx)) // requests of the drain need the list too
	watched := make(chan struct{})
	go func() { defer close(watched); _ = s.set.Run(watching) }() // nil, since it runs once
	defer func() { stop(); <-watched }()

	failed := make(chan error, 1)
	go func() { failed <- server.Serve(ln) }()
	s.log.Info("serving", "listen", addr.String(), "tls", s.flags.secure, "connector", s.flow.Connector().Name())
	select {
	case err := <-failed:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	s.log.Info("draining", "atMost", drainTimeout.String())
	s.draining.Store(true)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
	defer cancel()
	err = errors.Join(s.flow.Shutdown(last), server.Shutdown(last))
	_ = server.Close()
	if serr := <-failed; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		s.log.Warn("drained, requests were cut")
	}
	return nil
}
