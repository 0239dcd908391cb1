// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// flags are the command line. Listen and admin override the file where they are given, "" for admin included.
type flags struct {
	flagSettings
	config        string
	listen, admin *string
	level         slog.Level
	check         bool
	trace         string
	version       bool // print the version and end
}

// parseFlags reads the command line. The error has been written to stderr; it is flag.ErrHelp or cmdline.ErrWrong.
func parseFlags(args []string, stderr io.Writer) (flags, error) {
	var f flags
	fs := flag.NewFlagSet("gateway", flag.ContinueOnError)
	fs.StringVar(&f.config, "config", "",
		"the configuration `FILE`: a YAML stream of one Gateway and any number of ModelServers")
	fs.Func("listen", "the `ADDR` for clients, in place of spec.listen (127.0.0.1:8000)",
		func(s string) error { f.listen = &s; return nil })
	fs.Func("admin", "the `ADDR` for operators, in place of spec.admin (127.0.0.1:9000); \"\" turns it off",
		func(s string) error { f.admin = &s; return nil })
	fs.TextVar(&f.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	fs.BoolVar(&f.check, "check", false, "check the configuration, print what it means, and end")
	fs.StringVar(&f.trace, "trace", "", "write the spans of each request to `FILE` as JSON lines")
	fs.StringVar(&f.recording.folder, "record-decisions", "",
		"record the decisions of spec.decision in `FOLDER`, for pdctl replay; \"\": nowhere")
	f.recording.share = 1
	fs.Func("record-share", "the `SHARE` of conversations that is recorded (default 1)", func(s string) (err error) {
		f.recording.shared = true
		f.recording.share, err = strconv.ParseFloat(s, 64)
		return err
	})
	fs.BoolVar(&f.pprof, "pprof", false, "serve Go's profiles under /debug/pprof/ of the admin address")
	fs.StringVar(&f.genAI, "gen-ai", "", "also record metrics by OpenTelemetry's conventions for generative AI, "+
		"with `PROVIDER` as gen_ai.provider.name: vllm, sglang …")
	fs.DurationVar(&f.syntheticProbe, "synthetic-probe", 0,
		"check at this `PERIOD` that decode engines reuse KV (metric pd_reuse_ratio); 0: never")
	fs.DurationVar(&f.inspect, "inspect", 0,
		"ask engines at this `PERIOD` for what their list lacks: model, version, data-parallel ranks; 0: never")
	fs.Func("engine-key-file", "send the key in `FILE` with what the gateway itself asks engines that have --api-key "+
		"(clients' requests have their own); the file is read again when it changes", func(s string) (err error) {
		f.engineKey, err = transport.KeyFile(s)
		return err
	})
	fs.Func("pick", "the `POLICY` by which pairs are chosen: "+strings.Join(pick.Policies(), ", ")+
		" (default round-robin), or kv (spec.kvEvents; prefix for a model without); session=HEADER and zone=ZONE "+
		"name theirs",
		func(s string) (err error) {
			if f.pickKV = s == "kv"; f.pickKV {
				s = "prefix"
			}
			f.pick, err = pick.ParsePolicy(s)
			return err
		})
	fs.Func("http-client", "the `CLIENT` that speaks HTTP/1.1 to the engines: own (default) or nethttp, which is "+
		"net/http's", func(s string) error {
		if f.netHTTP = s == "nethttp"; !f.netHTTP && s != "own" {
			return errors.New("must be own or nethttp")
		}
		return nil
	})
	fs.BoolVar(&f.version, "version", false, "print the version and end")
	err := cmdline.Parse(fs, args, stderr)
	switch {
	case err != nil:
	case fs.NArg() > 0:
		err = cmdline.Wrong(fs, stderr, fmt.Sprintf("unexpected argument %q", fs.Arg(0)))
	case f.config == "" && !f.version:
		err = cmdline.Wrong(fs, stderr, "-config FILE is missing")
	}
	return f, err
}

// read reads a content of the configuration file under the command line.
func (f flags) read(data []byte) (*configuration, error) {
	cfg, err := parse(f.config, data)
	if err == nil {
		err = f.override(cfg)
	}
	return cfg, err
}

// override lays the command line over the file's Gateway.
func (f flags) override(cfg *configuration) error {
	g := &cfg.gateway
	cfg.flagSettings = f.flagSettings
	var errs []error
	for _, period := range []struct {
		flag string
		of   time.Duration
	}{{"-synthetic-probe", f.syntheticProbe}, {"-inspect", f.inspect}} {
		if period.of < 0 {
			errs = append(errs, &config.FieldError{Path: period.flag, Problem: "is negative",
				Remedy: "write a period like 1m, or 0 for never"})
		}
	}
	f.recording.note(cfg)
	if f.listen != nil {
		g.Listen = *f.listen
		errs = append(errs, checkAddress("-listen", g.Listen))
	}
	if f.admin != nil {
		g.Admin = *f.admin
		if g.Admin != "" {
			errs = append(errs, checkAddress("-admin", g.Admin))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if clash(g.Listen, g.Admin) {
		return &config.FieldError{Path: "-admin", Problem: "is the address of listen too",
			Remedy: "give it another port"}
	}
	return nil
}
