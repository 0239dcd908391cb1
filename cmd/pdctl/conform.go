// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/conform"
)

type conformCmd struct {
	Cmd      string        `placeholder:"COMMAND" help:"${conform_cmd}"`
	Config   string        `placeholder:"FILE" type:"existingfile" help:"${conform_config}"`
	Setup    []string      `sep:"none" placeholder:"COMMAND" help:"${conform_setup}"`
	URL      string        `name:"url" placeholder:"URL" help:"${conform_url}"`
	Engines  int           `default:"18100" placeholder:"PORT" help:"${conform_engines}"`
	Ready    string        `default:"/health" placeholder:"PATH" help:"${conform_ready}"`
	Name     string        `placeholder:"NAME" help:"The gateway's name and version, for the report."`
	Only     []string      `placeholder:"PATTERN" help:"${conform_only}"`
	List     bool          `help:"Print the cases and end."`
	Format   string        `enum:"text,json,junit,html" default:"text" help:"text, json, junit or html."`
	JSON     bool          `name:"json" help:"The same as --format json; with --list, the cases as JSON."`
	Output   string        `short:"o" placeholder:"FILE" help:"${conform_output}"`
	Table    []string      `placeholder:"REPORT" type:"existingfile" help:"${conform_table}"`
	Parallel int           `default:"4" help:"How many cases run at a time, each with a gateway of its own."`
	Timeout  time.Duration `default:"30s" help:"How long one case may take."`
}

// Run runs the cases and writes the report.
func (c *conformCmd) Run(s streams) error {
	if len(c.Table) > 0 {
		return c.table(s)
	}
	cases, err := conform.Select(c.Only)
	if err != nil {
		return fmt.Errorf("--only: %w", err)
	}
	if c.JSON {
		c.Format = "json"
	}
	if c.List && c.JSON {
		return listCases(s.out, cases)
	}
	if c.List {
		for _, one := range cases {
			fmt.Fprintf(s.out, "%-6s  %-32s  %s\n", one.Severity, one.ID, one.Rule)
		}
		return nil
	}
	g, err := c.gateway(s)
	if err != nil {
		return err
	}
	ctx, stop := interruptible()
	defer stop()
	report, err := conform.Run(ctx, g, cases, conform.Options{Parallel: c.Parallel, Timeout: c.Timeout,
		Progress: func(r conform.Result) {
			if c.Output != "" {
				fmt.Fprint(s.out, r.Line())
			}
		}})
	if err != nil {
		return orInterrupted(ctx, err)
	}
	report.Gateway = c.Name
	if err := c.write(s, report); err != nil {
		return err
	}
	if report.Count(conform.Must, conform.Fail) > 0 {
		return errFaults
	}
	return nil
}

// listCases writes the cases as the reports have them, without results.
func listCases(out io.Writer, cases []conform.Case) error {
	type entry struct {
		ID       string           `json:"id"`
		Group    string           `json:"group"`
		Severity conform.Severity `json:"severity"`
		Rule     string           `json:"rule"`
	}
	list := make([]entry, len(cases))
	for i, one := range cases {
		list[i] = entry{one.ID, one.Group(), one.Severity, one.Rule}
	}
	return writeJSON(out, list)
}

func (c *conformCmd) write(s streams, report *conform.Report) error {
	if c.Output == "" {
		return conform.Formats[c.Format](report, s.out)
	}
	var b bytes.Buffer
	if err := conform.Formats[c.Format](report, &b); err != nil {
		return err
	}
	fmt.Fprintf(s.out, "\n%s\n", report.Summary())
	return os.WriteFile(c.Output, b.Bytes(), 0o600)
}

// gateway is what the flags name.
func (c *conformCmd) gateway(s streams) (conform.Gateway, error) {
	switch {
	case (c.Cmd == "") == (c.URL == ""):
		return nil, errors.New("name the gateway: --cmd starts it for each case, --url asks one that runs")
	case c.URL != "" && (c.Config != "" || len(c.Setup) > 0):
		return nil, errors.New("--config and --setup go with --cmd")
	}
	if c.URL != "" {
		var err error
		if c.URL, err = baseURL("--url", c.URL); err != nil {
			return nil, err
		}
		g := &conform.Running{URL: c.URL, ReadyPath: c.Ready, Announce: func(prefill, decode []string) {
			fmt.Fprintf(s.err, "pdctl: the gateway at %s must have the prefill engines %s and the decode engines %s\n",
				c.URL, strings.Join(prefill, " "), strings.Join(decode, " "))
		}}
		for i := range 4 {
			address := net.JoinHostPort("127.0.0.1", strconv.Itoa(c.Engines+i))
			if i < 2 {
				g.Prefill = append(g.Prefill, address)
			} else {
				g.Decode = append(g.Decode, address)
			}
		}
		return g, nil
	}
	g := &conform.Command{ReadyPath: c.Ready}
	var err error
	if g.Args, err = words(c.Cmd); err != nil {
		return nil, fmt.Errorf("--cmd: %w", err)
	}
	for _, text := range c.Setup {
		setup, err := words(text)
		if err != nil {
			return nil, fmt.Errorf("--setup: %w", err)
		}
		g.Setup = append(g.Setup, setup)
	}
	if c.Config != "" {
		text, err := os.ReadFile(c.Config)
		if err != nil {
			return nil, err
		}
		g.Config = string(text)
	}
	return g, nil
}

// words splits a command line as a shell does, without variables: quotes keep spaces.
func words(text string) ([]string, error) {
	var all []string
	var word strings.Builder
	quote, open := rune(0), false
	for _, r := range text {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, open = r, true
		case r == ' ' || r == '\t' || r == '\n':
			if open {
				all = append(all, word.String())
				word.Reset()
				open = false
			}
		default:
			word.WriteRune(r)
			open = true
		}
	}
	if open {
		all = append(all, word.String())
	}
	switch {
	case quote != 0:
		return nil, errors.New("a quote is not closed")
	case len(all) == 0:
		return nil, errors.New("it is empty")
	}
	return all, nil
}

// table joins reports that were written as JSON.
func (c *conformCmd) table(s streams) error {
	var reports []*conform.Report
	for _, name := range c.Table {
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		r := &conform.Report{}
		if err := json.Unmarshal(text, r); err != nil || len(r.Results) == 0 {
			return fmt.Errorf("%s is no report of --format json", name)
		}
		reports = append(reports, r)
	}
	return conform.Table(s.out, reports)
}
