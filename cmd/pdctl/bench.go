// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
)

type benchCmd struct {
	URL      []string      `name:"url" sep:"none" required:"" placeholder:"URL" help:"${bench_url}"`
	Model    string        `placeholder:"MODEL" help:"${bench_model}"`
	Rate     float64       `placeholder:"N" help:"${bench_rate}"`
	Clients  int           `placeholder:"N" help:"${bench_clients}"`
	Duration time.Duration `placeholder:"TIME" help:"How long to load each target; 30s without --requests."`
	Requests int           `placeholder:"N" help:"How many requests to send to each target."`

	Prompts      string `placeholder:"FILE" type:"existingfile" help:"${bench_prompts}"`
	PromptTokens int    `default:"256" placeholder:"N" help:"${bench_prompt_tokens}"`
	PrefixTokens int    `default:"0" placeholder:"N" help:"${bench_prefix_tokens}"`
	Prefixes     int    `default:"1" placeholder:"N" help:"How many prefixes there are; each request draws one."`
	MaxTokens    int    `default:"64" placeholder:"N" help:"The longest response, in tokens."`
	API          string `name:"api" enum:"chat,completions" default:"chat" help:"${bench_api}"`
	IgnoreEOS    bool   `name:"ignore-eos" help:"${bench_ignore_eos}"`

	SLOTTFT time.Duration `name:"slo-ttft" placeholder:"TIME" help:"${bench_slo_ttft}"`
	SLOITL  time.Duration `name:"slo-itl" placeholder:"TIME" help:"${bench_slo_itl}"`
	Seed    uint64        `placeholder:"N" help:"${bench_seed}"`
	Rounds  int           `default:"3" placeholder:"N" help:"${bench_rounds}"`
	Timeout time.Duration `default:"5m" placeholder:"TIME" help:"How long one request may take."`
	Header  []string      `sep:"none" placeholder:"'NAME: VALUE'" help:"${bench_header}"`

	JSON bool   `name:"json" help:"Write the report as JSON."`
	HTML string `name:"html" placeholder:"FILE" help:"Write the report with its plots as one page, too."`
	PNG  string `name:"png" placeholder:"FILE" help:"Write the plots as a picture, too."`
}

// Run sends the load and writes what was measured, also if it is interrupted.
func (c *benchCmd) Run(s streams) error {
	options, err := c.options()
	if err != nil {
		return err
	}
	ctx, stop := interruptible()
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends pdctl at once
	for i := range options.Targets {
		t := &options.Targets[i]
		if t.Model == "" {
			if t.Model, err = firstModel(ctx, t.URL, options.Header); err != nil {
				return orInterrupted(ctx, err)
			}
		}
	}
	if terminal(s.err) {
		options.Progress = func(p measure.Progress) { _, _ = io.WriteString(s.err, progressBar(p)) }
	}
	report, err := measure.Run(ctx, options)
	if options.Progress != nil {
		_, _ = io.WriteString(s.err, "\r\x1b[K")
	}
	if err != nil {
		return err
	}
	if err := c.write(s, report); err != nil {
		return err
	}
	switch {
	case report.Interrupted:
		return errInterrupted
	case report.Failed() > 0:
		return errFaults
	}
	return nil
}

func (c *benchCmd) write(s streams, report *measure.Report) error {
	write := report.Text
	if c.JSON {
		write = report.JSON
	}
	if err := write(s.out); err != nil {
		return err
	}
	for _, file := range []struct {
		name  string
		write func(io.Writer) error
	}{{c.HTML, report.HTML}, {c.PNG, report.PNG}} {
		if file.name == "" {
			continue
		}
		var b bytes.Buffer
		if err := file.write(&b); err != nil {
			return err
		}
		if err := os.WriteFile(file.name, b.Bytes(), 0o600); err != nil {
			return err
		}
	}
	return nil
}

// options checks the flags.
func (c *benchCmd) options() (o measure.Options, err error) {
	switch {
	case len(c.URL) > 2:
		return o, errors.New("--url can be given twice, to compare two targets")
	case (c.Rate == 0) == (c.Clients == 0):
		return o, errors.New("name the load: --rate for an open loop, or --clients for a closed one")
	case math.IsNaN(c.Rate) || math.IsInf(c.Rate, 0):
		return o, errors.New("--rate is a number of requests a second")
	case c.Rate < 0 || c.Clients < 0 || c.Requests < 0 || min(c.Duration, c.Timeout, c.SLOTTFT, c.SLOITL) < 0:
		return o, errors.New("a rate, a number, a duration and an SLO cannot be negative")
	case c.PromptTokens < 1 || c.PrefixTokens < 0 || c.Prefixes < 1 || c.MaxTokens < 1 || c.Rounds < 1:
		return o, errors.New("--prompt-tokens, --prefixes, --max-tokens and --rounds are at least 1, --prefix-tokens 0")
	}
	for _, text := range c.URL {
		u, err := url.Parse(text)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return o, errors.New("--url is no URL; write one like http://127.0.0.1:8000")
		}
		o.Targets = append(o.Targets, measure.Target{URL: text, Model: c.Model})
	}
	o.Load = measure.Load{Rate: c.Rate, Clients: c.Clients, Duration: c.Duration, Requests: c.Requests}
	if c.Duration == 0 && c.Requests == 0 {
		o.Load.Duration = 30 * time.Second
	}
	o.SLO = measure.SLO{TTFT: c.SLOTTFT, ITL: c.SLOITL}
	o.Rounds, o.Timeout = c.Rounds, c.Timeout
	for o.Seed = c.Seed; o.Seed == 0; {
		o.Seed = uint64(rand.Uint32()) //nolint:gosec // a load, no secret; 32 bits are easy to type again
	}
	if o.Header, err = headers(c.Header); err != nil {
		return o, err
	}
	o.Prompts, err = c.prompts(o.Seed)
	return o, err
}

func (c *benchCmd) prompts(seed uint64) (measure.Prompts, error) {
	if c.Prompts != "" {
		f, err := os.Open(c.Prompts)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		prompts, err := measure.ReadPrompts(f, c.MaxTokens)
		if err != nil {
			return nil, fmt.Errorf("--prompts: %w", err)
		}
		return prompts, nil
	}
	path := measure.Chat
	if c.API == "completions" {
		path = measure.Completions
	}
	return measure.Generator{Seed: seed, Path: path, Prefixes: c.Prefixes, PrefixTokens: c.PrefixTokens,
		PromptTokens: c.PromptTokens, MaxTokens: c.MaxTokens, IgnoreEOS: c.IgnoreEOS}, nil
}

// firstModel asks a server for the models that it serves.
func firstModel(ctx context.Context, base string, header http.Header) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, measure.Address(base, "/v1/models"), http.NoBody)
	if err != nil {
		return "", errors.New("--url is no URL; write one like http://127.0.0.1:8000")
	}
	req.Header = header
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", errors.New("a target does not answer: is --url right?")
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPicture))
	model := gjson.GetBytes(body, "data.0.id").Str
	if err != nil || resp.StatusCode != http.StatusOK || model == "" {
		return "", errors.New("a target does not list its models (/v1/models): name one with --model")
	}
	if strings.ContainsFunc(model, unicode.IsControl) { // it would reach the terminal
		return "", errors.New("a target's model has control characters in its name: name one with --model")
	}
	return model, nil
}

// progressBar overwrites the line of a terminal.
func progressBar(p measure.Progress) string {
	const width = 30
	done := int(p.Done * width)
	return fmt.Sprintf("\r[%s%s] %3.0f %%  %s, %d failed, %d in flight\x1b[K", strings.Repeat("#", done),
		strings.Repeat(" ", width-done), 100*p.Done, plural(p.Ended, "request"), p.Failed, p.InFlight)
}
