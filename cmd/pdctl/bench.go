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
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
)

type benchCmd struct {
	URL      []string      `name:"url" aliases:"base-url" sep:"none" required:"" placeholder:"URL" help:"${bench_url}"`
	Model    string        `placeholder:"MODEL" help:"${bench_model}"`
	Rate     []float64     `aliases:"request-rate" placeholder:"N" help:"${bench_rate}"`
	Clients  []int         `aliases:"concurrency,max-concurrency,connections" placeholder:"N" help:"${bench_clients}"`
	Duration time.Duration `placeholder:"TIME" help:"${bench_duration}"`
	Requests int           `aliases:"num-prompts,request-count" placeholder:"N" help:"${bench_requests}"`

	Prompts      string `placeholder:"FILE" type:"existingfile" help:"${bench_prompts}"`
	PromptTokens int    `aliases:"random-input-len" default:"256" placeholder:"N" help:"${bench_prompt_tokens}"`
	PrefixTokens int    `default:"0" placeholder:"N" help:"${bench_prefix_tokens}"`
	Prefixes     int    `default:"1" placeholder:"N" help:"How many prefixes there are; each request draws one."`
	MaxTokens    int    `aliases:"random-output-len" default:"64" placeholder:"N" help:"${bench_max_tokens}"`
	API          string `name:"api" enum:"chat,completions" default:"chat" help:"${bench_api}"`
	IgnoreEOS    bool   `name:"ignore-eos" help:"${bench_ignore_eos}"`

	SLOTTFT time.Duration `name:"slo-ttft" placeholder:"TIME" help:"${bench_slo_ttft}"`
	SLOTPOT time.Duration `name:"slo-tpot" aliases:"slo-itl" placeholder:"TIME" help:"${bench_slo_tpot}"`
	SLOE2E  time.Duration `name:"slo-e2e" aliases:"slo-e2el" placeholder:"TIME" help:"${bench_slo_e2e}"`
	Seed    uint64        `placeholder:"N" help:"${bench_seed}"`
	Rounds  int           `default:"3" placeholder:"N" help:"${bench_rounds}"`
	Timeout time.Duration `default:"5m" placeholder:"TIME" help:"How long one request may take."`
	Header  []string      `sep:"none" placeholder:"'NAME: VALUE'" help:"${bench_header}"`

	JSON bool   `name:"json" help:"Write the report as JSON."`
	File string `name:"output" short:"o" aliases:"result-filename" placeholder:"FILE" help:"${bench_output}"`
	HTML string `name:"html" placeholder:"FILE" help:"Write the report with its plots as one page, too."`
	PNG  string `name:"png" placeholder:"FILE" help:"Write the plots as a picture, too."`
}

// Run sends the load and writes what was measured, also if it is interrupted.
func (c *benchCmd) Run(s streams) error {
	options, loads, err := c.options()
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
	if g, ok := options.Prompts.(measure.Generator); ok {
		options.Prompts = g.Sized(ctx, options)
	}
	report, err := c.measure(ctx, options, loads)
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
	case report.Stopped():
		return errInterrupted
	case report.Failed() > 0:
		return errFaults
	}
	return nil
}

// result is a report of one load, or the curve of several.
type result interface {
	Text(io.Writer) error
	JSON(io.Writer) error
	HTML(io.Writer) error
	PNG(io.Writer) error
	Failed() int
	Stopped() bool
}

func (c *benchCmd) measure(ctx context.Context, o measure.Options, loads []measure.Load) (result, error) {
	if len(loads) > 1 {
		return measure.Sweep(ctx, o, loads)
	}
	o.Load = loads[0]
	return measure.Run(ctx, o)
}

func (c *benchCmd) write(s streams, report result) error {
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
	}{{c.File, report.JSON}, {c.HTML, report.HTML}, {c.PNG, report.PNG}} {
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

// options checks the flags. Several loads are a sweep.
func (c *benchCmd) options() (o measure.Options, loads []measure.Load, err error) {
	switch {
	case len(c.URL) > 2:
		return o, nil, errors.New("--url can be given twice, to compare two targets")
	case (len(c.Rate) == 0) == (len(c.Clients) == 0):
		return o, nil, errors.New("name the load: --rate for an open loop, or --clients for a closed one")
	case c.Requests < 0 || min(c.Duration, c.Timeout, c.SLOTTFT, c.SLOTPOT, c.SLOE2E) < 0:
		return o, nil, errors.New("a number, a duration and an SLO cannot be negative")
	case c.PromptTokens < 1 || c.PrefixTokens < 0 || c.Prefixes < 1 || c.MaxTokens < 1 || c.Rounds < 1:
		return o, nil, errors.New("--prompt-tokens, --prefixes, --max-tokens and --rounds are at least 1, " +
			"--prefix-tokens 0")
	}
	load := measure.Load{Duration: c.Duration, Requests: c.Requests}
	if c.Duration == 0 && c.Requests == 0 {
		load.Duration = 30 * time.Second
	}
	for _, rate := range c.Rate {
		if !(rate > 0) || math.IsInf(rate, 0) { // so written, NaN is refused
			return o, nil, errors.New("--rate is a number of requests a second above 0, or several with commas")
		}
		load.Rate = rate
		loads = append(loads, load)
	}
	for _, clients := range c.Clients {
		if clients < 1 {
			return o, nil, errors.New("--clients is a number from 1 on, or several with commas")
		}
		load.Clients = clients
		loads = append(loads, load)
	}
	for _, text := range c.URL {
		base, err := baseURL("--url", text)
		if err != nil {
			return o, nil, err
		}
		o.Targets = append(o.Targets, measure.Target{URL: base, Model: c.Model})
	}
	o.SLO = measure.SLO{TTFT: c.SLOTTFT, TPOT: c.SLOTPOT, E2E: c.SLOE2E}
	o.Rounds, o.Timeout = c.Rounds, c.Timeout
	for o.Seed = c.Seed; o.Seed == 0; {
		o.Seed = uint64(rand.Uint32()) //nolint:gosec // a load, no secret; 32 bits are easy to type again
	}
	if o.Header, err = headers(c.Header); err != nil {
		return o, nil, err
	}
	o.Prompts, err = c.prompts(o.Seed)
	return o, loads, err
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

// firstModel asks a server for the models that it serves. Errors name the server.
func firstModel(ctx context.Context, base string, header http.Header) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	name := measure.WithoutSecrets(base)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, measure.Address(base, "/v1/models"), http.NoBody)
	if err != nil {
		return "", errors.New("--url is no URL; write one like http://127.0.0.1:8000")
	}
	req.Header = header
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%s does not answer: %s", name, measure.Reason(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPicture))
	model := gjson.GetBytes(body, "data.0.id").Str
	switch {
	case err != nil:
		return "", fmt.Errorf("%s/v1/models: the response broke off: %s", name, measure.Reason(err))
	case resp.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%s/v1/models: status %d; name a model with --model, a key with --header", name,
			resp.StatusCode)
	case model == "":
		return "", fmt.Errorf("%s/v1/models lists no model: name one with --model", name)
	}
	if strings.ContainsFunc(model, unicode.IsControl) { // it would reach the terminal
		return "", fmt.Errorf("%s/v1/models: control characters in the model's name: name one with --model", name)
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
