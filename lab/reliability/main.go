// SPDX-License-Identifier: Apache-2.0

// Command reliability tries to break cmd/gateway, and checks every response by that of an engine that serves
// alone. Run it from the repository's root:
//
//	go run ./lab/reliability chaos -for 10m -o docs/reliability/chaos.md
//	go run ./lab/reliability soak -o docs/reliability/soak.md
//	go run ./lab/reliability streams -o docs/reliability/streams.md
//
// Engines are simulated (enginesim) and real in what counts here: each is a process, moves KV over TCP, and
// makes each token from the KV that it holds, so that wrong KV gives wrong text.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "reliability:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return errors.New("want one of chaos, soak and streams")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	out := flags.String("o", "", "write the report to this file too")
	seed := func() *uint64 {
		return flags.Uint64("seed", uint64(time.Now().UnixNano()), "of the faults and the requests")
	}
	var measure func(ctx context.Context) (result, error)
	switch args[0] {
	case "engine":
		return runEngine(os.Stdin, os.Stdout)
	case "namespace": // asks whether a namespace can be had
		w, err := newWire()
		if err != nil {
			return err
		}
		if _, err = w.host(2); err == nil {
			w.close()
		}
		return err
	case "chaos":
		length := flags.Duration("for", time.Minute, "how long faults are played")
		workers := flags.Int("clients", 4, "clients of each order")
		seed := seed()
		measure = func(ctx context.Context) (result, error) {
			wired := true
			if err := inNamespace(); errors.Is(err, errNoNamespace) {
				wired = false
				fmt.Fprintln(os.Stderr, "no fault of the network is played:", err)
			} else if err != nil {
				return nil, err
			}
			return runChaos(ctx, *length, *workers, *seed, wired)
		}
	case "soak":
		requests := flags.Int("requests", 50_000, "how many")
		workers := flags.Int("clients", 24, "requests at a time")
		seed := seed()
		measure = func(ctx context.Context) (result, error) { return runSoak(ctx, *requests, *workers, *seed) }
	case "streams":
		open := flags.Int("n", 8000, "streams through a gateway process, at a time")
		inMemory := flags.Int("memory", 10_000, "streams through a handler in this process, over no network; 0: none")
		tokens := flags.Int("tokens", 40, "of each stream, one in 2 s")
		measure = func(ctx context.Context) (result, error) { return runStreams(ctx, *open, *inMemory, *tokens) }
	default:
		return fmt.Errorf("unknown command %q", args[0])
	}
	_ = flags.Parse(args[1:]) // it ends the program itself
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := measure(ctx)
	if err != nil {
		return err
	}
	return errors.Join(publish(*out, r.report), r.err())
}

// result is what came of a run.
type result interface {
	report(w io.Writer)
	err() error // what was not as it must be
}

// publish writes a report to standard output, and to a file if one is named.
func publish(file string, report func(io.Writer)) error {
	report(os.Stdout)
	if file == "" {
		return nil
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	report(f)
	return f.Close()
}
