// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/flags"
	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
)

type checkCmd struct {
	Inputs        []string `arg:"" optional:"" placeholder:"INPUT" help:"${check_inputs}"`
	File          string   `short:"f" placeholder:"FILE" help:"${check_file}"`
	Server        string   `placeholder:"NAME" help:"The ModelServer's metadata.name, where FILE has several."`
	PID           []int    `name:"pid" placeholder:"PID" help:"A running engine on this machine."`
	AllLocal      bool     `help:"All engines that you run on this machine."`
	Command       []string `sep:"none" placeholder:"COMMAND" help:"${check_command}"`
	EngineVersion string   `placeholder:"VERSION" help:"${check_engine_version}"`
	JSON          bool     `name:"json" help:"Write the findings as JSON."`

	proc string // the folder /proc; tests use another
}

// Run reads all inputs and prints what does not fit together.
func (c *checkCmd) Run(s streams) error {
	version, err := launch.ParseVersion(c.EngineVersion)
	if err != nil {
		return fmt.Errorf("--engine-version: %w", err)
	}
	var spec *config.Spec
	if c.File != "" {
		m, err := readModel(c.File, c.Server, s.in)
		if err != nil {
			return err
		}
		spec = &m.spec
	}
	started, err := c.started(s)
	if err != nil {
		return err
	}
	var engines []flags.Engine
	for _, l := range started {
		e, ok, err := l.parse(version)
		if err != nil {
			return err
		}
		if ok {
			engines = append(engines, e)
		}
	}
	if len(engines) == 0 {
		return errors.New("no input starts an engine")
	}
	return c.report(s.out, engines, flags.Check(engines, spec))
}

// started collects the engines that all inputs start.
func (c *checkCmd) started(s streams) ([]launched, error) {
	var all []launched
	for _, file := range c.Inputs {
		data, err := readFile(file, s.in)
		if err != nil {
			return nil, err
		}
		list, err := readInput(file, data)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
	}
	for i, text := range c.Command {
		for _, l := range readCommands("command", text) {
			l.name = fmt.Sprintf("command %d", i+1)
			all = append(all, l)
		}
	}
	proc := cmp.Or(c.proc, "/proc")
	pids := c.PID
	if c.AllLocal {
		local, err := localEngines(proc, os.Getuid())
		if err != nil {
			return nil, err
		}
		pids = append(pids, local...)
	}
	for _, pid := range pids {
		l, err := readProcess(proc, pid)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	if len(c.Inputs)+len(c.Command)+len(c.PID) == 0 && !c.AllLocal {
		return nil, errors.New("name files, or use --pid, --all-local or --command")
	}
	return all, nil
}

// report prints the findings. It returns errFaults if one of them is an error.
func (c *checkCmd) report(out io.Writer, engines []flags.Engine, found []flags.Finding) error {
	count := map[flags.Severity]int{}
	for _, f := range found {
		count[f.Severity]++
	}
	if c.JSON {
		type finding struct {
			Severity flags.Severity `json:"severity"`
			Code     string         `json:"code"`
			Engines  []string       `json:"engines"`
			Text     string         `json:"text"`
			Remedy   string         `json:"remedy"`
		}
		list := make([]finding, len(found))
		for i, f := range found {
			list[i] = finding(f)
		}
		if err := writeJSON(out, list); err != nil {
			return err
		}
	} else {
		for _, f := range found {
			fmt.Fprintf(out, "%s %s\n  %s: %s\n  remedy: %s\n", f.Severity, f.Code, strings.Join(f.Engines, ", "),
				f.Text, f.Remedy)
		}
		if slices.ContainsFunc(engines, func(e flags.Engine) bool {
			return e.Program == "vllm" && e.Version == (launch.Version{})
		}) {
			fmt.Fprintf(out, "engines whose release is not told are taken for vLLM %s, the newest of %s "+
				"(--engine-version)\n", flags.Assumed, flags.AssumedDate)
		}
		fmt.Fprintf(out, "%s read: %s, %s\n", plural(len(engines), "engine"), plural(count[flags.Error], "error"),
			plural(count[flags.Warning], "warning"))
	}
	if count[flags.Error] > 0 {
		return errFaults
	}
	return nil
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
