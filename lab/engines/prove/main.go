// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command prove runs two real vLLM engines with NixlConnector, and cmd/gateway in front of them. It proves that
// both engines serve a request: the text is that of one engine alone, and the decode engine took the prompt's KV from
// the prefill engine instead of computing it.
//
//	prove [flags] [CONNECTOR]             CONNECTOR is the gateway's kvConnector.type, nixl if left out
//	prove -encode [flags]                 prove the encode stage, with an encode engine more and with images
//	prove -rescue [flags]                 break streams after each of their tokens: they go on byte for byte
//	prove -verify [flags] [CONNECTOR...]  let pdctl verify judge each connector that runs on a CPU
//	prove -today [flags]                  the same for some: those of each day, and those whose turn it is
//	prove -attest [flags]                 flip bytes of KV in ExampleConnector's files: synthetic probes find it
//	prove -wire [flags] [RECORDING...]    compare the engines' responses with the recorded ones
//
// It exits with 0 if all is proven, with 1 if it is not, and with 2 if it could not try. Start it with prove.sh, which
// installs the engines.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/pdkit/pdkit/lab/internal/proc"
)

// errNotProven says that the proof ran and something was wrong. The table has already shown what.
var errNotProven = errors.New("not proven")

func main() {
	var o options
	flag.StringVar(&o.script, "engine", "lab/engines/engine.sh", "the script that becomes an engine")
	flag.StringVar(&o.gateway, "gateway", "", "the gateway's binary (default: build cmd/gateway)")
	flag.StringVar(&o.logs, "logs", "", "folder that keeps logs and configurations (default: a temporary one, "+
		"removed at the end)")
	for name, usage := range map[string]string{
		"verify": "let pdctl verify judge CONNECTOR..., or all that run on a CPU, each with engines launched as the " +
			"connector renders them",
		"today": "like -verify, for the connectors that are proven each day, and for those to which the day of the " +
			"year turns",
		"rescue": "prove that streams outlive their decode engine, byte for byte",
		"encode": "prove the encode stage instead, with images",
		"attest": "flip bytes of KV in ExampleConnector's files instead, and let synthetic probes find it",
		"wire": "replay docs/protocols/recordings, or those of the named connectors, or those whose names begin like " +
			"nixl/25, and print where a response has another shape than the recorded one",
	} {
		flag.BoolFunc(name, usage, func(string) error {
			o.mode = name
			return nil
		})
	}
	flag.BoolVar(&o.all, "all", false, "also show that connector http is found out, and play the faults; with -wire, "+
		"also replay the recordings that need engines of their own")
	flag.Parse()
	o.named = flag.Args()
	if o.mode == "today" {
		o.mode, o.named = "verify", today(time.Now().UTC().YearDay())
		fmt.Printf("today: %s\nall: lab/engines/prove.sh -verify, or ./test.sh -real-all; one: "+
			"lab/engines/prove.sh -verify CONNECTOR\n\n", strings.Join(o.named, ", "))
	}
	if flag.NArg() > 1 && o.mode != "verify" && o.mode != "wire" {
		fmt.Fprintln(os.Stderr, "prove: one connector at a time")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o)
	stop()
	switch {
	case err == nil && o.mode == "wire":
		fmt.Println("SAME")
	case err == nil:
		fmt.Println("PROVEN")
	case errors.Is(err, errDifferent):
		fmt.Println("DIFFERENT")
		os.Exit(1)
	case errors.Is(err, errNotProven):
		fmt.Println("NOT PROVEN")
		os.Exit(1)
	default:
		fmt.Fprintln(os.Stderr, "prove:", err)
		os.Exit(2)
	}
}

type options struct {
	script, gateway, logs string
	mode                  string   // a flag's name; "": the proof of one connector
	named                 []string // connectors, or recordings
	all                   bool
}

func run(ctx context.Context, o options) (err error) {
	lab := &lab{gateway: o.gateway, dir: o.logs}
	if lab.script, err = filepath.Abs(o.script); err != nil { // engines run in folders of their own
		return err
	}
	if lab.dir == "" {
		if lab.dir, err = os.MkdirTemp("", "pdkit-engines-"); err != nil {
			return err
		}
		defer os.RemoveAll(lab.dir)
	} else if err := os.MkdirAll(lab.dir, 0o750); err != nil {
		return err
	}
	if lab.gateway == "" && o.mode != "wire" && o.mode != "attest" {
		if lab.gateway, err = proc.Build(ctx, lab.dir, proc.Gateway); err != nil {
			return err
		}
	}
	if lab.reaper, err = startReaper(); err != nil {
		return err
	}
	defer lab.close()
	switch o.mode {
	case "wire":
		return (&wire{lab: lab, all: o.all, names: o.named, out: os.Stdout}).run(ctx)
	case "verify":
		if _, err := proc.Build(ctx, lab.dir, "github.com/pdkit/pdkit/cmd/pdctl"); err != nil {
			return err
		}
		return verifyAll(ctx, lab, o.named)
	case "encode":
		return proveEncode(ctx, lab)
	case "rescue":
		return proveRescue(ctx, lab, os.Stdout)
	case "attest":
		return proveAttestation(ctx, lab)
	}

	begin := time.Now()
	engines, err := lab.startEngines(ctx, engineOptions{role: "prefill"}, engineOptions{role: "decode"})
	if err != nil {
		return err
	}
	fmt.Printf("prefill and decode engine ready after %.0f s\n\n", time.Since(begin).Seconds())
	p, d := engines[0], engines[1]

	proven := prove(ctx, lab, append(o.named, "nixl")[0], p, d)
	if !o.all {
		return proven
	}
	if errors.Is(proven, errNotProven) || proven == nil {
		return errors.Join(proven, refute(ctx, lab, p, d), playFaults(ctx, lab, p, d))
	}
	return proven
}
